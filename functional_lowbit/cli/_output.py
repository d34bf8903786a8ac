"""What a command is told and what it says: kinds of arguments; a result as text or as one JSON document; a mistake."""

import argparse
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

WRONG = (TypeError, ValueError)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


class Mistake(Exception):
    """Something that the user can put right, told in one line: a wrong path, arguments that do not go together."""

    status = 2  # of the process


class Broken(Mistake):
    """A file that cannot be read, or is not what it should be."""

    status = 1


def said(error: BaseException | Warning | str, speaker: str = "") -> str:
    """The text of an error in one line, without who spoke."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{speaker}: ") if speaker else text


@contextmanager
def told(
    speaker: str, kind: type[Mistake] = Mistake, errors: type[Exception] | tuple[type[Exception], ...] = WRONG
) -> Iterator[None]:
    """Inside it, errors of the library are about what the user gave: its own, in one line without who spoke."""
    try:
        yield
    except errors as error:
        raise kind(said(error, speaker)) from error


def at_least_0(text: str) -> int:
    """An argument: a whole number of at least 0."""
    return _whole(text, 0)


def at_least_1(text: str) -> int:
    """An argument: a whole number of at least 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


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


class Result(NamedTuple):
    """What a command found."""

    document: dict[str, Any]  # for --json
    text: str  # else
    status: int = 0  # of the process: 0, or 1 if what was asked found a problem


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
