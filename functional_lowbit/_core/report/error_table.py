"""A report of quantization errors: one row for each leaf and for each of its moments and its update."""

from typing import Any, NamedTuple

from functional_lowbit._core.report.columns import table


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
