"""Stochastic gradient descent, with or without momentum."""

from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, Signed
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking
from functional_lowbit.transforms._chain import chain, identity
from functional_lowbit.transforms._scale import scale_by_learning_rate


class TraceState(NamedTuple):
    """A decaying sum of gradients."""

    step: Tensor  # int64[]; updates made so far
    trace: Signed  # float32, like params; decaying sum of g


@speaking("trace")
def trace(decay: Hyper, nesterov: bool = False) -> GradientTransformation:
    """Replace updates by their decaying sum (heavy-ball momentum).

    Args:
        decay: Decay per step of the sum, in [0, 1].
        nesterov: Look one step ahead.

    Raises:
        TypeError, ValueError: for a decay that is no number or negative.

    References:
        optax.trace; Sutskever et al., 2013, https://proceedings.mlr.press/v28/sutskever13.html.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.trace(0.5)
        >>> _, state = tx.update(torch.ones(1), tx.init(torch.zeros(1)))
        >>> tx.update(torch.ones(1), state)[0]
        tensor([1.5000])
    """
    refuse.hyperparameter("decay", decay, at_least=0.0)
    return leafwise(
        _nesterov if nesterov else _heavy_ball, state=TraceState, hyperparams={"decay": decay}, name="trace"
    )


def _heavy_ball(g: Tensor, s: TraceState, p: Tensor, c: Any) -> tuple[Tensor, TraceState]:
    total = g + c.decay * s.trace
    return total, s._replace(trace=total)


def _nesterov(g: Tensor, s: TraceState, p: Tensor, c: Any) -> tuple[Tensor, TraceState]:
    total = g + c.decay * s.trace
    return g + c.decay * total, s._replace(trace=total)


def sgd(learning_rate: Hyper, momentum: Hyper | None = None, nesterov: bool = False) -> GradientTransformation:
    """Gradient descent.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        momentum: Decay per step of the momentum, in [0, 1]; none, if None.
        nesterov: Look one step ahead in the momentum.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.sgd.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.sgd(0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)))[0]
        tensor([-0.1000])
    """
    return chain(
        identity() if momentum is None else trace(momentum, nesterov),
        scale_by_learning_rate(learning_rate),
    )
