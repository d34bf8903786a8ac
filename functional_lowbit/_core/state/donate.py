"""Writing into buffers that were given: who shares memory with whom, and new states in old places."""

from typing import Any

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.resting import is_pinned, pinned
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import ShardSpec, local_of, wrap


def copy_leaf(x: Any) -> Any:
    """A copy of a leaf with the same sharding, in pinned memory if the leaf is."""
    if not isinstance(x, Tensor):
        return x
    return pinned(x) if is_pinned(x) else wrap(local_of(x).clone(), ShardSpec.of(x))


def storages(tree: Tree) -> set[int]:
    """The memory that a tree's tensors lie in."""
    tensors = (local_of(x) for x in _optree.leaves(tree) if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel()}


def unshared(x: Any, written: set[int]) -> Any:
    """The tensor, or a copy if it lies in memory that will be written to."""
    return copy_leaf(x) if isinstance(x, Tensor) and storages(x) & written else x


def _sharding(x: Tensor) -> Any:
    return getattr(x, "device_mesh", None), getattr(x, "placements", None)


def into_old(new: Any, old: Any, written: set[int]) -> Any:
    """Write a new state into the buffers of the old one, if they fit each other."""
    new_leaves, new_def = _optree.flatten(new)
    old_leaves, old_def = _optree.flatten(old)
    if new_def != old_def:
        return _optree.unflatten(new_def, [unshared(n, written) for n in new_leaves])
    # A new leaf may be another old leaf: a queue moves its entries on by one.
    new_leaves = [n if n is o else unshared(n, written) for n, o in zip(new_leaves, old_leaves, strict=True)]
    for n, o in zip(new_leaves, old_leaves, strict=True):
        fits = isinstance(n, Tensor) and isinstance(o, Tensor) and n.shape == o.shape and n.dtype == o.dtype
        if not fits or _sharding(n) != _sharding(o):
            return _optree.unflatten(new_def, new_leaves)
    for n, o in zip(new_leaves, old_leaves, strict=True):
        if n is not o:
            local_of(o).copy_(local_of(n))
    return old
