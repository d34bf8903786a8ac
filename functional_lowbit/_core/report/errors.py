"""How far rounding moves the moments of one step, and the update that the next step makes of them.

For each leaf, in the Euclidean norm, elements that are not finite left out:

    error of a moment   = |stored - unrounded| / |unrounded|
    error of the update = |next update from stored moments - from unrounded ones| / |from unrounded ones|

"Stored" is what is read back. Both next updates are made with the gradient and the parameters of this step. This is
what one rounding does; what earlier ones did is in the moments on both sides.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import call_update
from functional_lowbit._core.state.moments import store_again
from functional_lowbit._core.state.parts import map_moments, moments_in
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.step.program import LeafOp, lower
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.sharding._collectives import sum_over_shards

UPDATE = "update"  # the name of the update's error, beside those of the moments
PORTIONS = 16  # at least so many, of about as many elements: one of them at a time is in float32

Errors = dict[str, dict[str, Tensor]]
"""Name of a moment, or "update", to the path of a leaf to float32[]: on the CPU, the same on every rank."""


@torch.no_grad()
def errors_of(
    update: Callable[..., Any], updates: Tree, state: Any, params: Tree, extra: dict[str, Any], alone: bool
) -> Errors:
    """The errors of one step, of the leaves that have a gradient. Every rank must call it.

    Args:
        update: Of a transformation.
        updates: The gradients; None at leaves that are skipped.
        state: The state before the step.
        params: The parameters, or None.
        extra: Extra arguments.
        alone: Whether each leaf may be looked at alone, see `leaves_stand_alone`.
    """
    leaves, treedef = _optree.flatten(updates if params is None else params)
    paths = _optree.names(treedef)
    # In float32, so that the updates are too: they come back in the gradients' dtype.
    grads = dict(zip(paths, _optree.flatten_up_to(treedef, updates), strict=True))
    sizes = {path: x.numel() for path, x in zip(paths, leaves, strict=True) if grads[path] is not None}
    moments = {name: by_path(tree) for name, tree in moment_trees(state).items()}
    stored = {p for of in moments.values() for p, x in of.items() if isinstance(x, QuantizedTensor) and p in sizes}
    sums: dict[tuple[str, str], tuple[Tensor, ShardSpec | None]] = {}
    for portion in _portions({p: n for p, n in sizes.items() if p in stored}) if alone else [set(sizes)]:
        if portion & stored:
            some = {path: x.float() for path, x in grads.items() if path in portion and x is not None}
            tree = _optree.unflatten(treedef, [some.get(path) for path in paths])
            sums.update(_measured(update, tree, treedef, state, params, extra, portion))
    zero = torch.zeros((), dtype=torch.float32, device="cpu")  # of what rests in float32 and is not rounded
    found: Errors = {name: {p: zero for p in of if p in sizes} for name, of in {**moments, UPDATE: sizes}.items()}
    for (name, path), error in zip(sums, _relative(list(sums.values())), strict=True):
        found[name][path] = error
    return found


def leaves_stand_alone(update: Callable[..., Any]) -> bool:
    """Whether each leaf's step depends on that leaf alone, so that the others need not be read in float32 with it."""
    return all(isinstance(op, LeafOp) and op.rule.prepare is None for op in lower(update).ops())


def moment_trees(state: Any) -> dict[str, Tree]:
    """The declared moments of a state by name, in order.

    The name is the field's, `mu`; with what stands before it, `0.mu`, where another moment has the same.
    """
    found = {at.path: at.node for at in _optree.stored_leaves(state, moments_in) if at.mark is not None}
    words = [field.rsplit(".", 1)[-1] for field in found]
    return {w if words.count(w) == 1 else f: tree for w, (f, tree) in zip(words, found.items(), strict=True)}


def by_path(tree: Tree) -> dict[str, Any]:
    """Path to leaf; a `QuantizedTensor` is one leaf."""
    return {at.path: at.node for at in _optree.stored_leaves(tree)}


def _in_moments(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """A state with `function(place, *the others' leaves)` in place of each leaf of each moment."""
    return map_moments(lambda field, moment, tree, *rest: _optree.map_stored(function, tree, *rest), state, *others)


def _portions(sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Paths in order, each portion of the largest leaf's elements at most, or of a sixteenth of all."""
    most = max([*sizes.values(), sum(sizes.values()) // PORTIONS], default=0)
    portion: set[str] = set()
    filled = 0
    for path, size in sizes.items():
        if portion and filled + size > most:
            yield portion
            portion, filled = set(), 0
        portion.add(path)
        filled += size
    if portion:
        yield portion


def _measured(
    update: Callable[..., Any],
    grads: Tree,
    treedef: _optree.TreeDef,
    state: Any,
    params: Tree,
    extra: dict[str, Any],
    portion: Collection[str],
) -> dict[tuple[str, str], tuple[Tensor, ShardSpec | None]]:
    """(name, path) to this rank's sums of squares, float64[2], and how the leaf is sharded."""

    def read(at: _optree.Place) -> Any:
        if not isinstance(at.node, QuantizedTensor):
            return at.node
        return at.node.dequantize() if at.path in portion else _nothing(at.node)

    def rounded(at: _optree.Place, old: Any, before: Any) -> Any:
        if at.path not in portion or not isinstance(old, QuantizedTensor):
            return at.node
        return store_again(old, at.node, before).dequantize()

    before = _in_moments(read, state)
    _, right = call_update(update, grads, before, params, extra)
    wrong = _in_moments(rounded, right, state, before)
    del before
    sums = {}
    for (name, a), b in zip(moment_trees(wrong).items(), moment_trees(right).values(), strict=True):
        for (path, x), y in zip(by_path(a).items(), by_path(b).values(), strict=True):
            if path in portion and x is not y:
                sums[name, path] = _squares(x, y)
    updates = [_optree.flatten_up_to(treedef, call_update(update, grads, s, params, extra)[0]) for s in (wrong, right)]
    for path, x, y in zip(_optree.names(treedef), *updates, strict=True):
        if path in portion:
            sums[UPDATE, path] = _squares(x, y)
    return sums


def _nothing(leaf: QuantizedTensor) -> Tensor:
    """Zeros in a leaf's shape that take no memory, for a leaf that is not looked at."""
    zero = torch.zeros((), dtype=torch.float32, device=local_of(leaf.codes).device)
    return wrap(zero.expand(leaf.layout.local_shape()), leaf.layout.spec)


def _squares(a: Tensor, b: Tensor) -> tuple[Tensor, ShardSpec | None]:
    """Of a - b and of b: float64[2], of this rank's part, and the spec."""
    x, y = local_of(a).float(), local_of(b).float()
    both = torch.isfinite(x) & torch.isfinite(y)
    norms = [torch.linalg.vector_norm(torch.where(both, v, 0.0), dtype=torch.float64) for v in (x - y, y)]
    return torch.stack(norms).square(), ShardSpec.of(b)


def _relative(sums: Sequence[tuple[Tensor, ShardSpec | None]]) -> list[Tensor]:
    """|a - b| / |b| of whole leaves: float32[] on the CPU. 0 where nothing differs, Inf where b is 0 and a is not."""
    if not sums:
        return []
    numbered = [(torch.cat([x.new_full((1,), i), x]), spec) for i, (x, spec) in enumerate(sums)]

    def together(rows: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(rows))
        return stacked.new_zeros(len(sums), 2).index_copy(0, stacked[:, 0].long(), stacked[:, 1:])

    total = sum_over_shards(numbered, together)
    error = torch.where(total[:, 0] == 0, 0.0, (total[:, 0] / total[:, 1]).sqrt())
    return list(error.float().cpu())
