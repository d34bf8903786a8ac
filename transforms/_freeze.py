"""Frozen parameters: updates that are zero."""

from functools import partial
from typing import Any

import torch

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.contract.per_leaf import PerLeaf
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.transforms._masked import Mask, bools, masked
from functional_lowbit.transforms._partition import partition


def set_to_zero() -> GradientTransformation:
    """Replace the updates by zeros, NaN and Inf too.

    References:
        optax.set_to_zero.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.set_to_zero().update(torch.tensor([1.0, float("nan")]), fl.set_to_zero().init(torch.zeros(2)))
        (tensor([0., 0.]), EmptyState())
    """
    return leafwise(_zero, name="set_to_zero")


def _zero(g: Any, s: Any, p: Any, c: Any) -> Any:
    return torch.zeros_like(g), s


def freeze(mask: Mask) -> GradientTransformation:
    """Set the updates to zero where the mask is True, so that those parameters stay as they are.

    It belongs at the end of a chain: in front of an optimizer, weight decay and momentum would still move the
    parameters. The optimizer in that chain keeps moments of frozen leaves; `selective_transform` keeps none.

    Args:
        mask: A tree of bools that begins like params, a function of params that returns one, or
            `mask(path, leaf) -> bool`; see `masked`.

    Raises:
        TypeError, ValueError: as `masked`.

    References:
        optax.freeze.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.chain(fl.sgd(0.5), fl.freeze({"embed": True, "head": False}))
        >>> params = {"embed": torch.ones(1), "head": torch.ones(1)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'embed': tensor([0.]), 'head': tensor([-0.5000])}
    """
    return masked(set_to_zero(), mask)


@speaking("selective_transform")
def selective_transform(optimizer: GradientTransformation, *, freeze_mask: Mask) -> GradientTransformation:
    """Apply an optimizer to the leaves where the mask is False, and freeze the others.

    Nothing is stored for frozen leaves, and a global norm inside the optimizer is that of the others alone.

    Args:
        optimizer: The transformation of the leaves that are trained.
        freeze_mask: Which leaves are frozen: as for `freeze`.

    Returns:
        A `partition` with the labels "train" and "freeze".

    Raises:
        TypeError, ValueError: as `masked`.

    References:
        optax.selective_transform.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.selective_transform(fl.adam(0.1), freeze_mask=lambda path, leaf: path.startswith("embed"))
        >>> state = tx.init({"embed": torch.ones(1), "head": torch.ones(1)})
        >>> state.inner_states["train"].inner_state[0].mu
        {'embed': MaskedNode(), 'head': tensor([0.])}
    """
    refuse.transformation("optimizer", optimizer)
    labels = partial(_labels, PerLeaf("selective_transform", "freeze_mask", freeze_mask))
    return partition({"train": optimizer, "freeze": set_to_zero()}, labels)


def _labels(mask: PerLeaf, params: Tree) -> Tree:
    treedef = _optree.flatten(params)[1]
    return _optree.unflatten(treedef, ["freeze" if is_frozen else "train" for is_frozen in bools(mask, params)])
