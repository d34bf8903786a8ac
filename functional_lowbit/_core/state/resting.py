"""How and where a new moment rests: in float32, beside its parameter or elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.contract.base import Moment
from functional_lowbit.sharding import ShardSpec, local_of, wrap

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
