"""What a command is told and what it says: kinds of arguments; a result as text or as JSON; progress; a mistake."""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from functional_lowbit._refused import Refused

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
WIDTH = 24  # of the bar, in characters
PAUSE = 0.1  # seconds between two pictures

Advance = Callable[..., None]
"""`advance(amount, now="")`: called when `amount` more is done; `now` stands behind the bar."""


class Mistake(Exception):
    """Something that the user can put right, told in one line: a wrong path, arguments that do not go together."""

    status = 2  # of the process


class Broken(Mistake):
    """A file that cannot be read, or is not what it should be."""

    status = 1


class Result(NamedTuple):
    """What a command found."""

    document: dict[str, Any]  # for --json
    text: str  # else
    status: int = 0  # of the process: 0, or 1 if what was asked found a problem


def said(error: BaseException) -> str:
    """The text of an error in one line, without who spoke."""
    text = error.reason if isinstance(error, Refused) else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def told(
    kind: type[Mistake] = Mistake, errors: type[Exception] | tuple[type[Exception], ...] = Refused
) -> Iterator[None]:
    """Inside it, errors of the library are about what the user gave: its own, in one line without who spoke."""
    try:
        yield
    except errors as error:
        raise kind(said(error)) from error


def at_least(least: int) -> Callable[[str], int]:
    """An argument: a whole number that is not smaller."""

    def whole(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return whole


def amount(text: str) -> int:
    """An argument: a number of at least 1, as 4194304 or 4M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    number = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, as 4194304 or 4M; got {text!r}")
    return number


def words(text: str) -> list[str]:
    """An argument: words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


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
    if count < 1000:
        return counted(round(count), "byte")
    power, unit = next((p, u) for p, u in ((3, "kB"), (6, "MB"), (9, "GB")) if count < 10 ** (p + 3) or u == "GB")
    count /= 10**power
    return f"{count:,.{0 if count >= 100 else 1 if count >= 10 else 2}f} {unit}"


def counted(n: int, what: str) -> str:
    """`1 leaf`, `2 leaves`."""
    plural = what[:-1] + "ves" if what.endswith("f") else what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{n:,} {what if n == 1 else plural}"


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """A bar on stderr with `what` before it, which is taken away at the end; nothing where stderr is no terminal."""
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
    left = int(seconds * (1 - share) / share) if share else 0
    clock = f"{left // 60}:{left % 60:02}" if share else "-:--"
    return f"{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}  {clock}  {now[:40]}".rstrip()
