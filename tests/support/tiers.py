"""Two tiers of tests: `make test` runs all but those that are marked slow, `make test-all` runs all.

Slow is what repeats at a price: one more row of a product whose other rows are quick (a fifth format through inductor,
a fourth number of ranks), or what only time can show. The quick ones touch every feature, every format, and real ranks.
"""

import inspect
from collections.abc import Callable

import pytest

slow = pytest.mark.slow


def slow_unless(quick: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark the rows slow for which this is false. It takes those of the test's parameters that it names."""
    return pytest.mark.slow_unless.with_args(quick)


def mark_rows(items: list[pytest.Item]) -> None:
    """Mark the rows of all tests that `slow_unless` decorates."""
    for item in items:
        for mark in item.iter_markers("slow_unless"):
            (quick,) = mark.args
            row = item.callspec.params  # type: ignore[attr-defined]  a test with parameters has it
            if not quick(*(row[name] for name in inspect.signature(quick).parameters)):
                item.add_marker(slow)
