"""masked: apply a transformation to some leaves and pass the others through."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from functional_lowbit import _check, _tree
from functional_lowbit._base import GradientTransformation, Tree, call_update
from functional_lowbit._like_params import rest_in_float32
from functional_lowbit._parts import Composite, Rest, init_with

Mask: TypeAlias = Tree | Callable[[Tree], Tree]
"""A tree of bools that begins like params (a bool stands for all leaves below it), or a function of params to one."""


@_tree.register
class MaskedNode:
    """Stands for a leaf that a mask takes away: a node without leaves."""

    TREE_FIELDS = ()

    def tree_flatten(self) -> tuple[tuple[()], None]:
        """For the pytree registries."""
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "MaskedNode":
        """For the pytree registries."""
        return cls()

    def __repr__(self) -> str:
        return "MaskedNode()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskedNode)

    def __hash__(self) -> int:
        return hash(MaskedNode)


class MaskedState(NamedTuple):
    """The state of the masked transformation."""

    inner_state: Any


class Masked(Composite):
    """The `update` of a masked transformation."""

    def __init__(self, inner: GradientTransformation, mask: Mask):
        self.inner = (inner,)
        self.mask = mask

    def init(self, params: Tree) -> MaskedState:
        """The inner state for the leaves that are kept."""
        return self.init_state(params, rest_in_float32)

    def init_state(self, params: Tree, rest: Rest) -> MaskedState:
        """The inner state for the leaves that are kept."""
        return MaskedState(init_with(self.inner[0], self.narrow(params), rest))

    def split(self, state: Any) -> Sequence[Any]:
        """The inner state."""
        if not isinstance(state, MaskedState):
            raise ValueError(
                f"masked.update: the state must be a MaskedState, got {type(state).__name__}; it was made for another "
                "transformation"
            )
        return (state.inner_state,)

    def join(self, state: Any, states: Sequence[Any]) -> MaskedState:
        """The wrapped inner state."""
        return MaskedState(states[0])

    def narrow(self, params: Tree) -> Tree:
        """The tree with `MaskedNode` where the mask is False."""
        return self._narrow(params, params)

    def _narrow(self, tree: Tree, params: Tree) -> Tree:
        mask = self.mask(params) if callable(self.mask) else self.mask
        keeps, treedef = _tree.flatten(mask)
        try:
            subtrees = _tree.flatten_up_to(treedef, tree)
        except ValueError as error:
            difference = _tree.difference(treedef, tree) or error
            raise ValueError(f"masked: mask must begin like params, but in params {difference}") from error
        return _tree.unflatten(treedef, [_keep(keep, sub) for keep, sub in zip(keeps, subtrees, strict=True)])

    def _narrow_updates(self, updates: Tree, reference: Tree) -> Tree:
        """Updates with `MaskedNode` where the mask is False, also where an update is None."""
        _, treedef = _tree.flatten(reference)
        us = _check.same_structure("masked.update", "updates", treedef, updates)
        seen = _tree.flatten_up_to(treedef, self.narrow(reference))
        return _tree.unflatten(treedef, [x if isinstance(x, MaskedNode) else u for u, x in zip(us, seen, strict=True)])

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update of the leaves that are kept; the others as they came."""
        reference = updates if params is None else params
        inner_updates, inner_state = call_update(
            self.inner[0].update,
            self._narrow_updates(updates, reference),
            self.split(state)[0],
            None if params is None else self.narrow(params),
            extra,
        )
        _, treedef = _tree.flatten(reference)
        merged = [
            old if isinstance(new, MaskedNode) else new
            for new, old in zip(
                _tree.flatten_up_to(treedef, inner_updates), _tree.flatten_up_to(treedef, updates), strict=True
            )
        ]
        return _tree.unflatten(treedef, merged), MaskedState(inner_state)


def _keep(keep: Any, subtree: Tree) -> Tree:
    if isinstance(keep, MaskedNode) or isinstance(subtree, MaskedNode):
        return subtree
    if not isinstance(keep, bool):
        raise TypeError(f"masked: mask must hold bools, got {type(keep).__name__}")
    return subtree if keep else _tree.map_leaves(lambda _: MaskedNode(), subtree)


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Apply a transformation to the leaves where the mask is True; the other updates pass through.

    Args:
        inner: The transformation.
        mask: A tree of bools that begins like params, or a function of params that returns one.

    Returns:
        A transformation whose state is a `MaskedState`; its moments have `MaskedNode()` at the leaves left out.

    Raises:
        TypeError: if `inner` is no GradientTransformation; if the mask holds anything but bools.
        ValueError: if the mask does not begin like params.

    References:
        optax.masked.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.masked(fl.scale(2.0), {"w": True, "b": False})
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([2.]), 'b': tensor([1.])}
    """
    _check.transformation("masked", "inner", inner)
    part = Masked(inner, mask)
    return GradientTransformation(part.init, part)
