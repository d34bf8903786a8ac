"""The leaf whose function is running, for what is called inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from functional_lowbit._guard import Guard, MixesElements, name_of
from functional_lowbit.sharding import ShardSpec


@dataclass
class Leaf:
    """The leaf that a function with `reduces=True` is given a part of."""

    path: str
    shape: tuple[int, ...]  # of this rank's part
    spec: ShardSpec | None
    guard: Guard | None  # entered while the function's own code runs


CURRENT: ContextVar[Leaf | None] = ContextVar("leaf", default=None)


@contextmanager
def inside(leaf: Leaf, speaker: str, function: object) -> Iterator[None]:
    """While a leaf's function runs; with a guard, what it does to its tensors is watched.

    Raises:
        ValueError: if the function combines elements of this rank's part by itself.
    """
    token = CURRENT.set(leaf)
    try:
        if leaf.guard is None:
            yield
            return
        try:
            with leaf.guard:
                yield
        except MixesElements as mixes:
            raise ValueError(
                f"{speaker}: the leaf function {name_of(function)} calls {mixes} at {leaf.path!r}, which combines "  # type: ignore[arg-type]
                "elements of this rank's part alone, or moves them; use fl.reduce.sum, mean, norm or max, or have the "
                "function given whole leaves with leafwise(..., elementwise=False)"
            ) from None
    finally:
        CURRENT.reset(token)


@contextmanager
def unwatched() -> Iterator[Leaf | None]:
    """The current leaf, while its guard looks away."""
    leaf = CURRENT.get()
    if leaf is None or leaf.guard is None:
        yield leaf
        return
    leaf.guard.__exit__(None, None, None)
    try:
        yield leaf
    finally:
        leaf.guard.__enter__()
