"""apply_if_finite: leave a step out if a gradient is NaN or Inf."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Number, call_update
from functional_lowbit._core.state.like_params import like_params
from functional_lowbit._core.state.parts import Gated, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, local_of, part_of, wrap
from functional_lowbit.sharding._collectives import sum_over_meshes_


class ApplyIfFiniteState(NamedTuple):
    """How often steps were left out; the same on every rank."""

    notfinite_count: Number  # int64[]; non-finite gradients in a row
    last_finite: Number  # bool[]; whether the last gradient was finite
    total_notfinite: Number  # int64[]; non-finite gradients in all
    inner_state: Any


class ApplyIfFinite(Gated):
    """The `update` of `apply_if_finite`."""

    state_class = ApplyIfFiniteState
    name = "apply_if_finite"

    def __init__(self, inner: GradientTransformation, max_consecutive_errors: int):
        self.inner = (inner,)
        self.max_consecutive_errors = max_consecutive_errors

    def init_state(self, params: Tree, rest: Rest) -> ApplyIfFiniteState:
        """The inner state, and counters at 0."""
        return ApplyIfFiniteState(
            notfinite_count=torch.zeros((), dtype=torch.int64, device="cpu"),
            last_finite=torch.ones((), dtype=torch.bool, device="cpu"),
            total_notfinite=torch.zeros((), dtype=torch.int64, device="cpu"),
            inner_state=init_with(self.inner[0], params, rest),
        )

    def decide(self, updates: Tree, state: Any) -> tuple[Tensor, Any]:
        """Whether this step is made (bool[]), and the state with its counters moved on."""
        finite = all_finite(updates).to(state.last_finite.device)
        count = torch.where(finite, 0, state.notfinite_count + 1)
        apply = finite | (count > self.max_consecutive_errors)
        return apply, state._replace(
            notfinite_count=count,
            last_finite=finite,
            total_notfinite=state.total_notfinite + torch.where(finite, 0, 1),
        )

    @speaking("apply_if_finite.update")
    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update, or zeros and the old inner state."""
        inner_state = self.split(state)[0]
        if params is not None:
            updates = like_params(updates, params)
        apply, counted = self.decide(updates, state)
        new_updates, new_inner = call_update(self.inner[0].update, updates, inner_state, params, extra)
        kept = _select(apply, new_updates, _optree.map_leaves(torch.zeros_like, new_updates))
        return kept, counted._replace(inner_state=_select(apply, new_inner, inner_state))


def _select(apply: Tensor, new: Tree, old: Tree) -> Tree:
    """The new or the old tree, shard by shard."""

    def pick(n: Any, o: Any) -> Any:
        if not isinstance(n, Tensor):
            return n if bool(apply) else o
        return wrap(torch.where(apply, part_of(n), part_of(o)), ShardSpec.of(o))

    return _optree.map_leaves(pick, new, old)


def all_finite(tree: Tree) -> Tensor:
    """Whether no element of any leaf is NaN or Inf, on any rank: bool[], the same on every rank.

    All ranks must call it together. Replicas are asked each, so that they leave a step out together also if only one of
    them has a NaN.
    """
    leaves = _optree.leaves(tree)
    if not leaves:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return sum_over_meshes_(_not_finite([local_of(x) for x in leaves]), [ShardSpec.of(x) for x in leaves]) == 0


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """int64[]: how many local tensors hold a NaN or an Inf. The largest magnitude is NaN if any element is."""
    device = tensors[0].device
    finite = [torch.linalg.vector_norm(x.detach(), float("inf")).isfinite().to(device) for x in tensors if x.numel()]
    if not finite:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (~torch.stack(finite)).sum()


@speaking("apply_if_finite")
def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int = 5) -> GradientTransformation:
    """Leave a step out if a gradient has a NaN or an Inf: updates are 0, and the inner state stays as it is.

    After more than `max_consecutive_errors` non-finite gradients in a row, updates are applied all the same, so that
    the failure shows. With sharded gradients, all ranks decide together and count alike.

    Args:
        inner: The transformation.
        max_consecutive_errors: Steps in a row that may be left out, >= 0.

    Raises:
        TypeError: if `inner` is no GradientTransformation.
        ValueError: for a number of errors that is no int or below 0.

    References:
        optax.apply_if_finite (which has no default for the number of errors).

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.apply_if_finite(fl.sgd(0.1))
        >>> updates, state = tx.update(torch.tensor([float("nan"), 1.0]), tx.init(torch.zeros(2)))
        >>> updates, state.total_notfinite
        (tensor([0., 0.]), tensor(1))
    """
    refuse.transformation("inner", inner)
    if not isinstance(max_consecutive_errors, int) or max_consecutive_errors < 0:
        raise WrongValue(f"max_consecutive_errors must be an int of at least 0, got {max_consecutive_errors!r}")
    return ApplyIfFinite(inner, max_consecutive_errors).transformation()
