"""A state of ours leaf by leaf in another format: the same leaves under the same names, so that it loads as before."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit import formats
from functional_lowbit._core.contract.base import Moment
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, encode
from functional_lowbit.checkpoint._reading import joined, write_again
from functional_lowbit.cli._numbers import take
from functional_lowbit.cli._output import Mistake
from functional_lowbit.cli._sections import Leaf
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.transforms._low_bit import LowBit

MOMENTS = ("mu", "nu", "trace")  # fields that the recipes in few bits keep in few bits; accumulators stay as they are
MIN_SIZE = 4096  # as of `fl.low_bit`


class Made(NamedTuple):
    """A leaf that was made of another."""

    leaf: Any
    before: str  # its format
    after: str
    bytes_before: int
    bytes_after: int
    error: float  # norm of the difference over the norm; 0 where nothing changed


class Target(NamedTuple):
    """What is asked for."""

    format: formats.Format
    block_size: int | None
    min_size: int

    def layout(self, shape: tuple[int, ...], signed: bool, min_size: int) -> Layout | None:
        """How `fl.low_bit` would keep a moment of this shape; None for float32."""
        rule = LowBit(fl.identity(), self.format, self.block_size, min_size, None)
        like = torch.empty(shape, dtype=torch.float32, device="meta")
        return rule.layout("", Moment(signed), "", like)


def reformat(leaf: Leaf, target: Target) -> Made:
    """A leaf of ours as the target wants it; what is no moment stays as it is.

    Raises:
        Broken: for a part that cannot be read.
        Mistake: for a leaf that is a rank's shard.
    """
    described = leaf.described or {}
    parts = {ending: take(x) for ending, x in leaf.parts.items()}
    if any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise Mistake(f"leaf {leaf.path!r} is one rank's shard; save with fl.checkpoint.save, and convert that")
    nbytes = sum(x.nbytes for x in parts.values() if isinstance(x, Tensor))
    if described["kind"] != "quantized":
        return _of_plain(leaf, described, parts[""], nbytes, target)
    stored, before = joined("convert", leaf.path, described, parts), described["format"]
    values = stored.dequantize() if isinstance(stored, QuantizedTensor) else stored
    layout = target.layout(tuple(described["shape"]), described["signed"], 0)  # it was chosen to rest in few bits
    if layout is None:
        return Made(values.clone(), before, "float32", nbytes, values.nbytes, 0.0)
    if isinstance(stored, QuantizedTensor) and stored.layout._replace(threshold=layout.threshold) == layout:
        return Made(stored, before, before, nbytes, stored.nbytes, 0.0)
    return _made(write_again(values, layout), values, before, nbytes)


def _of_plain(leaf: Leaf, described: Mapping[str, Any], value: Any, nbytes: int, target: Target) -> Made:
    name, layout = described["parts"][""], None
    if leaf.role == "moment" and leaf.field in MOMENTS and name == "float32":
        layout = target.layout(tuple(value.shape), described["signed"], target.min_size)
    if layout is None:
        return Made(value, name, name, nbytes, nbytes, 0.0)
    return _made(encode(value, layout), value, name, nbytes)


def _made(new: QuantizedTensor, values: Tensor, before: str, nbytes: int) -> Made:
    return Made(new, before, new.format.name, nbytes, new.nbytes, relative_error(new.dequantize(), values))


def relative_error(new: Tensor, old: Tensor) -> float:
    """Norm of the difference over the norm, of the finite numbers; 0 for a leaf of zeros."""
    old, new = old.detach().double().flatten(), new.detach().double().flatten()
    finite = old.isfinite() & new.isfinite()
    norm = float(old[finite].norm())
    return float((new - old)[finite].norm()) / norm if norm else 0.0
