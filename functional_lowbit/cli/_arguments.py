"""Kinds of arguments that several commands take."""

import argparse
import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def at_least_0(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def at_least_1(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def amount(text: str) -> int:
    """A number of at least 1, as 4194304 or 4M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    number = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, as 4194304 or 4M; got {text!r}")
    return number


def words(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
