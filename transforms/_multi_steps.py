"""multi_steps: accumulate the gradients of several mini-steps, and make one step of them."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import Counter, GradientTransformation, Moment, Number, Signed, call_update
from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.parts import HostGated, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, part_of, wrap

EveryK: TypeAlias = int | Callable[[Tensor], int | Tensor]
"""Mini-steps for each step: a number, or a function of `gradient_step`, int64[]."""


class MultiStepsState(NamedTuple):
    """Where in a cycle of mini-steps it is, and what they have accumulated."""

    mini_step: Number  # int64[]; gradients accumulated since the last step, 0 to k - 1
    gradient_step: Counter  # int64[]; steps of the inner transformation made so far
    inner_opt_state: Any
    acc_grads: Signed  # float32, like params; mean or sum of the gradients since then. None if k is the number 1
    skip_state: Any = ()  # optax's; nothing is skipped here


class MultiSteps(HostGated):
    """The `update` of `multi_steps`."""

    state_class = MultiStepsState
    name = "multi_steps"
    inner_field = "inner_opt_state"

    def __init__(self, inner: GradientTransformation, every_k: EveryK, use_grad_mean: bool):
        self.inner = (inner,)
        self.every_k = every_k
        self.use_grad_mean = use_grad_mean
        self.accumulates = every_k != 1
        self.rule = Leafwise(
            name="multi_steps",
            update_leaf=(_mean if use_grad_mean else _sum) if self.accumulates else _pass,
            state_class=MultiStepsState,
            moments={"acc_grads": Moment(signed=True)} if self.accumulates else {},
            statistics={},
            hyperparams={},
            scalars=self._count,
            prepare=None,
            init_leaf=None,
            init_shared={},
            elementwise=True,
            reduces=False,
            needs_params=False,
        )

    def structure(self) -> Any:
        """Whether there is an accumulator."""
        return self.accumulates

    @speaking("multi_steps.init")
    def init_state(self, params: Tree, rest: Rest) -> MultiStepsState:
        """Counters at 0, an accumulator of zeros, and the inner state."""
        leaves, treedef = _optree.flatten(params)
        paths = _optree.names(treedef)
        fits.params(paths, leaves)
        acc_grads = None
        if self.accumulates:
            moment = self.rule.moments["acc_grads"]
            kept = [rest("acc_grads", moment, path, p, None) for path, p in zip(paths, leaves, strict=True)]
            acc_grads = _optree.unflatten(treedef, kept)
        return MultiStepsState(
            mini_step=torch.zeros((), dtype=torch.int64, device="cpu"),
            gradient_step=torch.zeros((), dtype=torch.int64, device="cpu"),
            inner_opt_state=init_with(self.inner[0], params, rest),
            acc_grads=acc_grads,
        )

    def opens(self, state: Any) -> bool:
        """Whether this mini-step completes a step."""
        return int(state.mini_step) + 1 >= self._k(state.gradient_step)

    def missed(self, moment: Tensor, state: Any) -> Tensor:
        """As with a gradient of zeros; what is left of a step before this one goes, if it is NaN too."""
        if not self.accumulates:
            return moment
        if int(state.mini_step) == 0 or self.opens(state):
            return torch.zeros_like(moment)
        return moment - moment / (int(state.mini_step) + 1) if self.use_grad_mean else moment

    @speaking("multi_steps")
    def _k(self, gradient_step: Tensor) -> int:
        """Mini-steps of the step that is being made."""
        k = self.every_k(gradient_step) if callable(self.every_k) else self.every_k
        if isinstance(k, Tensor) and k.ndim == 0 and not k.is_floating_point() and k.dtype != torch.bool:
            k = int(k)
        if isinstance(k, int) and _is_count(k):
            return k
        raise WrongValue(
            f"every_k_schedule must return an int of at least 1, got {k!r} at gradient_step {int(gradient_step)}"
        )

    def _count(self, s: Any, h: Any) -> dict[str, Tensor]:
        """What the leaf function is given, and how the counters go on."""
        n = s.mini_step + 1
        completes = n >= self._k(s.gradient_step)
        return {
            "n": n,
            "begins": s.mini_step == 0,
            "goes_on": ~completes,
            "mini_step": torch.where(completes, 0, n),
            "gradient_step": s.gradient_step + completes,
        }

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update of what was accumulated, or zeros."""
        inner_state, opens = self.split(state)[0], self.opens(state)
        given = updates
        updates, new = self.rule(updates, state, params)
        new = new._replace(acc_grads=self._with_missed(given, new.acc_grads, state))
        if not opens:
            return _optree.map_leaves(torch.zeros_like, updates), new
        updates, inner_state = call_update(self.inner[0].update, updates, inner_state, params, extra)
        return updates, self.join(new, [inner_state])

    def _with_missed(self, updates: Tree, acc_grads: Tree, state: Any) -> Tree:
        """The accumulator, where leaves without a gradient have their share of zeros."""
        leaves, treedef = _optree.flatten(acc_grads)
        given = _optree.flatten_up_to(treedef, updates) if self.accumulates else []
        for i, u in enumerate(given):
            if u is None:
                leaves[i] = wrap(self.missed(part_of(leaves[i]), state), ShardSpec.of(leaves[i]))
        return _optree.unflatten(treedef, leaves)


