"""The bits of a whole tree with one collective: `world.fingerprint` takes one for each tensor, which adds up."""

from typing import Any

import torch
import torch.distributed as dist
import world as w
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec, local_of


def bits(tree: Any) -> dict[str, Any]:
    """As `world.of_state`; every rank must call it. Replicas that differ are an error."""
    flat = fl.state_dict(tree)
    parts: list[Any] = [None]
    mine = {name: (_offset(x), local_of(x).contiguous()) for name, x in flat.items() if _is_dtensor(x)}
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    return {
        name: (x.dtype, tuple(x.shape), tuple(x.stride()), w.digest(_whole(name, x, parts)))
        if isinstance(x, Tensor)
        else x
        for name, x in flat.items()
    }


def _whole(name: str, x: Tensor, parts: list[Any]) -> Tensor:
    if not _is_dtensor(x):
        return x
    whole = torch.zeros(x.shape, dtype=x.dtype)
    seen = torch.zeros(x.shape, dtype=torch.bool)
    for part in parts:
        offset, local = part[name]
        if local.numel():
            where = tuple(slice(first, first + n) for first, n in zip(offset, local.shape, strict=True))
            assert not seen[where].any() or w.digest(whole[where]) == w.digest(local), f"replicas of {name} differ"
            whole[where], seen[where] = local, True
    assert seen.all()
    return whole


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, Tensor) and ShardSpec.of(x) is not None


def _offset(x: Tensor) -> tuple[int, ...]:
    spec = ShardSpec.of(x)
    assert spec is not None
    return spec.local_offset()
