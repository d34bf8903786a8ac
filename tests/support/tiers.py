"""Two tiers of tests: `make test` runs all but those that are slow, `make test-all` runs all.

Slow is what repeats at a price: one more row of a product whose other rows are quick, or what only time can show. The
quick ones touch every feature, every format, real ranks and W = 2 and 3. Two kinds of rows are slow by themselves:

* ranks other than 2 or 3, if the test has rows of these;
* what inductor compiles, which takes ten to fifty seconds when nothing is cached, if the test has rows without it.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

slow = pytest.mark.slow


def slow_unless(quick: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark the rows slow for which this is false. It takes those of the test's parameters that it names."""
    return pytest.mark.slow_unless.with_args(quick)


def mark_rows(items: list[pytest.Item]) -> None:
    """Mark the rows that are slow, of all tests that have rows."""
    rows: dict[Any, list[tuple[pytest.Item, dict[str, Any]]]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            rows[item.function].append((item, item.callspec.params))  # type: ignore[attr-defined]
    for test in rows.values():
        for repeats in (_other_ranks, _by_inductor):
            if not all(repeats(row) for _, row in test):
                _mark([item for item, row in test if repeats(row)])
        for item, row in test:
            for mark in item.iter_markers("slow_unless"):
                (quick,) = mark.args
                if not quick(*(row[name] for name in inspect.signature(quick).parameters)):
                    _mark([item])


def _other_ranks(row: dict[str, Any]) -> bool:
    return row.get("world", 2) not in (2, 3)


def _by_inductor(row: dict[str, Any]) -> bool:
    return "inductor" in [value for value in row.values() if isinstance(value, str)]


def _mark(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(slow)
