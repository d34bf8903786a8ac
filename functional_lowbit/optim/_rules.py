"""The transformations of the ready classes: functions of what a param group holds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.transforms._adam import scale_by_adam
from functional_lowbit.transforms._chain import chain
from functional_lowbit.transforms._decay import add_decayed_weights
from functional_lowbit.transforms._lion import scale_by_lion
from functional_lowbit.transforms._low_bit import FormatChoice, Where, low_bit
from functional_lowbit.transforms._scale import scale, scale_by_learning_rate
from functional_lowbit.transforms._sgd import TraceState


def with_floats(rule: Callable[..., GradientTransformation], /, **values: Any) -> GradientTransformation:
    """A rule's transformation, with floats where a group holds tensors, so that each has its range."""
    return rule(**{name: tuple(map(_float, x)) if name == "betas" else _float(x) for name, x in values.items()})


def _float(x: Any) -> Any:
    return float(x) if isinstance(x, Tensor) else x


@speaking("adamw")
def adamw(lr: float, betas: Any, eps: float, weight_decay: float, **how: Any) -> GradientTransformation:
    """Adam with decoupled decay, as torch.optim.AdamW."""
    return _stored([scale_by_adam(betas[0], betas[1], eps), add_decayed_weights(weight_decay)], lr, **how)


@speaking("adam")
def adam(lr: float, betas: Any, eps: float, weight_decay: float, **how: Any) -> GradientTransformation:
    """Adam whose decay is added to the gradient, as torch.optim.Adam."""
    return _stored([add_decayed_weights(weight_decay), scale_by_adam(betas[0], betas[1], eps)], lr, **how)


@speaking("lion")
def lion(lr: float, betas: Any, weight_decay: float, **how: Any) -> GradientTransformation:
    """Lion, with decoupled decay."""
    return _stored([scale_by_lion(*betas), add_decayed_weights(weight_decay)], lr, **how)


@speaking("sgd")
def sgd(
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, **how: Any
) -> GradientTransformation:
    """SGD whose decay is added to the gradient, as torch.optim.SGD. Without momentum there is no buffer."""
    if not isinstance(nesterov, bool):
        raise WrongType(f"nesterov must be a bool, got {nesterov!r}")
    if nesterov and (momentum == 0 or dampening != 0):
        raise WrongValue(f"nesterov=True needs momentum > 0 and dampening = 0, got {momentum} and {dampening}")
    inner = [add_decayed_weights(weight_decay)]
    if momentum != 0:
        inner.append(damped_trace(momentum, dampening, nesterov))
    return _stored(inner, lr, **how)


@speaking("sgd")
def damped_trace(momentum: float, dampening: float, nesterov: bool = False) -> GradientTransformation:
    """Replace updates by a decaying sum that the first one enters whole, and later ones by 1 - dampening.

    Args:
        momentum: Decay per step of the sum, >= 0.
        dampening: Part of each update but the first that is left out.
        nesterov: Look one step ahead.

    References:
        torch.optim.SGD. There a parameter's first gradient is meant, here the first step.
    """
    refuse.hyperparameter("momentum", momentum, at_least=0.0)
    refuse.hyperparameter("dampening", dampening)
    return leafwise(
        _look_ahead if nesterov else _sum_up,
        state=TraceState,
        hyperparams={"momentum": momentum, "dampening": dampening},
        scalars=_part_that_enters,
        name="damped_trace",
    )


def _part_that_enters(s: TraceState, h: Any) -> dict[str, Tensor]:
    return {"fresh": torch.where(s.step == 0, torch.ones_like(h.dampening), 1 - h.dampening)}


def _sum_up(g: Tensor, s: TraceState, p: Tensor, c: Any) -> tuple[Tensor, TraceState]:
    total = c.momentum * s.trace + c.fresh * g
    return total, s._replace(trace=total)


def _look_ahead(g: Tensor, s: TraceState, p: Tensor, c: Any) -> tuple[Tensor, TraceState]:
    total = c.momentum * s.trace + c.fresh * g
    return g + c.momentum * total, s._replace(trace=total)


def _stored(
    inner: list[GradientTransformation],
    lr: float,
    *,
    maximize: bool,
    format: FormatChoice,
    block_size: int | None,
    min_size: int,
    where: Where | None,
) -> GradientTransformation:
    """The rule in front of its learning rate, with moments in few bits."""
    refuse.hyperparameter("lr", lr, at_least=0.0)
    tx = chain(*([scale(-1.0)] if maximize else []), *inner, scale_by_learning_rate(lr))
    return low_bit(tx, format, block_size=block_size, min_size=min_size, where=where)
