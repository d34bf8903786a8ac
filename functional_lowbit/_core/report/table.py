"""A report of bytes: one row for each leaf of a state, the totals, and for a plan every rank's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from functional_lowbit._core.report.columns import table
from functional_lowbit._refused import WrongValue

LONG = 40  # rows of a table from which on repeated layers are shown as one row


class Row(NamedTuple):
    """One leaf of a state."""

    path: str  # for instance 0.mu.layers.0.weight
    format: str  # the format's name, or the dtype of a plain tensor
    shape: tuple[int, ...]  # global
    bytes: int  # on this rank
    why: str  # why it rests like this


class Report(NamedTuple):
    """What `describe` or `memory_plan` found. `str()` is a table.

    Parameters, weight bytes and gradient bytes are None if `describe` was not given the parameters. `mesh` and `ranks`
    are empty without a mesh to plan for. With one, `ranks` holds a report for each rank, and the numbers of the whole
    are those of the rank that needs most.
    """

    rows: tuple[Row, ...]
    parameters: int | None = None  # elements on this rank
    weight_bytes: int | None = None  # on this rank
    gradient_bytes: int | None = None  # on this rank; gradients have their parameters' dtypes
    mesh: tuple[int, ...] = ()  # ranks along each mesh dimension
    ranks: "tuple[Report, ...]" = ()  # row-major: the last mesh dimension runs fastest

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves on this rank."""
        return sum(row.bytes for row in self.rows)

    @property
    def training_bytes(self) -> int:
        """Bytes of weights, gradients and state on this rank.

        Raises:
            ValueError: if `describe` was not given the parameters.
        """
        if self.weight_bytes is None or self.gradient_bytes is None:
            reason = "the training bytes need the parameters; call describe(state, params)"
            raise WrongValue(reason, speaker="describe")
        return self.weight_bytes + self.gradient_bytes + self.total_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Training bytes for each parameter on this rank; 0.0 on a rank that holds none."""
        return self.training_bytes / self.parameters if self.parameters else 0.0 * self.training_bytes

    @property
    def largest_rank(self) -> int | None:
        """The rank that needs most training bytes, the first of them; None without ranks."""
        return max(range(len(self.ranks)), key=lambda i: self.ranks[i].training_bytes, default=None)

    @property
    def smallest_rank(self) -> int | None:
        """The rank that needs least training bytes, the first of them; None without ranks."""
        return min(range(len(self.ranks)), key=lambda i: self.ranks[i].training_bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for `json.dumps`.

        Keys: `rows`, `state_bytes`; with parameters also `parameters`, `weight_bytes`, `gradient_bytes`,
        `training_bytes`, `bytes_per_parameter`; with ranks also `mesh`, `largest_rank`, `smallest_rank`, `all_ranks`
        (sums over the ranks) and `ranks` (the numbers of each).
        """
        rows = [{**row._asdict(), "shape": list(row.shape)} for row in self.rows]
        found: dict[str, Any] = {"rows": rows, **self._numbers()}
        if self.ranks:
            each = [rank._numbers() for rank in self.ranks]
            found["mesh"] = list(self.mesh)
            found["largest_rank"], found["smallest_rank"] = self.largest_rank, self.smallest_rank
            found["all_ranks"] = {k: sum(n[k] for n in each) for k in each[0] if k != "bytes_per_parameter"}
            found["ranks"] = [{"rank": i, **numbers} for i, numbers in enumerate(each)]
        return found

    def _numbers(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"state_bytes": self.total_bytes}
        return {
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "gradient_bytes": self.gradient_bytes,
            "state_bytes": self.total_bytes,
            "training_bytes": self.training_bytes,
            "bytes_per_parameter": self.bytes_per_parameter,
        }

    def table(self, all_rows: bool | None = None) -> str:
        """The report as a table.

        Args:
            all_rows: True: a row for each leaf. False: leaves whose paths differ in numbers only, and that rest alike,
                are one row, `0.mu.layers.*.weight x 32`, with the bytes of all of them. None: False for reports of more
                than 40 rows.
        """
        short = len(self.rows) > LONG if all_rows is None else not all_rows
        rows = _grouped(self.rows) if short else self.rows
        cells = [(r.path, r.format, str(r.shape), f"{r.bytes:,}", r.why) for r in rows]
        cells.append(("total", "", "", f"{self.total_bytes:,}", ""))
        if self.weight_bytes is not None and self.gradient_bytes is not None:
            for what, size in (
                ("weights", self.weight_bytes),
                ("gradients", self.gradient_bytes),
                ("state", self.total_bytes),
                ("training", self.training_bytes),
            ):
                each = size / self.parameters if self.parameters else 0.0
                cells.append((what, "", "", f"{size:,}", f"{each:.2f} for each parameter"))
        cells += self._of_ranks()
        return table(("path", "format", "shape", "bytes", "why"), cells, right=("bytes",))

    def _of_ranks(self) -> list[tuple[str, str, str, str, str]]:
        """Lines about the training bytes of the ranks."""
        most, least = self.largest_rank, self.smallest_rank
        if most is None or least is None:
            return []
        sizes = [rank.training_bytes for rank in self.ranks]
        lines = [("most", sizes[most], f"rank {most}, as above"), ("least", sizes[least], f"rank {least}")]
        if sizes[most] == sizes[least]:
            lines = [("each rank", sizes[0], "as above")]
        lines.append(("all ranks", sum(sizes), f"of a mesh of {' x '.join(map(str, self.mesh))}"))
        return [(what, "", "", f"{size:,}", why) for what, size, why in lines]

    def __str__(self) -> str:
        return self.table()


def _grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows whose paths differ in numbers only, and that rest alike, as one, where the first of them stood."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        pattern = tuple("*" if word.isdecimal() else word for word in row.path.split("."))
        alike.setdefault((pattern, row.format, row.shape, row.bytes, row.why), []).append(row)
    return [_one(group) for group in alike.values()]


def _one(group: list[Row]) -> Row:
    if len(group) == 1:
        return group[0]
    words = zip(*(row.path.split(".") for row in group), strict=True)
    path = ".".join(each[0] if len(set(each)) == 1 else "*" for each in words)
    return group[0]._replace(path=f"{path} x {len(group)}", bytes=sum(row.bytes for row in group))
