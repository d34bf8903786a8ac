"""apply_updates: the last step of an optimizer."""

from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit import _check, _tree
from functional_lowbit._base import Tree
from functional_lowbit._leafwise import as_sharded
from functional_lowbit.sharding import local_of, wrap


def apply_updates(params: Tree, updates: Tree, *, rounding: str = "nearest", key: Any = None) -> Tree:
    """Add updates to parameters: new params, each with its own dtype.

    Sums are taken in float32 (float64 for float64 params) and rounded to the nearest number of the param's dtype.

    Args:
        params: Any pytree of floating-point tensors and DTensors. Not written to.
        updates: A tree like params; None leaves a parameter as it is.
        rounding: How sums are rounded to the param's dtype: "nearest".
        key: Not used by "nearest".

    Raises:
        TypeError, ValueError: for trees that do not fit each other, or another rounding.

    References:
        optax.apply_updates.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
    """
    if rounding != "nearest":
        raise ValueError(f"apply_updates: rounding must be 'nearest', got {rounding!r}")
    leaves, treedef = _tree.flatten(params)
    paths = _tree.names(treedef)
    _check.params("apply_updates", paths, leaves)
    us = _check.same_structure("apply_updates", "updates", treedef, updates)
    _check.updates("apply_updates", paths, us, leaves)
    return _tree.unflatten(treedef, [_add(p, u) for p, u in zip(leaves, us, strict=True)])


def _add(p: Tensor, u: Tensor | None) -> Tensor:
    if isinstance(p, nn.Parameter):
        p = p.detach()
    if u is None:
        return p
    if hasattr(p, "device_mesh"):
        u, spec = as_sharded(u, p)
        return wrap(_add(local_of(p), local_of(u)), spec)
    return (p.to(torch.promote_types(p.dtype, torch.float32)) + u.float()).to(p.dtype)
