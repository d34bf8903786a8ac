"""Errors that all ranks raise together, so that none waits for one that has given up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from functional_lowbit._refused import kind_of

T = TypeVar("T")
KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, OSError, FileNotFoundError, RuntimeError)}


def here() -> bool:
    """Whether there are ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def together(speaker: str, action: Callable[[], T], group: Any = None) -> T:
    """`action()` on every rank. If it raises on one, all raise: their own error, or that of the lowest such rank.

    Raises:
        RuntimeError: if another rank ended, or did not come.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if here():
        texts: list[Any] = [None] * dist.get_world_size(group)
        mine = None if error is None else (_kind(error), str(error))
        try:
            dist.all_gather_object(texts, mine, group=group)
        except Exception as lost:
            raise (error or RuntimeError(f"{speaker}: another rank ended, or did not come: {lost}")) from lost
        rank, first = next(((rank, text) for rank, text in enumerate(texts) if text is not None), (0, None))
        if error is None and first is not None:
            raise KINDS[first[0]](f"{first[1]} (on rank {rank})")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def of_all(speaker: str, value: Any, group: Any = None) -> list[Any]:
    """What each rank gives, in order of ranks.

    Raises:
        RuntimeError: if another rank ended, or did not come.
    """
    if not here():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except Exception as lost:
        raise RuntimeError(f"{speaker}: another rank ended, or did not come: {lost}") from lost
    return values


def same(speaker: str, what: str, value: Any, group: Any = None) -> None:
    """Refuse, on all ranks, what is not the same on all.

    Raises:
        ValueError: with the first rank whose value differs from that of rank 0.
        RuntimeError: if another rank ended, or did not come.
    """
    values = of_all(speaker, value, group)
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    if other is not None:
        raise ValueError(f"{speaker}: {what} must be the same on all ranks, but differs on ranks 0 and {other}")


def _kind(error: Exception) -> str:
    return next(name for name in (kind_of(error), "OSError", "ValueError", "RuntimeError") if _fits(error, name))


def _fits(error: Exception, name: str) -> bool:
    return name == "RuntimeError" or (name in KINDS and isinstance(error, KINDS[name]))


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
