"""Weight decay: add a part of the parameters to the updates."""

from typing import Any

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking
from functional_lowbit.transforms._masked import Mask, masked


@speaking("add_decayed_weights")
def add_decayed_weights(weight_decay: Hyper = 0.0, mask: Mask | None = None) -> GradientTransformation:
    """Add `weight_decay * params` to the updates.

    Args:
        weight_decay: Fraction of the parameter, >= 0.
        mask: Which leaves decay: a tree of bools, a function of params to one, or of path and leaf. All, if None.

    Raises:
        TypeError, ValueError: for a decay that is no number, not finite or negative.

    References:
        optax.add_decayed_weights; Loshchilov & Hutter, 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.add_decayed_weights(0.1)
        >>> params = torch.tensor([2.0])
        >>> tx.update(torch.zeros(1), tx.init(params), params)[0]
        tensor([0.2000])
    """
    refuse.hyperparameter("weight_decay", weight_decay, at_least=0.0)
    tx = leafwise(_decay, hyperparams={"weight_decay": weight_decay}, needs_params=True, name="add_decayed_weights")
    return tx if mask is None else masked(tx, mask)


def _decay(g: Any, s: Any, p: Any, c: Any) -> Any:
    return g + c.weight_decay * p, s
