"""This rank's part of tensors and trees, and the way back."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from functional_lowbit import _optree
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, name_at
from functional_lowbit.sharding._spec import ShardSpec, checked_spec


def local_of(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, detached; a plain tensor is detached too. Shares memory with `x`."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            x = x.to_local()
        if hasattr(x, "wait"):  # an AsyncCollectiveTensor, whose communication may not have ended
            x = x.wait()  # type: ignore[operator]
    return x.detach() if x.requires_grad or type(x) is not Tensor else x


def check_shard(x: Tensor, what: str, path: str = "", partial: bool = False) -> None:
    """Refuse a DTensor whose shard on this rank is not the one that its placements say: kernels rely on it.

    Args:
        x: Any tensor.
        what: Of which tree it is a leaf, for the error.
        path: Of the leaf.
        partial: Whether one that waits for a sum is let through; it is moved to its parameter's placements later.

    Raises:
        ValueError: for such a DTensor, and for what `ShardSpec.of` refuses.
    """
    if not isinstance(x, DTensor) or (partial and any(p.is_partial() for p in x.placements)):
        return
    try:
        spec, local = checked_spec(x), local_of(x)
    except WrongValue as error:
        raise WrongValue(f"{name_at(what, path)}: {error.reason}", path) from None
    if spec is not None and tuple(local.shape) != spec.local_shape():
        got = f"has a shard of shape {tuple(local.shape)} on this rank"
        rule = f"{spec.placements} of {spec.shape} give it {spec.local_shape()}"
        raise WrongValue.at(what, path, f"{got}, but {rule}")


def part_of(x: Tensor) -> Tensor:
    """As `local_of`, but a plain tensor that is no parameter keeps its autograd history, for meta-gradients."""
    return local_of(x) if isinstance(x, (DTensor, torch.nn.Parameter)) else x


def wrap(local: Tensor, spec: ShardSpec | None) -> Tensor:
    """`spec.wrap(local)`, or the plain tensor if there is no spec."""
    return local if spec is None else spec.wrap(local)


def to_local(tree: Tree) -> tuple[Tree, Tree]:
    """Split a tree into detached local tensors and the specs that rebuild it.

    Args:
        tree: Any pytree of tensors and DTensors.

    Returns:
        Two trees of the same structure: local tensors, which share memory with the leaves, and a `ShardSpec` for each
        DTensor or None for each plain tensor.

    Raises:
        ValueError: for a placement other than `Shard` and `Replicate`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> locals, specs = fl.sharding.to_local({"w": torch.ones(2, requires_grad=True)})
        >>> locals, specs
        ({'w': tensor([1., 1.])}, {'w': None})
    """
    leaves, treedef = _optree.flatten(tree)
    specs = [ShardSpec.of(x) for x in leaves]
    return _optree.unflatten(treedef, [local_of(x) for x in leaves]), _optree.unflatten(treedef, specs)


def from_local(locals: Tree, specs: Tree) -> Tree:
    """The way back from `to_local`: DTensors of the global shape and stride in the specs.

    Raises:
        ValueError: if a local tensor does not have the shape that its spec says.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.sharding.from_local({"w": torch.ones(2)}, {"w": None})
        {'w': tensor([1., 1.])}
    """
    leaves, treedef = _optree.flatten(locals)
    return _optree.unflatten(
        treedef, [wrap(x, s) for x, s in zip(leaves, _optree.flatten_up_to(treedef, specs), strict=True)]
    )
