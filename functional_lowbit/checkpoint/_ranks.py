"""Errors that all ranks raise together, so that none waits for one that has given up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from functional_lowbit._refused import NoAccess, NotThere, Refused, WrongState, WrongType, WrongValue

T = TypeVar("T")
KINDS: dict[type[Exception], type[Refused]] = {
    FileNotFoundError: NotThere,
    OSError: NoAccess,
    TypeError: WrongType,
    ValueError: WrongValue,
    Exception: WrongState,
}


def here() -> bool:
    """Whether there are ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def together(action: Callable[[], T], group: Any = None) -> T:
    """`action()` on every rank. If it raises on one, all raise: their own error, or that of the lowest such rank."""
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if here():
        errors: list[Refused | None] = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(errors, _sent(error), group=group)
        except Exception as lost:
            raise (error or WrongState(f"another rank ended, or did not come: {lost}")) from lost
        for rank, theirs in enumerate(errors):
            if theirs is not None and error is None:
                error = type(theirs)(f"{theirs.reason} (on rank {rank})", theirs.leaf, theirs.speaker)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def of_all(value: Any, group: Any = None) -> list[Any]:
    """What each rank gives, in order of ranks."""
    if not here():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except Exception as lost:
        raise WrongState(f"another rank ended, or did not come: {lost}") from lost
    return values


def same(what: str, value: Any, group: Any = None) -> None:
    """Refuse, on all ranks, what is not the same on all.

    Raises:
        ValueError: with the first rank whose value differs from that of rank 0.
        RuntimeError: if another rank ended, or did not come.
    """
    values = of_all(value, group)
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    if other is not None:
        raise WrongValue(f"{what} must be the same on all ranks, but differs on ranks 0 and {other}")


def _sent(error: Exception | None) -> Refused | None:
    """What other ranks are told of an error, whose own class they may not have."""
    if error is None or isinstance(error, Refused):
        return error
    return next(kind for python, kind in KINDS.items() if isinstance(error, python))(str(error))


def number() -> int | None:
    """This rank's, or None if there are no ranks. Rank 0, or None, makes and renames folders."""
    return dist.get_rank() if here() else None


_gloo: list[Any] = []  # [the world that it was made in, the group]


def own_group() -> Any:
    """A gloo group for what runs beside the training: collectives of two threads must not meet in one group.

    Made at the first call, which every rank has to make.
    """
    if not here():
        return None
    if not _gloo or _gloo[0] is not dist.group.WORLD:
        _gloo[:] = [dist.group.WORLD, dist.new_group(backend="gloo")]
    return _gloo[1]
