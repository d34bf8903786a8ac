"""Arithmetic on whole trees of tensors, for those who write their own transformations.

Imports: _core.leafwise, _optree
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.leafwise.norm import global_norm
from functional_lowbit._optree import Tree

norm = global_norm  # under optax's name


def map(function: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """A tree of `function(leaf, *the same leaf of the rests)`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.map(lambda a, b: a * b, {"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)})
        {'w': tensor(6.)}
    """
    return _optree.map_leaves(function, tree, *rests)


def add(a: Tree, b: Tree) -> Tree:
    """The sum of two trees.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.add([torch.tensor(1.0)], [torch.tensor(2.0)])
        [tensor(3.)]
    """
    return _optree.map_leaves(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """The difference of two trees.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.sub([torch.tensor(1.0)], [torch.tensor(2.0)])
        [tensor(-1.)]
    """
    return _optree.map_leaves(torch.sub, a, b)


def scale(factor: float | Tensor, tree: Tree) -> Tree:
    """A tree times a number; argument order as in optax.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.scale(2.0, [torch.tensor(1.0)])
        [tensor(2.)]
    """
    return _optree.map_leaves(lambda x: (factor * x).to(x.dtype), tree)


def zeros_like(tree: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros of the same shapes and sharding; the leaves' dtypes unless one is given.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.zeros_like([torch.ones(2)])
        [tensor([0., 0.])]
    """
    return _optree.map_leaves(lambda x: torch.zeros_like(x, dtype=dtype), tree)


def cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Floating-point leaves in another dtype; other leaves as they are. None casts nothing.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.tree.cast([torch.ones(1), torch.tensor(3)], torch.bfloat16)
        [tensor([1.], dtype=torch.bfloat16), tensor(3)]
    """
    return _optree.map_leaves(lambda x: x.to(dtype) if dtype is not None and x.is_floating_point() else x, tree)
