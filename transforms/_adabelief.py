"""AdaBelief: divide by how far gradients are from what their mean said."""

from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, NonNegative, Signed
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking
from functional_lowbit.formats._exact import sqrt
from functional_lowbit.transforms._chain import chain
from functional_lowbit.transforms._scale import scale_by_learning_rate


class ScaleByBeliefState(NamedTuple):
    """Running moments of the gradient."""

    step: Tensor  # int64[]; updates made so far
    mu: Signed  # float32, like params; running mean of g
    nu: NonNegative  # float32, like params, >= 0; running mean of (g - mu)**2


@speaking("scale_by_belief")
def scale_by_belief(
    b1: Hyper = 0.9, b2: Hyper = 0.999, eps: Hyper = 1e-16, eps_root: Hyper = 1e-16, *, nesterov: bool = False
) -> GradientTransformation:
    """Rescale updates by the bias-corrected mean of the gradient, and the distance of gradients from it.

    Args:
        b1: Decay per step of the mean, in [0, 1).
        b2: Decay per step of the mean squared distance, in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        eps_root: Added to the mean squared distance at each step; in units of the squared gradient.
        nesterov: Look one step ahead in the mean.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.scale_by_belief; Zhuang et al., 2020, https://arxiv.org/abs/2010.07468, Algorithm 2.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_belief()
        >>> tx.update(torch.tensor([10.0, -0.1]), tx.init(torch.zeros(2)))[0]
        tensor([ 1.1111, -1.1111])
    """
    for name, value, below in (("b1", b1, 1.0), ("b2", b2, 1.0), ("eps", eps, None), ("eps_root", eps_root, None)):
        refuse.hyperparameter(name, value, 0.0, *([below] if below else []))
    return leafwise(
        _nesterov if nesterov else _belief,
        state=ScaleByBeliefState,
        hyperparams={"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root},
        scalars=_bias_corrections,
        name="scale_by_belief",
    )


def _bias_corrections(s: ScaleByBeliefState, h: Any) -> dict[str, Tensor]:
    t = s.step + 1
    return {
        "a1": 1 - h.b1,
        "a2": 1 - h.b2,
        "unbias1": 1 / (1 - h.b1**t),
        "unbias1_next": 1 / (1 - h.b1 ** (t + 1)),
        "root_unbias2": 1 / (1 - h.b2**t).sqrt(),
    }


def _belief(g: Tensor, s: ScaleByBeliefState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByBeliefState]:
    s = _moments(g, s, c)
    return s.mu * c.unbias1 / (sqrt(s.nu) * c.root_unbias2 + c.eps), s


def _nesterov(g: Tensor, s: ScaleByBeliefState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByBeliefState]:
    s = _moments(g, s, c)
    ahead = c.b1 * s.mu * c.unbias1_next + c.a1 * g * c.unbias1
    return ahead / (sqrt(s.nu) * c.root_unbias2 + c.eps), s


def _moments(g: Tensor, s: ScaleByBeliefState, c: Any) -> ScaleByBeliefState:
    mu = c.b1 * s.mu + c.a1 * g
    surprise = g - mu
    return s._replace(mu=mu, nu=c.b2 * s.nu + c.a2 * (surprise * surprise) + c.eps_root)


def adabelief(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-16,
    eps_root: Hyper = 1e-16,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """AdaBelief.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        b1: Decay per step of the mean, in [0, 1).
        b2: Decay per step of the mean squared distance, in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        eps_root: Added to the mean squared distance at each step; in units of the squared gradient.
        nesterov: Look one step ahead in the mean.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.adabelief; Zhuang et al., 2020, https://arxiv.org/abs/2010.07468.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.adabelief(0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)))[0]
        tensor([-0.1111])
    """
    return chain(scale_by_belief(b1, b2, eps, eps_root, nesterov=nesterov), scale_by_learning_rate(learning_rate))
