"""Gradient centralization: take the mean of each row away."""

from typing import Any

from torch import Tensor

from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.leafwise import reduce
from functional_lowbit._core.leafwise.leafwise import leafwise


def centralize() -> GradientTransformation:
    """Subtract from each row (index of dimension 0) its mean over all other dimensions.

    Leaves with fewer than two dimensions pass through. Of sharded leaves it is the mean of whole rows, however they are
    cut.

    References:
        optax.centralize; Yong et al., 2020, https://arxiv.org/abs/2004.01461, equation 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.centralize()
        >>> tx.update(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), tx.init(torch.zeros(2, 3)))[0]
        tensor([[-1.,  0.,  1.],
                [-1.,  0.,  1.]])
    """
    return leafwise(_centralize, reduces=True, name="centralize")


def _centralize(g: Tensor, s: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
    if g.ndim < 2:
        return g, s
    return g - reduce.mean(g, dim=range(1, g.ndim), keepdim=True), s
