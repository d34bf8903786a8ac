"""One leaf looked at: its format, its numbers, and what is wrong with it."""

from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.version import __version__
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import expected, joined
from functional_lowbit.cli._foreign import read_foreign
from functional_lowbit.cli._numbers import Numbers, bad_scales, count, decoded, pieces, share, take, unreadable
from functional_lowbit.cli._output import Broken
from functional_lowbit.cli._sections import Leaf
from functional_lowbit.sharding import local_of


class Row(NamedTuple):
    """What is said of a leaf."""

    path: str
    format: str
    shape: tuple[int, ...]
    block_size: int | None
    bytes: int
    numbers: Numbers | None  # None if they cannot be read
    problems: list[str]
    role: str | None = None  # what it is in a state, if that is known


def look(leaf: Leaf) -> Row:
    """Read a leaf and judge it. Only this leaf is in memory."""
    return _look(leaf)._replace(role=leaf.role)


def _look(leaf: Leaf) -> Row:
    try:
        parts = {ending: take(x) for ending, x in leaf.parts.items()}
    except Broken as broken:
        return _row(leaf, None, [str(broken)])
    if leaf.described is None:
        found = read_foreign(parts)
        problems = found.problems if found.numbers is None else found.problems + judge(found.numbers, leaf.nonnegative)
        return Row(leaf.path, *found._replace(problems=problems))
    described = leaf.described
    missing = [f"the entry {leaf.path + end!r} is missing" for end in described["parts"] if end not in parts]
    if described["kind"] not in ("tensor", "quantized"):
        return Row(leaf.path, described["kind"], (), None, 0, None, missing or _odd(parts[""], described["kind"]))
    if described.get("format", "float32") not in formats.names():
        missing.append(f"the format {described['format']!r} is none that version {__version__} has")
    if missing:
        return _row(leaf, None, missing)
    wanted = expected("inspect", leaf.path, described)
    problems = [text for ending, like in wanted.items() for text in _misfit(leaf.path + ending, parts[ending], *like)]
    if problems:
        return _row(leaf, None, problems)
    local = {ending: local_of(x) for ending, x in parts.items()}
    if ".codes" not in local:
        numbers = count(pieces(*local.values()))
        return _row(leaf, numbers, judge(numbers, leaf.nonnegative))
    if any(local[ending].shape != shape for ending, (_, shape) in wanted.items()):
        return _row(leaf, None, [])  # a rank's part of a DTensor, whose blocks another rank may have
    stored = joined("inspect", leaf.path, described, local)
    if stored.scales is not None:
        problems = bad_scales(stored.scales, zero=False) + _bad_codes(stored)
    numbers = count(decoded(stored))
    return _row(leaf, numbers, [*problems, *judge(numbers, leaf.nonnegative)])


def _row(leaf: Leaf, numbers: Numbers | None, problems: list[str]) -> Row:
    described = leaf.described or {}
    parts = described.get("parts", {})
    name = described.get("format") or next((str(x) for x in parts.values()), "unknown")
    return Row(
        leaf.path, name, tuple(described.get("shape", ())), described.get("block_size"), leaf.nbytes, numbers, problems
    )


def _odd(x: Any, kind: str) -> list[str]:
    """What is wrong with a number or a string."""
    if type(x).__name__ != kind:
        return [f"the entry is a {type(x).__name__}, and no {kind}"]
    return [f"the number is {x}"] if isinstance(x, float) and not isfinite(x) else []


def _misfit(name: str, x: Any, dtype: str, shape: tuple[int, ...]) -> list[str]:
    """What is not as the schema says."""
    if not isinstance(x, Tensor):
        return [f"the entry {name!r} must be a tensor, is a {type(x).__name__}"]
    odd = unreadable(local_of(x))
    if odd is not None:
        return [f"the entry {name!r} must be a plain tensor, is {odd}"]
    if _schema.name_of(x.dtype) != dtype:
        return [f"the entry {name!r} must be {dtype}, is {_schema.name_of(x.dtype)}"]
    if tuple(x.shape) != shape:
        return [f"the entry {name!r} must have shape {shape}, has {tuple(x.shape)}"]
    return []


def _bad_codes(stored: QuantizedTensor) -> list[str]:
    never = never_written(stored.format, stored.layout.signed)
    bad = 0 if never is None else sum(int(never[piece.int() & 255].sum()) for piece in pieces(stored.codes))
    return [share(bad, stored.codes.numel(), "codes", f"none that {stored.format.name} writes")] if bad else []


@lru_cache
def never_written(format: formats.Format, signed: bool) -> Tensor | None:
    """bool[256]: codes of 8 bits that are read as NaN and are not what NaN and Inf are written as; None for no such."""
    codec = format.codec(signed)
    if codec.packing != 1 or codec.dtype.itemsize != 1:
        return None
    codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(codec.dtype)[:, None]
    read = codec.decode(codes, torch.ones(256, 1, device="cpu"))[:, 0]
    nan, inf = float("nan"), float("inf")
    edge = torch.tensor([[nan, inf, -inf, 1.0], [-nan, inf, -inf, 1.0]], device="cpu").copysign(
        torch.tensor([[1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]], device="cpu")
    )
    written = codec.encode(edge)[0].view(torch.uint8).flatten().int()
    never = read.isnan()
    never[written] = False
    return never if bool(never.any()) else None


def judge(numbers: Numbers, nonnegative: bool) -> list[str]:
    """What is wrong with the numbers of a leaf."""
    below = numbers.negative if nonnegative else 0
    kinds = {"NaN": numbers.nan, "Inf": numbers.inf, "below 0, and never should be": below}
    return [share(n, numbers.total, "numbers", kind) for kind, n in kinds.items() if n]
