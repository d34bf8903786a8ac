"""The trust ratio of LARS and LAMB: each leaf's step in proportion to its parameter."""

from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper
from functional_lowbit._core.leafwise import reduce
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import speaking


@speaking("scale_by_trust_ratio")
def scale_by_trust_ratio(
    min_norm: Hyper = 0.0, trust_coefficient: Hyper = 1.0, eps: Hyper = 0.0
) -> GradientTransformation:
    """Multiply each leaf's update by the ratio of the norms of its parameter and of the update.

    `u = g * trust_coefficient * max(|p|, min_norm) / (max(|g|, min_norm) + eps)`; a leaf whose parameter or update is 0
    passes through. Norms are of whole leaves, the same on every mesh (see `global_norm`). `update` needs params.

    Args:
        min_norm: The least that a norm counts as, >= 0; in units of parameters and updates.
        trust_coefficient: A factor.
        eps: Added to the denominator, >= 0; in units of the updates.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or negative; at `update`, without params.

    References:
        optax.scale_by_trust_ratio; You et al., 2019, https://arxiv.org/abs/1904.00962, Algorithm 2.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.scale_by_trust_ratio(), torch.tensor([6.0, 8.0])
        >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(params), params)[0]
        tensor([ 0., 10.])
    """
    refuse.hyperparameter("min_norm", min_norm, at_least=0.0)
    refuse.hyperparameter("trust_coefficient", trust_coefficient)
    refuse.hyperparameter("eps", eps, at_least=0.0)
    return leafwise(
        _trust,
        hyperparams={"min_norm": min_norm, "trust_coefficient": trust_coefficient, "eps": eps},
        reduces=True,
        needs_params=True,
        name="scale_by_trust_ratio",
    )


def _trust(g: Tensor, s: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
    p_norm = torch.maximum(reduce.norm(p), c.min_norm)
    g_norm = torch.maximum(reduce.norm(g), c.min_norm)
    ratio = c.trust_coefficient * p_norm / (g_norm + c.eps)
    return g * torch.where((p_norm == 0) | (g_norm == 0), 1.0, ratio), s
