"""What several test files need: trees of random tensors, copies, and comparison bit for bit."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import functional_lowbit as fl


def leaves(tree: Any) -> list[Any]:
    """All leaves, the codes and scales of stored moments among them."""
    return [x for x in pytree.tree_leaves(tree) if x is not None]


def clone(tree: Any) -> Any:
    """A tree with tensors of its own, strides kept."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def same(a: Any, b: Any) -> bool:
    """Whether two trees have one structure, and their tensors equal dtypes, shapes and bits (NaN is equal to NaN)."""
    a_leaves, a_spec = pytree.tree_flatten(a)
    b_leaves, b_spec = pytree.tree_flatten(b)
    return a_spec == b_spec and all(_same_leaf(x, y) for x, y in zip(a_leaves, b_leaves, strict=True))


def _same_leaf(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x is y or x == y
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def bits(x: Tensor) -> Tensor:
    """The number's bits as integers; -0.0 counts as 0.0, and all NaNs are one."""
    if not x.is_floating_point():
        return x
    x = torch.where(x == 0, torch.zeros((), dtype=x.dtype), x).contiguous()
    x = torch.where(x.isnan(), torch.full((), float("nan"), dtype=x.dtype), x)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def refuses(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """The call raises, with exactly this text."""
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


def random_like(tree: Any, seed: int, dtype: torch.dtype | None = None) -> Any:
    """Normal numbers in the shapes of a tree, the same for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return pytree.tree_map(
        lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float32).to(dtype or x.dtype), tree
    )


class Averaged(NamedTuple):
    """The state of `averaged`."""

    mean: fl.Signed


def averaged() -> fl.GradientTransformation:
    """A plain (init, update) pair as a user would write it, with a declared moment."""

    def update(updates: Any, state: Averaged, params: Any = None) -> tuple[Any, Averaged]:
        mean = fl.tree.map(lambda m, u: 0.9 * m + 0.1 * u.float(), state.mean, updates)
        return fl.tree.map(lambda m, u: m.to(u.dtype), mean, updates), Averaged(mean)

    return fl.GradientTransformation(lambda params: Averaged(fl.tree.zeros_like(params, torch.float32)), update)


class Queue(NamedTuple):
    """The state of `delayed`: plain buffers, no moments."""

    last: Any
    before: Any


def delayed() -> fl.GradientTransformation:
    """A plain pair that hands each update on two steps later: its new state is made of tensors of the old one."""

    def update(updates: Any, state: Queue, params: Any = None) -> tuple[Any, Queue]:
        return state.before, Queue(updates, state.last)

    return fl.GradientTransformation(
        lambda params: Queue(fl.tree.zeros_like(params), fl.tree.zeros_like(params)), update
    )


def run_pure(tx: fl.GradientTransformation, params: Any, grads: list[Any], state: Any = None) -> tuple[Any, Any]:
    """Params and state after some steps of the pure update."""
    state = tx.init(params) if state is None else state
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = fl.apply_updates(params, updates)
    return params, state


def run_step(step: Callable[..., Any], params: Any, grads: list[Any], state: Any) -> tuple[Any, Any]:
    """Params and state after some steps of a compiled step."""
    for g in grads:
        params, state = step(g, state, params)
    return params, state
