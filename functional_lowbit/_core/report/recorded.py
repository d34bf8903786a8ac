"""What `record_quantization_error` has recorded: its state, and the report of errors that is read from it."""

from typing import Annotated, Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import Number, Role
from functional_lowbit._core.report.columns import table
from functional_lowbit._core.report.errors import UPDATE, by_path, moment_trees
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking

Numbers = tuple[float, float, float]
"""The error of the last look, the mean and the largest."""

Errors: TypeAlias = Annotated[dict[str, Tree], Role("record", by_name=True)]
"""A number for each leaf, by the moment's name or "update"."""


class QuantizationErrorState(NamedTuple):
    """Errors of the moments and of the update, by the moment's name or "update"; all on the CPU, the same on each rank.

    They are relative, in the Euclidean norm; 0 before the first look.
    """

    PER_LEAF = ("looks", "last", "mean", "largest")

    step: Tensor  # int64[]; updates made so far
    last_step: Number  # int64[]; the step of the last look, counted from 1; 0 before the first
    looks: Annotated[Tree, Role("record")]  # int64[], like params; looks at each leaf
    last: Errors  # float32[], like params; at the last look
    mean: Errors  # float32[], like params; over all looks
    largest: Errors  # float32[], like params; over all looks
    inner_state: Any


class ErrorRow(NamedTuple):
    """The error of one moment, or of the update, of one leaf: relative, in the Euclidean norm; 0.01 is 1%."""

    path: str  # of the parameter
    what: str  # "mu", "nu", …, or "update"
    format: str  # in which the moment rests; of an update that in which the leaf's moments rest
    error: float  # when it was last looked at
    mean: float  # over all looks
    largest: float  # over all looks
    looks: int  # how often it was looked at


class ErrorReport(NamedTuple):
    """What `quantization_error` or `recorded_quantization_error` found. `str()` is a table, in percent.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.sgd8bit(0.1), {"w": torch.zeros(64, 64)}
        >>> report = fl.quantization_error(tx, {"w": torch.ones(64, 64)}, tx.init(params))
        >>> report.rows[0]  # all numbers of a block are its largest, which every format keeps
        ErrorRow(path='w', what='trace', format='companded8', error=0.0, mean=0.0, largest=0.0, looks=1)
    """

    rows: tuple[ErrorRow, ...]
    step: int | None = None  # of the last look, counted from 1; None for a look outside of a recorder

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return {"step": self.step, "rows": [row._asdict() for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            (row.path, row.what, row.format, *(f"{100 * x:.3f} %" for x in (row.error, row.mean, row.largest)))
            for row in self.rows
        ]
        numbers = ("error", "mean", "largest")
        return table(("path", "what", "format", *numbers), lines, right=numbers)


@speaking("recorded_quantization_error")
def recorded_quantization_error(state: Any) -> ErrorReport:
    """What `record_quantization_error` has recorded.

    Args:
        state: A state with a `QuantizationErrorState` somewhere inside; of several, the first counts.

    Returns:
        An `ErrorReport`, with a row for each leaf that was looked at. It holds numbers, no tensors: keep one now and
        then for a history.

    Raises:
        ValueError: if there is none in the state.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.record_quantization_error(fl.lion8bit(1e-3), every=10)
        >>> fl.recorded_quantization_error(tx.init({"w": torch.zeros(64, 64)}))
        ErrorReport(rows=(), step=None)
    """
    looked = (at.node for at in _optree.nodes(state) if isinstance(at.node, QuantizationErrorState))
    own = next(looked, None)
    if own is None:
        raise WrongValue("the state has no QuantizationErrorState inside; use fl.record_quantization_error(tx)")
    looks = {path: int(n) for path, n in by_path(own.looks).items() if int(n)}
    found: dict[str, dict[str, Numbers]] = {}
    for name in own.last:
        kinds = [by_path(trees[name]) for trees in (own.last, own.mean, own.largest)]
        last, mean, largest = ({path: float(x) for path, x in kind.items()} for kind in kinds)
        found[name] = {path: (last[path], mean[path], largest[path]) for path in last if path in looks}
    return ErrorReport(rows(own.inner_state, found, looks), int(own.last_step) if looks else None)


def rows(state: Any, errors: dict[str, dict[str, Numbers]], looks: dict[str, int]) -> tuple[ErrorRow, ...]:
    """Leaf by leaf: its moments, then its update."""
    resting = {name: {p: _format(x) for p, x in by_path(tree).items()} for name, tree in moment_trees(state).items()}
    rows = []
    for path, n in looks.items():
        kinds = {name: of[path] for name, of in resting.items() if path in of}
        kinds[UPDATE] = " and ".join(dict.fromkeys(kinds.values()))
        rows += [ErrorRow(path, name, kinds[name], *of[path], n) for name, of in errors.items() if path in of]
    return tuple(rows)


def _format(leaf: Any) -> str:
    return leaf.format.name if isinstance(leaf, QuantizedTensor) else "float32"
