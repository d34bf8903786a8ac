"""A progress bar on a terminal, and nothing where there is none."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDTH = 24  # of the bar, in characters
PAUSE = 0.1  # seconds between two pictures


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[..., None]]:
    """A bar on stderr, which is taken away at the end.

    Nothing is written if stderr is no terminal, so that logs and pipes stay clean.

    Args:
        what: Stands before the bar.
        total: How much there is to do, in any unit.

    Yields:
        `advance(amount, now="")`: called when `amount` more is done; `now` stands behind the bar.
    """
    shown = sys.stderr.isatty() and total > 0
    done, last, started = 0.0, -PAUSE, time.monotonic()

    def advance(amount: float, now: str = "") -> None:
        nonlocal done, last
        done += amount
        seconds = time.monotonic() - started
        if shown and (seconds - last >= PAUSE or done >= total):
            last = seconds
            sys.stderr.write(f"\r\x1b[K{picture(what, done, total, seconds, now)}")
            sys.stderr.flush()

    try:
        advance(0)
        yield advance
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def picture(what: str, done: float, total: float, seconds: float, now: str = "") -> str:
    """One line: `read [####....]  33%  0:04  0.mu.w`, with the time that is left, as far as it can be told."""
    share = min(1.0, done / total)
    filled = round(WIDTH * share)
    left = seconds * (1 - share) / share if share else 0.0
    clock = f"{int(left) // 60}:{int(left) % 60:02}" if share else "-:--"
    return f"{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}  {clock}  {now[:40]}".rstrip()
