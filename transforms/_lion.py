"""Lion: step by the sign of an interpolated momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, Signed
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking
from functional_lowbit.transforms._chain import chain
from functional_lowbit.transforms._decay import add_decayed_weights
from functional_lowbit.transforms._masked import Mask
from functional_lowbit.transforms._scale import scale_by_learning_rate


class ScaleByLionState(NamedTuple):
    """Momentum of the gradient."""

    step: Tensor  # int64[]; updates made so far
    mu: Signed  # float32, like params; running mean of g


@speaking("scale_by_lion")
def scale_by_lion(b1: Hyper = 0.9, b2: Hyper = 0.99) -> GradientTransformation:
    """Replace updates by the sign of a mean of momentum and gradient.

    Args:
        b1: Weight of the momentum in the step, in [0, 1).
        b2: Decay per step of the momentum, in [0, 1).

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        Chen et al., 2023, https://arxiv.org/abs/2302.06675, Program 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_lion()
        >>> tx.update(torch.tensor([0.3, -7.0]), tx.init(torch.zeros(2)))[0]
        tensor([ 1., -1.])
    """
    for name, value in (("b1", b1), ("b2", b2)):
        refuse.hyperparameter(name, value, at_least=0.0, below=1.0)
    return leafwise(
        _lion,
        state=ScaleByLionState,
        hyperparams={"b1": b1, "b2": b2},
        scalars=_complements,
        name="scale_by_lion",
    )


def _complements(s: ScaleByLionState, h: Any) -> dict[str, Tensor]:
    return {"a1": 1 - h.b1, "a2": 1 - h.b2}


def _lion(g: Tensor, s: ScaleByLionState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByLionState]:
    u = torch.sign(c.b1 * s.mu + c.a1 * g)
    return u, s._replace(mu=c.b2 * s.mu + c.a2 * g)


def lion(
    learning_rate: Hyper, b1: Hyper = 0.9, b2: Hyper = 0.99, weight_decay: Hyper = 1e-3, mask: Mask | None = None
) -> GradientTransformation:
    """Lion with decoupled weight decay.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        b1: Weight of the momentum in the step, in [0, 1).
        b2: Decay per step of the momentum, in [0, 1).
        weight_decay: Fraction of the parameter, >= 0; multiplied by the learning rate.
        mask: Which leaves decay: a tree of bools, a function of params to one, or of path and leaf. All, if None.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.lion; Chen et al., 2023, https://arxiv.org/abs/2302.06675.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.lion(0.1, weight_decay=0.0)
        >>> params = torch.ones(1)
        >>> tx.update(torch.ones(1), tx.init(params), params)[0]
        tensor([-0.1000])
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
