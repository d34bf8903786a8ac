"""Optimizers by the names that are typed on the command line."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import functional_lowbit as fl
from functional_lowbit.cli._output import Mistake

LR = 1e-3  # no number of a plan depends on it
FAMILIES = {  # in float32; with moments in few bits they are fl.adamw8bit, …
    "adamw": partial(fl.adamw, LR),
    "adam": partial(fl.adam, LR),
    "lion": partial(fl.lion, LR),
    "sgd": partial(fl.sgd, LR, 0.9),
}
READY = {f"{family}{bits}": family for family in FAMILIES for bits in ("8bit", "4bit", "fp8")}
READY = {name: family for name, family in READY.items() if hasattr(fl, name)}
ALL = "all"


class Recipe(NamedTuple):
    """An optimizer in a format."""

    optimizer: str
    format: str
    tx: fl.GradientTransformation


def in_format(family: str, format: str, block_size: int | None = None) -> fl.GradientTransformation:
    """An optimizer whose moments rest in a format; float32 is the optimizer without `low_bit`."""
    if format == "float32":
        return FAMILIES[family]()
    return getattr(fl, f"{family}8bit")(LR, format=format, block_size=block_size)


def chosen(optimizers: Sequence[str], formats: Sequence[str], block_size: int | None) -> list[Recipe]:
    """Every optimizer in every format; one with a format in its name (adamw4bit) in that, unless formats are given.

    Raises:
        Mistake: for a name that is none.
    """
    names = list(FAMILIES) if list(optimizers) == [ALL] else optimizers
    wanted = fl.formats.names() if list(formats) == [ALL] else formats
    for format in wanted:
        if format not in fl.formats.names():
            raise Mistake(f"--format must be of {', '.join(fl.formats.names())} or {ALL}; got {format!r}")
    found = []
    for name in names:
        if name not in (*FAMILIES, *READY):
            raise Mistake(f"--optimizer must be of {', '.join((*FAMILIES, *READY))} or {ALL}; got {name!r}")
        own = [inspect.signature(getattr(fl, name)).parameters["format"].default] if name in READY else None
        family = READY.get(name, name)
        found += [Recipe(name, f, in_format(family, f, block_size)) for f in wanted or own or fl.formats.names()]
    return found
