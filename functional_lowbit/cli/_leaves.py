"""One leaf looked at: its format, its numbers, and what is wrong with it."""

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, zeros
from functional_lowbit._core.version import __version__
from functional_lowbit.checkpoint import _schema
from functional_lowbit.cli._foreign import read_foreign
from functional_lowbit.cli._listed import Leaf
from functional_lowbit.cli._numbers import Numbers, bad_scales, count, decoded, pieces, share, take, unreadable
from functional_lowbit.cli._output import Broken
from functional_lowbit.sharding import local_of

META = torch.device("meta")


class Row(NamedTuple):
    """What is said of a leaf."""

    path: str
    format: str
    shape: tuple[int, ...]
    block_size: int | None
    bytes: int
    numbers: Numbers | None  # None if they cannot be read
    problems: list[str]


def look(leaf: Leaf) -> Row:
    """Read a leaf and judge it. Only this leaf is in memory."""
    try:
        parts = {ending: take(x) for ending, x in leaf.parts.items()}
    except Broken as broken:
        return _row(leaf, None, [str(broken)])
    if leaf.described is None:
        found = read_foreign(parts)
        problems = found.problems if found.numbers is None else found.problems + judge(found.numbers, leaf.nonnegative)
        return Row(leaf.path, *found._replace(problems=problems))
    if leaf.described["kind"] == "quantized":
        return _quantized(leaf, leaf.described, parts)
    if leaf.described["kind"] == "tensor":
        return _plain(leaf, leaf.described, parts)
    x = parts.get("")
    problems = [f"the entry is a {type(x).__name__}, and no {leaf.described['kind']}"] if "" in parts else []
    problems = problems if type(x).__name__ != leaf.described["kind"] else []
    if isinstance(x, float) and not isfinite(x):
        problems.append(f"the number is {x}")
    return Row(leaf.path, leaf.described["kind"], (), None, 0, None, [*_missing(leaf), *problems])


def _row(leaf: Leaf, numbers: Numbers | None, problems: list[str]) -> Row:
    described = leaf.described or {}
    parts = described.get("parts", {})
    name = described.get("format") or next((str(x) for x in parts.values()), "unknown")
    return Row(
        leaf.path, name, tuple(described.get("shape", ())), described.get("block_size"), leaf.nbytes, numbers, problems
    )


def _missing(leaf: Leaf) -> list[str]:
    assert leaf.described is not None
    return [
        f"the entry {leaf.path + ending!r} is missing" for ending in leaf.described["parts"] if ending not in leaf.parts
    ]


def _plain(leaf: Leaf, described: Mapping[str, Any], parts: Mapping[str, Any]) -> Row:
    problems = _missing(leaf) or _misfit(leaf.path, "", parts[""], described["parts"][""], tuple(described["shape"]))
    if problems:
        return _row(leaf, None, problems)
    numbers = count(pieces(local_of(parts[""])))
    return _row(leaf, numbers, judge(numbers, leaf.nonnegative))


def _quantized(leaf: Leaf, described: Mapping[str, Any], parts: Mapping[str, Any]) -> Row:
    problems = _missing(leaf)
    if described["format"] not in formats.names():
        problems.append(f"the format {described['format']!r} is none that version {__version__} has")
    if problems:
        return _row(leaf, None, problems)
    format, signed, shape = formats.get(described["format"]), described["signed"], tuple(described["shape"])
    if described["stored"] == "values":
        problems = _misfit(leaf.path, _schema.VALUES, parts[_schema.VALUES], "float32", shape)
        if problems:
            return _row(leaf, None, problems)
        numbers = count(pieces(local_of(parts[_schema.VALUES])))
        return _row(leaf, numbers, judge(numbers, not signed))
    layout = Layout(format, signed, shape, described["block_size"], None)
    empty = zeros(layout, META)
    likes = {".codes": empty.codes} if empty.scales is None else {".codes": empty.codes, ".scales": empty.scales}
    for ending, like in likes.items():
        problems += _misfit(leaf.path, ending, parts[ending], _name(like.dtype), tuple(like.shape))
    if problems:
        return _row(leaf, None, problems)
    if any(local_of(parts[ending]).shape != like.shape for ending, like in likes.items()):
        return _row(leaf, None, [])  # a rank's part of a DTensor, whose blocks another rank may have
    codes, scales = parts[".codes"], parts.get(".scales")
    if scales is not None:
        problems += bad_scales(local_of(scales), zero=False) + _bad_codes(codes, format, signed)
    numbers = count(decoded(QuantizedTensor(local_of(codes), None if scales is None else local_of(scales), layout)))
    return _row(leaf, numbers, [*problems, *judge(numbers, not signed)])


def _misfit(path: str, ending: str, x: Any, dtype: str, shape: tuple[int, ...]) -> list[str]:
    """What is not as the schema says."""
    name = path + ending
    if not isinstance(x, Tensor):
        return [f"the entry {name!r} must be a tensor, is a {type(x).__name__}"]
    odd = unreadable(local_of(x))
    if odd is not None:
        return [f"the entry {name!r} must be a plain tensor, is {odd}"]
    if _name(x.dtype) != dtype:
        return [f"the entry {name!r} must be {dtype}, is {_name(x.dtype)}"]
    if tuple(x.shape) != shape:
        return [f"the entry {name!r} must have shape {shape}, has {tuple(x.shape)}"]
    return []


def _bad_codes(codes: Tensor, format: formats.Format, signed: bool) -> list[str]:
    never = never_written(format, signed)
    bad = 0 if never is None else sum(int(never[piece.int() & 255].sum()) for piece in pieces(local_of(codes)))
    return [share(bad, codes.numel(), "codes", f"none that {format.name} writes")] if bad else []


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
