"""A report of quantization errors: one row for each leaf and for each of its moments and its update."""

from typing import Any, NamedTuple


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
    """What `quantization_error` or `recorded_quantization_error` found. `str()` is a table, in percent."""

    rows: tuple[ErrorRow, ...]
    step: int | None = None  # updates made before the last look; None if that is not known

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return {"step": self.step, "rows": [row._asdict() for row in self.rows]}

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("path", "what", "format", "error", "mean", "largest")]
        for row in self.rows:
            numbers = [f"{100 * x:.3f} %" for x in (row.error, row.mean, row.largest)]
            cells.append((row.path, row.what, row.format, *numbers))
        widths = [max(len(line[i]) for line in cells) for i in range(6)]
        lines = []
        for line in cells:
            padded = [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)
