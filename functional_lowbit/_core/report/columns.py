"""A table in text: columns as wide as their widest cell."""

from collections.abc import Sequence


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
