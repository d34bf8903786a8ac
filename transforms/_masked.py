"""masked: apply a transformation to some leaves and pass the others through."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, call_update
from functional_lowbit._core.contract.masked_node import MaskedNode
from functional_lowbit._core.contract.per_leaf import PerLeaf
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.parts import Composite, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, speaking

Mask: TypeAlias = Tree | Callable[[Tree], Tree] | Callable[[str, Tensor], bool]
"""A tree of bools that begins like params (a bool stands for all leaves below it), a function of params to one, or
`mask(path, leaf) -> bool`. It must not change while a state is in use."""


class MaskedState(NamedTuple):
    """The state of the masked transformation."""

    inner_state: Any


class Masked(Composite):
    """The `update` of a masked transformation."""

    state_class = MaskedState
    name = "masked"

    def __init__(self, inner: GradientTransformation, mask: Callable[[Tree], list[bool]], masks_extra_args: bool):
        self.inner = (inner,)
        self.mask = mask  # whether each leaf of a tree is kept, in order
        self.masks_extra_args = masks_extra_args

    def init_state(self, params: Tree, rest: Rest) -> MaskedState:
        """The inner state for the leaves that are kept."""
        return MaskedState(init_with(self.inner[0], self.narrow(params), rest))

    def narrow(self, params: Tree) -> Tree:
        """The tree with `MaskedNode` where the mask is False."""
        leaves, treedef = _optree.flatten(params)
        return _hide(treedef, leaves, self.mask(params))

    @speaking("masked.update")
    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update of the leaves that are kept; the others as they came."""
        reference = updates if params is None else params
        leaves, treedef = _optree.flatten(reference)
        keeps = self.mask(reference)
        old = fits.same_structure("updates", treedef, updates)
        if self.masks_extra_args:
            extra = {name: _hide_like(treedef, value, keeps) for name, value in extra.items()}
        inner_updates, inner_state = call_update(
            self.inner[0].update,
            _hide(treedef, old, keeps),
            self.split(state)[0],
            None if params is None else _hide(treedef, leaves, keeps),
            extra,
        )
        new = _optree.flatten_up_to(treedef, inner_updates)
        merged = [n if keep else o for keep, n, o in zip(keeps, new, old, strict=True)]
        return _optree.unflatten(treedef, merged), MaskedState(inner_state)


def _hide(treedef: _optree.TreeDef, leaves: Sequence[Any], keeps: Sequence[bool]) -> Tree:
    return _optree.unflatten(treedef, [x if keep else MaskedNode() for keep, x in zip(keeps, leaves, strict=True)])


def _hide_like(treedef: _optree.TreeDef, value: Any, keeps: Sequence[bool]) -> Any:
    """An extra argument, its leaves hidden if it has the structure of the parameters."""
    leaves, own = _optree.flatten(value)
    return _hide(treedef, leaves, keeps) if own == treedef else value


def bools(per_leaf: PerLeaf, params: Tree) -> list[bool]:
    """The values of a mask, which must be bools."""
    values = per_leaf(params)
    for i, value in enumerate(values):
        if not isinstance(value, bool):
            what = per_leaf.where(_optree.flatten(params)[1], i)
            raise WrongType(f"{what} must be a bool, got {type(value).__name__}", speaker=per_leaf.speaker)
    return values


@speaking("masked")
def masked(
    inner: GradientTransformation, mask: Mask, *, mask_compatible_extra_args: bool = False
) -> GradientTransformation:
    """Apply a transformation to the leaves where the mask is True; the other updates pass through.

    Args:
        inner: The transformation.
        mask: A tree of bools that begins like params; a function of params that returns one; or
            `mask(path, leaf) -> bool`, a function with two parameters. A path reads like `layers.0.weight`; `leaf` is
            the parameter, or the update where `update` is called without params.
        mask_compatible_extra_args: Whether extra arguments that have the structure of params are masked too.

    Returns:
        A transformation whose state is a `MaskedState`; its moments have `MaskedNode()` at the leaves left out.

    Raises:
        TypeError: if `inner` is no GradientTransformation; if the mask holds anything but bools, or is a function of
            another number of arguments.
        ValueError: if the mask does not begin like params.

    References:
        optax.masked.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.masked(fl.scale(2.0), {"w": True, "b": False})
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([2.]), 'b': tensor([1.])}
        >>> tx = fl.masked(fl.scale(2.0), lambda path, leaf: path.endswith("b"))
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([1.]), 'b': tensor([2.])}
    """
    refuse.transformation("inner", inner)
    return Masked(inner, partial(bools, PerLeaf("masked", "mask", mask)), mask_compatible_extra_args).transformation()
