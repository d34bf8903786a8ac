"""What a command hands back, and how it is written: a table for people, or one JSON document."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What a command found."""

    document: dict[str, Any]  # for --json
    text: str  # else
    status: int = 0  # of the process: 0, or 1 if what was asked found a problem


def table(head: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns as wide as their widest cell.

    Args:
        head: Names of the columns.
        lines: Cells, as many in each line as there are names.
        right: Names of the columns whose cells are set to the right: numbers.
    """
    all_lines = [head, *lines]
    widths = [max(len(line[i]) for line in all_lines) for i in range(len(head))]
    to_right = [name in right for name in head]
    padded = [
        [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, to_right, strict=True)] for line in all_lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_json(document: dict[str, Any]) -> str:
    """One JSON document. NaN and Inf, which JSON does not have, are written as null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(x: Any) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return None
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    return [_finite(value) for value in x] if isinstance(x, (list, tuple)) else x


def size(count: float) -> str:
    """Bytes in the unit that people read: `4.41 MB`. Units are powers of 1000, as disks and networks count."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    if unit == "bytes":
        return f"{count:,.0f} {'byte' if count == 1 else 'bytes'}"
    return f"{count:,.{0 if count >= 100 else 1 if count >= 10 else 2}f} {unit}"


def counted(n: int, what: str) -> str:
    """`1 leaf`, `2 leaves`."""
    plural = what[:-1] + "ves" if what.endswith("f") else what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{n:,} {what if n == 1 else plural}"
