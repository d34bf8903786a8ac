"""Adam: rescale updates by running first and second moments."""

from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, NonNegative, Signed
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking
from functional_lowbit.formats._exact import sqrt
from functional_lowbit.transforms._chain import chain
from functional_lowbit.transforms._decay import add_decayed_weights
from functional_lowbit.transforms._masked import Mask
from functional_lowbit.transforms._scale import scale_by_learning_rate


class ScaleByAdamState(NamedTuple):
    """Running moments of the gradient."""

    step: Tensor  # int64[]; updates made so far
    mu: Signed  # float32, like params; running mean of g
    nu: NonNegative  # float32, like params, >= 0; running mean of g**2


@speaking("scale_by_adam")
def scale_by_adam(
    b1: Hyper = 0.9, b2: Hyper = 0.999, eps: Hyper = 1e-8, eps_root: Hyper = 0.0, *, nesterov: bool = False
) -> GradientTransformation:
    """Rescale updates by Adam's bias-corrected moments.

    Args:
        b1: Decay per step of the first moment, in [0, 1).
        b2: Decay per step of the second moment, in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        eps_root: Added under the square root; in units of the squared gradient.
        nesterov: Look one step ahead in the first moment (NAdam).

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        Kingma & Ba, 2014, https://arxiv.org/abs/1412.6980, Algorithm 1. Nesterov: Dozat, 2016,
        https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ, Algorithm 2, with optax's bias correction.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_adam()
        >>> tx.update(torch.tensor([10.0, -0.1]), tx.init(torch.zeros(2)))[0]
        tensor([ 1., -1.])
    """
    for name, value, below in (("b1", b1, 1.0), ("b2", b2, 1.0), ("eps", eps, None), ("eps_root", eps_root, None)):
        refuse.hyperparameter(name, value, 0.0, *([below] if below else []))
    # Without eps_root, the square root is the one that a square-root format needs too, and is computed once.
    plain = isinstance(eps_root, (int, float)) and eps_root == 0
    return leafwise(
        _nadam if nesterov else _adam if plain else _adam_eps_root,
        state=ScaleByAdamState,
        hyperparams={"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root},
        scalars=_bias_corrections,
        name="scale_by_adam",
    )


def _bias_corrections(s: ScaleByAdamState, h: Any) -> dict[str, Tensor]:
    t = s.step + 1
    return {
        "a1": 1 - h.b1,
        "a2": 1 - h.b2,
        "unbias1": 1 / (1 - h.b1**t),
        "unbias1_next": 1 / (1 - h.b1 ** (t + 1)),
        "root_unbias2": 1 / (1 - h.b2**t).sqrt(),
        "biased_eps_root": h.eps_root * (1 - h.b2**t),
    }


def _adam(g: Tensor, s: ScaleByAdamState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByAdamState]:
    s = _moments(g, s, c)
    return s.mu * c.unbias1 / (sqrt(s.nu) * c.root_unbias2 + c.eps), s


def _adam_eps_root(g: Tensor, s: ScaleByAdamState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByAdamState]:
    s = _moments(g, s, c)
    return s.mu * c.unbias1 / (sqrt(s.nu + c.biased_eps_root) * c.root_unbias2 + c.eps), s


def _nadam(g: Tensor, s: ScaleByAdamState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByAdamState]:
    s = _moments(g, s, c)
    ahead = c.b1 * s.mu * c.unbias1_next + c.a1 * g * c.unbias1
    return ahead / (sqrt(s.nu + c.biased_eps_root) * c.root_unbias2 + c.eps), s


def _moments(g: Tensor, s: ScaleByAdamState, c: Any) -> ScaleByAdamState:
    return s._replace(mu=c.b1 * s.mu + c.a1 * g, nu=c.b2 * s.nu + c.a2 * (g * g))


def adam(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    eps_root: Hyper = 0.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        b1: Decay per step of the first moment, in [0, 1).
        b2: Decay per step of the second moment, in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        eps_root: Added under the square root; in units of the squared gradient.
        nesterov: Look one step ahead in the first moment (NAdam).

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.adam; Kingma & Ba, 2014, https://arxiv.org/abs/1412.6980.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.adam(0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)))[0]
        tensor([-0.1000])
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov),
        scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    eps_root: Hyper = 0.0,
    weight_decay: Hyper = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        b1: Decay per step of the first moment, in [0, 1).
        b2: Decay per step of the second moment, in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        eps_root: Added under the square root; in units of the squared gradient.
        weight_decay: Fraction of the parameter, >= 0; multiplied by the learning rate. optax's default, 1e-4; torch's
            is 1e-2.
        mask: Which leaves decay: a tree of bools, a function of params to one, or of path and leaf. All, if None.
        nesterov: Look one step ahead in the first moment (NAdamW).

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        optax.adamw; Loshchilov & Hutter, 2017, https://arxiv.org/abs/1711.05101, Algorithm 2.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.adamw(0.1, weight_decay=0.5)
        >>> params = torch.tensor([2.0])
        >>> tx.update(torch.ones(1), tx.init(params), params)[0]
        tensor([-0.2000])
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