def _mean(g: Tensor, s: MultiStepsState, p: Any, c: Any) -> tuple[Tensor, MultiStepsState]:
    mean = torch.where(_begins(g, c), g, s.acc_grads + (g - s.acc_grads) / c.n)  # Welford's
    return mean, s._replace(acc_grads=mean * c.goes_on)


def _sum(g: Tensor, s: MultiStepsState, p: Any, c: Any) -> tuple[Tensor, MultiStepsState]:
    total = torch.where(_begins(g, c), g, g + s.acc_grads)
    return total, s._replace(acc_grads=total * c.goes_on)


def _begins(g: Tensor, c: Any) -> Tensor:
    """Whether a step begins, so that what is left of a NaN is not read.

    It is asked of each element: a condition on a number is a jump to gcc, which then takes elements one by one.
    """
    return c.begins + 0.0 * g > 0


def _pass(g: Tensor, s: MultiStepsState, p: Any, c: Any) -> tuple[Tensor, MultiStepsState]:
    return g, s


def _is_count(k: Any) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


@speaking("multi_steps")
def multi_steps(
    tx: GradientTransformation, every_k_schedule: EveryK, use_grad_mean: bool = True
) -> GradientTransformation:
    """Accumulate gradients over k calls, the mini-steps, and make one step of `tx` with their mean.

    Updates are zeros at the mini-steps before the last one of each step. There a compiled step runs nothing of `tx`,
    and touches no parameters if nothing adds to the zeros behind it. Mini-steps and steps are counted on the CPU.

    Args:
        tx: The transformation. It is given the mean at every k-th call, in the gradients' dtype.
        every_k_schedule: k, at least 1; or a function of `gradient_step` (int64[], steps made so far) that returns it.
            The int 1 accumulates nothing and takes no memory.
        use_grad_mean: The mean of the gradients, or their sum.

    Returns:
        A transformation with a `MultiStepsState`. `low_bit(multi_steps(tx, k))` stores the accumulator in few bits as
        any other moment, and rounds it at each mini-step; `multi_steps(low_bit(tx), k)`, or a format for each field
        without `acc_grads`, keeps it in float32. A gradient of None counts as zeros; at a last mini-step it leaves its
        leaf out of the step, and what the leaf has accumulated is dropped.

    Raises:
        TypeError: if `tx` is no GradientTransformation.
        ValueError: for a k that is no int or below 1, here or when the function returns it.

    References:
        optax.MultiSteps, without `should_skip_update_fn`: `apply_if_finite` around it leaves out a mini-step.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.multi_steps(fl.sgd(1.0), every_k_schedule=2), torch.zeros(1)
        >>> first, state = tx.update(torch.tensor([1.0]), tx.init(params))
        >>> second, state = tx.update(torch.tensor([3.0]), state)
        >>> first, second, state.gradient_step
        (tensor([0.]), tensor([-2.]), tensor(1))
    """
    refuse.transformation("tx", tx)
    if not callable(every_k_schedule) and not _is_count(every_k_schedule):
        raise WrongValue(
            "every_k_schedule must be an int of at least 1, or a function of gradient_step to one, got "
            f"{every_k_schedule!r}"
        )
    return MultiSteps(tx, every_k_schedule, use_grad_mean).transformation()
