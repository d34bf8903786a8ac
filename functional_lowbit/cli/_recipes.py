"""Optimizers by the names that are typed on the command line."""

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import functional_lowbit as fl
from functional_lowbit.cli._output import Mistake

LR = 1e-3  # no number of a plan depends on it
FAMILIES: dict[str, tuple[Callable[[], fl.GradientTransformation], Callable[..., fl.GradientTransformation]]] = {
    "adamw": (lambda: fl.adamw(LR), fl.adamw8bit),
    "adam": (lambda: fl.adam(LR), fl.adam8bit),
    "lion": (lambda: fl.lion(LR), fl.lion8bit),
    "sgd": (lambda: fl.sgd(LR, 0.9), fl.sgd8bit),
}
READY = ("adamw8bit", "adamw4bit", "adamwfp8", "adam8bit", "adam4bit", "adamfp8", "lion8bit", "sgd8bit")
ALL = "all"


class Recipe(NamedTuple):
    """An optimizer in a format."""

    optimizer: str
    format: str
    tx: fl.GradientTransformation


def in_format(family: str, format: str, block_size: int | None = None) -> fl.GradientTransformation:
    """An optimizer whose moments rest in a format; float32 is the optimizer without `low_bit`."""
    plain, stored = FAMILIES[family]
    return plain() if format == "float32" else stored(LR, format=format, block_size=block_size)


def chosen(optimizers: Sequence[str], formats: Sequence[str], block_size: int | None) -> list[Recipe]:
    """Every optimizer in every format; one with a format in its name (adamw4bit) in that, unless formats are given.

    Raises:
        Mistake: for a name that is none.
    """
    names = list(FAMILIES) if list(optimizers) == [ALL] else list(optimizers)
    wanted = list(fl.formats.names()) if list(formats) == [ALL] else list(formats)
    for format in wanted:
        if format not in fl.formats.names():
            raise Mistake(f"--format must be of {', '.join(fl.formats.names())} or {ALL}; got {format!r}")
    found = []
    for name in names:
        if name in FAMILIES:
            found += [Recipe(name, f, in_format(name, f, block_size)) for f in wanted or fl.formats.names()]
        elif name in READY:
            own = inspect.signature(getattr(fl, name)).parameters["format"].default
            family = next(f for f in FAMILIES if name.removeprefix(f) in ("8bit", "4bit", "fp8"))
            found += [Recipe(name, f, in_format(family, f, block_size)) for f in wanted or [own]]
        else:
            raise Mistake(f"--optimizer must be of {', '.join((*FAMILIES, *READY))} or {ALL}; got {name!r}")
    return found
