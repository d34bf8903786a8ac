"""What is shaped and sharded like parameters: updates, moved to where those rest, and new moments."""

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state import fits
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import ShardSpec


def as_sharded(u: Tensor, p: Tensor) -> tuple[Tensor, ShardSpec | None]:
    """An update with its parameter's mesh and placements. A gradient that rests otherwise is moved there."""
    spec = ShardSpec.of(p)
    if spec is not None and tuple(u.placements) != spec.placements:  # type: ignore[attr-defined]
        u = u.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
    return u, spec


def like_params(updates: Tree, params: Tree) -> Tree:
    """Updates with the sharding of their parameters, for what looks at the whole tree before the leaf functions do."""
    leaves, treedef = _optree.flatten(params)
    us = fits.same_structure("updates", treedef, updates)
    fits.updates(_optree.names(treedef), us, leaves)
    return _optree.unflatten(
        treedef, [None if u is None else as_sharded(u, p)[0] for u, p in zip(us, leaves, strict=True)]
    )
