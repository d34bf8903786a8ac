"""Quantization errors: of one step, and recorded while training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.report.errors import UPDATE, by_path, errors_of, leaves_stand_alone, moment_trees
from functional_lowbit._core.report.recorded import ErrorReport, Numbers, QuantizationErrorState, rows
from functional_lowbit._core.state.like_params import like_params
from functional_lowbit._core.state.observing import Observing
from functional_lowbit._core.state.parts import Rest, init_with
from functional_lowbit._core.state.resting import rest_in_float32
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking


class RecordQuantizationError(Observing):
    """The `update` of `record_quantization_error`."""

    state_class = QuantizationErrorState
    name = "record_quantization_error"

    def __init__(self, inner: GradientTransformation, every: int):
        self.inner = (inner,)
        self.every = every
        self._alone: bool | None = None

    @speaking("record_quantization_error")
    def init_state(self, params: Tree, rest: Rest) -> QuantizationErrorState:
        """The inner state, and nothing seen yet."""
        if rest is not rest_in_float32:
            raise WrongValue(
                "low_bit must be inside, since what is outside stores what this one cannot see; write "
                "record_quantization_error(low_bit(tx))"
            )
        inner_state = init_with(self.inner[0], params, rest)
        trees = moment_trees(inner_state)
        trees[UPDATE] = params

        def none_yet() -> dict[str, Tree]:
            return {name: _optree.map_stored(lambda at: _number(torch.float32), tree) for name, tree in trees.items()}

        return QuantizationErrorState(
            step=_number(torch.int64),
            last_step=_number(torch.int64),
            looks=_optree.map_stored(lambda at: _number(torch.int64), params),
            last=none_yet(),
            mean=none_yet(),
            largest=none_yet(),
            inner_state=inner_state,
        )

    def wants(self, state: Any) -> bool:
        """At each step whose number, counted from 1, is a multiple."""
        return (int(state.step) + 1) % self.every == 0

    def pass_by(self, state: Any) -> Any:
        """One step more."""
        return state._replace(step=state.step + 1)

    def observe(self, updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Any:
        """Look at every leaf that has a gradient."""
        if self._alone is None:
            self._alone = leaves_stand_alone(self.inner[0].update)
        updates = _with_masks(state.looks, updates)
        params = None if params is None else _with_masks(state.looks, params)
        errors = errors_of(self.inner[0].update, updates, state.inner_state, params, extra, self._alone)
        step = state.step + 1
        looks = _optree.map_stored(lambda at: at.node + 1 if at.path in errors[UPDATE] else at.node, state.looks)
        count = by_path(looks)

        def each(function: Callable[[Tensor, Tensor, Tensor], Tensor], trees: dict[str, Tree]) -> dict[str, Tree]:
            """`function(old number, error, number of looks)` at each leaf that was looked at."""

            def moved(name: str, at: _optree.Place) -> Tensor:
                error = errors[name].get(at.path)
                return at.node if error is None else function(at.node, error, count[at.path])

            return {name: _optree.map_stored(partial(moved, name), tree) for name, tree in trees.items()}

        return state._replace(
            step=step,
            last_step=step.clone(),
            looks=looks,
            last=each(lambda old, error, n: error, state.last),
            mean=each(lambda old, error, n: old + (error - old) / n, state.mean),
            largest=each(lambda old, error, n: torch.maximum(old, error), state.largest),
        )


@speaking("record_quantization_error")
def record_quantization_error(tx: GradientTransformation, every: int = 100) -> GradientTransformation:
    """Record, while training, how far the moments of each leaf and its update are moved when moments are rounded.

    Updates and the inner state are those of `tx`, bit for bit. At every `every`-th step, the step is also made in
    float32: how far are the stored moments from the unrounded ones, and how far is the next
    update that is made of them from the one that unrounded ones would give, with the same gradient? Between the looks a
    step costs what it does without this.

    Put it directly around `low_bit`, inside of clips and accumulation: `chain(clip, record_quantization_error(
    adamw8bit(lr)))`. Then a look needs memory for some leaves in float32 at a time, at most a sixteenth of all, or the
    largest one. Where `tx` needs all leaves together, it needs it for all.

    Args:
        tx: A transformation with `low_bit` inside.
        every: Steps from one look to the next, >= 1; the first look is at step `every`. A look takes as long as 50
            compiled steps. Adam's very first step says little: each update is 1 or -1 then, and the error ten times
            that of later ones.

    Returns:
        A transformation with a `QuantizationErrorState`; `recorded_quantization_error(state)` is a report of it, and
        `plot.quantization_error` a picture. A leaf without a gradient is not looked at.

    Raises:
        TypeError: if `tx` is no GradientTransformation, or `every` no int.
        ValueError: for an `every` below 1; at `init`, if it stands inside `low_bit`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.record_quantization_error(fl.adam8bit(1e-3), every=1)
        >>> params = {"w": torch.zeros(64, 64)}
        >>> grads = {"w": torch.linspace(-1, 1, 4096).view(64, 64)}
        >>> _, state = tx.update(grads, tx.init(params), params)
        >>> print(fl.recorded_quantization_error(state))
        path  what    format        error     mean  largest
        w     mu      companded8  0.449 %  0.449 %  0.449 %
        w     nu      companded8  0.231 %  0.231 %  0.231 %
        w     update  companded8  0.234 %  0.234 %  0.234 %
    """
    refuse.transformation("tx", tx)
    if not isinstance(every, int) or isinstance(every, bool):
        raise WrongType(f"every must be an int, got {type(every).__name__}")
    if every < 1:
        raise WrongValue(f"every must be at least 1, got {every}")
    return RecordQuantizationError(tx, every).transformation()


@speaking("quantization_error")
def quantization_error(
    tx: GradientTransformation, grads: Tree, state: Any, params: Tree = None, **extra: Any
) -> ErrorReport:
    """How far the next step's rounding moves the moments of each leaf, and the update that is made of them.

    Nothing is changed. The step is made in float32 with the moments as they are read: the error of a moment is
    |stored - unrounded| / |unrounded|, where "stored" is what is read back after rounding. Then the step after it is
    made twice, from both, with the same gradient and parameters: the error of the update is the relative difference.
    It is what one rounding does, in the Euclidean norm; elements that are not finite are left out.

    Args:
        tx: A transformation with `low_bit` inside.
        grads: Gradients; leaves of None are left out.
        state: The state before the step. Every rank must call this together.
        params: The parameters.
        **extra: As for `tx.update`.

    Returns:
        An `ErrorReport`: a row for each moment of each leaf, and for each update. Moments that rest in float32 have 0.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.sgd8bit(0.1), {"w": torch.zeros(64, 64)}
        >>> report = fl.quantization_error(tx, {"w": torch.linspace(-1, 1, 4096).view(64, 64)}, tx.init(params))
        >>> [(row.what, round(row.error, 4)) for row in report.rows]
        [('trace', 0.0045), ('update', 0.0021)]
    """
    refuse.transformation("tx", tx)
    if params is not None:
        grads = like_params(grads, params)
    errors = errors_of(tx.update, grads, state, params, extra, leaves_stand_alone(tx.update))
    found: dict[str, dict[str, Numbers]] = {
        name: {path: (float(e), float(e), float(e)) for path, e in of.items()} for name, of in errors.items()
    }
    return ErrorReport(rows(state, found, dict.fromkeys(errors[UPDATE], 1)))


def _with_masks(like: Tree, tree: Tree) -> Tree:
    """A tree with `MaskedNode` where `like` has one: the compiled step shows None there, which no state fits."""
    found = {at.names: at.node for at in _optree.stored_leaves(tree)}
    if not found.keys() <= {at.names for at in _optree.stored_leaves(like)}:
        return tree  # of another structure, which the update refuses
    return _optree.map_stored(lambda at: found.get(at.names), like)


def _number(dtype: torch.dtype) -> Tensor:
    """A counter or an error at 0, whatever the default device."""
    return torch.zeros((), dtype=dtype, device="cpu")
