"""The parameters of a step as a list of leaves, and what belongs to each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state import fits
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.sharding import ShardSpec, local_of


@dataclass(frozen=True)
class Params:
    """A tree of parameters as lists of leaves."""

    tree: Tree
    treedef: _optree.TreeDef
    paths: Sequence[str]
    given: Sequence[Tensor]
    locals: Sequence[Tensor]  # this rank's part of each
    specs: Sequence[ShardSpec | None]

    @classmethod
    def of(cls, tree: Tree) -> "Params":
        """The parameters, looked at."""
        leaves, treedef = _optree.flatten(tree)
        paths = _optree.names(treedef)
        fits.params(paths, leaves)
        return cls(tree, treedef, paths, leaves, [local_of(p) for p in leaves], [ShardSpec.of(p) for p in leaves])

    @speaking("compile(tx)")
    def updates(self, what: str, tree: Tree) -> list[Any]:
        """Updates for them, looked at; None where there is none."""
        updates = fits.same_structure(what, self.treedef, tree)
        fits.updates(self.paths, updates, self.given)
        return updates

    def like(self, leaves: Sequence[Any], active: Sequence[bool] | None = None) -> Tree:
        """Leaves as a tree of the same structure; None at those that are not active."""
        if active is not None:
            leaves = [x if is_active else None for x, is_active in zip(leaves, active, strict=True)]
        return _optree.unflatten(self.treedef, leaves)
