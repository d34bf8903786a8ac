"""The node that stands where a mask has taken a leaf away."""

from typing import Any

from functional_lowbit import _optree


@_optree.register
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
