"""Statistics in a state: for each leaf, what is left of it when some dimensions are reduced."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_lowbit._core.contract.base import Statistic
from functional_lowbit._refused import WrongValue
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.sharding._collectives import reduced


def spec_of(statistic: Statistic, leaf: Tensor) -> tuple[tuple[int, ...], ShardSpec | None]:
    """(global shape, spec) of a leaf's statistic."""
    dims = statistic.dims(leaf.shape)
    spec = ShardSpec.of(leaf)
    return tuple(1 if d in dims else n for d, n in enumerate(leaf.shape)), None if spec is None else reduced(spec, dims)


def first(field: str, path: str, statistic: Statistic, leaf: Tensor, value: Callable[[], Tensor] | None) -> Tensor:
    """A new statistic: zeros, or this rank's part as `init` made it."""
    shape, spec = spec_of(statistic, leaf)
    local_shape = shape if spec is None else spec.local_shape()
    if value is None:
        return wrap(torch.zeros(local_shape, dtype=torch.float32, device=local_of(leaf).device), spec)
    made = value().detach().to(torch.float32, copy=True)
    if tuple(made.shape) != local_shape:
        raise WrongValue(
            f"init returned {field!r} of shape {tuple(made.shape)} for {path!r}, but the statistic's shape is "
            f"{local_shape}",
            path,
        )
    return wrap(made, spec)


def check(field: str, path: str, statistic: Statistic, leaf: Tensor, value: object) -> None:
    """Refuse the statistic of another leaf.

    Raises:
        ValueError: for another shape, dtype or sharding.
    """
    shape, spec = spec_of(statistic, leaf)
    expected = f"float32 of shape {shape}" + ("" if spec is None else f", sharded {spec.placements}")
    got = type(value).__name__
    if isinstance(value, Tensor):
        of = ShardSpec.of(value)
        dtype = str(value.dtype).removeprefix("torch.")
        got = f"{dtype} of shape {tuple(value.shape)}" + ("" if of is None else f", sharded {of.placements}")
    if got == expected and spec is not None and spec.mesh != ShardSpec.of(value).mesh:  # type: ignore[union-attr]
        got, expected = f"{got} on {ShardSpec.of(value).mesh}", f"{expected} on {spec.mesh}"  # type: ignore[union-attr]
    if got != expected:
        rule = f"must be a statistic, {expected}, got {got}"
        raise WrongValue.at(
            f"state.{field}", path, f"{rule}; make the state with init(params) after the parameters are sharded"
        )
