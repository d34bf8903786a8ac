"""The leaf whose function is running, for what is called inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from functional_lowbit._core.leafwise.guard import Guard
from functional_lowbit.sharding import ShardSpec


@dataclass(frozen=True)
class Leaf:
    """The leaf that a function with `reduces=True` is given a part of."""

    path: str
    shape: tuple[int, ...]  # of this rank's part
    spec: ShardSpec | None
    guard: Guard | None  # entered while the function's own code runs


CURRENT: ContextVar[Leaf | None] = ContextVar("leaf", default=None)


@contextmanager
def inside(leaf: Leaf | None) -> Iterator[None]:
    """While a leaf's function runs."""
    token = CURRENT.set(leaf)
    try:
        yield
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
