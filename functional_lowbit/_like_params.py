"""What is shaped and sharded like parameters: updates, moved to where those rest, and new moments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _check, _tree
from functional_lowbit._base import Moment, Tree
from functional_lowbit.sharding import ShardSpec, local_of, wrap


def as_sharded(u: Tensor, p: Tensor) -> tuple[Tensor, ShardSpec | None]:
    """An update with its parameter's mesh and placements. A gradient that rests otherwise is moved there."""
    spec = ShardSpec.of(p)
    if spec is not None and tuple(u.placements) != spec.placements:  # type: ignore[attr-defined]
        u = u.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
    return u, spec


def like_params(speaker: str, updates: Tree, params: Tree) -> Tree:
    """Updates with the sharding of their parameters, for what looks at the whole tree before the leaf functions do."""
    leaves, treedef = _tree.flatten(params)
    us = _check.same_structure(speaker, "updates", treedef, updates)
    _check.updates(speaker, _tree.names(treedef), us, leaves)
    return _tree.unflatten(
        treedef, [None if u is None else as_sharded(u, p)[0] for u, p in zip(us, leaves, strict=True)]
    )


_place: ContextVar[Callable[[Any], Any] | None] = ContextVar("place", default=None)


@contextmanager
def placing(place: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, each new moment is handed to `place` as soon as it is made, so that it may rest elsewhere."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def placed(moment: Any) -> Any:
    """A new moment, a tensor or a `QuantizedTensor`, where it is to rest: beside its parameter, unless `placing`."""
    place = _place.get()
    return moment if place is None else place(moment)


def is_pinned(x: Tensor) -> bool:
    """Whether this rank's part lies in memory of the CPU that a device can reach by itself."""
    local = local_of(x)
    return local.device.type == "cpu" and local.is_pinned()


def pinned(x: Tensor) -> Tensor:
    """A copy in such memory, sharded alike."""
    local = local_of(x)
    return wrap(torch.empty_like(local, device="cpu", pin_memory=True).copy_(local), ShardSpec.of(x))


def rest_in_float32(field: str, moment: Moment, path: str, param: Tensor, value: Callable[[], Tensor] | None) -> Tensor:
    """Keep a new moment as float32, shaped and sharded like its parameter, whatever the default dtype."""
    local = local_of(param)
    if value is None:
        first = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
    else:
        first = value().detach().to(torch.float32, copy=True)
        if hasattr(first, "device_mesh"):
            return placed(first)
    return placed(wrap(first, ShardSpec.of(param)))
