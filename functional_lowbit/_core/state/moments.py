"""Moments that are stored, read into float32, and stored again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.parts import map_moments
from functional_lowbit._core.state.quantized import QuantizedTensor, encode
from functional_lowbit.sharding import ShardSpec, local_of, wrap


def read_moments(state: Any) -> Any:
    """The state with every moment in float32."""
    return map_moments(lambda field, moment, tree: _optree.map_stored(lambda at: _read(at.node), tree), state)


def changed(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    """A leaf of a moment, stored or not, with a function applied to this rank's part of it in float32."""
    read = _read(leaf)
    old = local_of(read)
    new = function(old)
    if new is old:
        return leaf
    return store_again(leaf, new, read) if isinstance(leaf, QuantizedTensor) else wrap(new, ShardSpec.of(leaf))


def _read(leaf: Any) -> Any:
    return leaf.dequantize() if isinstance(leaf, QuantizedTensor) else leaf


def store_again(old: Any, new: Any, read: Any) -> Any:
    """Store a new moment. A block that did not change keeps its codes: not every format writes what it read again."""
    if not isinstance(old, QuantizedTensor):
        return new
    if new is read:
        return old
    new, read = local_of(new), local_of(read)
    fresh = encode(new, old.layout)
    if old.format.codec(old.layout.signed).idempotent or new.numel() == 0:
        return fresh
    changed = old.layout.local_grid().to_blocks(new != read).any(dim=-1, keepdim=True)
    codes, scales = fresh.local_blocks()
    old_codes, old_scales = old.local_blocks()
    assert scales is not None
    assert old_scales is not None
    return old.layout.store(torch.where(changed, codes, old_codes), torch.where(changed, scales, old_scales))
