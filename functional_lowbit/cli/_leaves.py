"""One leaf looked at: its format, its numbers, and what is wrong with it."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.version import __version__
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import expected, joined
from functional_lowbit.cli._numbers import (
    CHUNK,
    Numbers,
    bytes_of,
    count,
    decoded,
    dense_parts,
    pieces,
    take,
    unreadable,
)
from functional_lowbit.cli._output import Broken
from functional_lowbit.cli._sections import Unread
from functional_lowbit.convert import _bitsandbytes as bitsandbytes, _torchao as torchao
from functional_lowbit.convert._kept import Blocks
from functional_lowbit.sharding import local_of


class Row(NamedTuple):
    """What is said of a leaf."""

    path: str
    role: str | None  # what it is in a state, if that is known
    format: str
    shape: tuple[int, ...]
    block_size: int | None
    bytes: int
    numbers: Numbers | None  # None if they cannot be read
    problems: list[str]


def look(leaf: Unread) -> Row:
    """Read a leaf and judge it. Only this leaf is in memory."""
    described = leaf.described or {}
    name = described.get("format") or next(map(str, described.get("parts", {}).values()), "unknown")
    shape, block = tuple(described.get("shape", ())), described.get("block_size")
    row = Row(leaf.path, leaf.role, name, shape, block, leaf.nbytes, None, [])
    try:
        parts = {ending: take(x) for ending, x in leaf.parts.items()}
    except Broken as broken:
        return row._replace(problems=[str(broken)])
    row = _of_another_library(row, parts) if leaf.described is None else _of_ours(row, described, parts)
    if row.numbers is None:
        return row
    below = row.numbers.negative if leaf.nonnegative else 0
    return row._replace(problems=row.problems + _wrong(row.numbers, "numbers", {"below 0, and never should be": below}))


def _of_ours(row: Row, described: Mapping[str, Any], parts: Mapping[str, Any]) -> Row:
    kind, path = described["kind"], row.path
    missing = [f"the entry {path + end!r} is missing" for end in described["parts"] if end not in parts]
    if kind not in ("tensor", "quantized"):
        row = row._replace(format=kind, bytes=0, problems=missing)
        x = parts.get("")
        if not missing and type(x).__name__ != kind:
            return row._replace(problems=[f"the entry is a {type(x).__name__}, and no {kind}"])
        return row._replace(problems=[f"the number is {x}"]) if isinstance(x, float) and not isfinite(x) else row
    if described.get("format", "float32") not in formats.names():
        missing.append(f"the format {row.format!r} is none that version {__version__} has")
    if missing:
        return row._replace(problems=missing)
    wanted = expected(path, described)
    problems = [text for ending, like in wanted.items() for text in _misfit(path + ending, parts[ending], *like)]
    local = {ending: local_of(x) for ending, x in parts.items() if isinstance(x, Tensor)}
    if problems:
        return row._replace(problems=problems)
    if ".codes" not in local:
        return row._replace(numbers=count(pieces(*local.values())))
    if any(local[ending].shape != shape for ending, (_, shape) in wanted.items()):
        return row  # a rank's part of a DTensor, whose blocks another rank may have
    stored = joined(path, described, local)
    if stored.scales is not None:
        problems = _bad_scales(stored.scales, zero=False)
        never, codes = never_written(stored.format, stored.layout.signed), stored.codes
        bad = 0 if never is None else sum(int(never[piece.int() & 255].sum()) for piece in pieces(codes))
        problems += _wrong(Numbers(total=codes.numel()), "codes", {f"none that {row.format} writes": bad})
    return row._replace(numbers=count(decoded(stored)), problems=problems)


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


def _wrong(found: Numbers, what: str, more: dict[str, int]) -> list[str]:
    """`3 of 576 scales are NaN`: those that are no numbers, and more by what is said of them."""
    kinds = {"NaN": found.nan, "Inf": found.inf, **more}
    return [f"{n:,} of {found.total:,} {what} {'is' if n == 1 else 'are'} {kind}" for kind, n in kinds.items() if n]


def _bad_scales(scales: Tensor, zero: bool) -> list[str]:
    """What is wrong with the scales of a leaf, one for each block. With `zero`, a scale may be 0."""
    found = count(pieces(scales))
    return _wrong(found, "scales", {"below 0": found.negative, "0": 0 if zero else found.zeros})


@lru_cache
def never_written(format: formats.Format, signed: bool) -> Tensor | None:
    """bool[256]: codes of 8 bits that are read as NaN and are not what NaN and Inf are written as; None for no such."""
    codec = format.codec(signed)
    if codec.packing != 1 or codec.dtype.itemsize != 1:
        return None
    codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(codec.dtype)[:, None]
    never = codec.decode(codes, torch.ones(256, 1, device="cpu"))[:, 0].isnan()
    signs = torch.tensor([[1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]], device="cpu")
    edge = torch.tensor([float("nan"), inf, inf, 1.0], device="cpu").expand(2, 4).copysign(signs)
    never[codec.encode(edge)[0].view(torch.uint8).flatten().int()] = False
    return never if bool(never.any()) else None


def _of_another_library(row: Row, parts: Mapping[str, Any]) -> Row:
    """By its parts: "" for the tensor or number, ".absmax" and ".qmap" beside it in bitsandbytes."""
    x = parts[""]
    if not isinstance(x, Tensor):
        try:
            number = float(x)
        except OverflowError:  # an int of more than 1024 bits
            number = inf
        return row._replace(format=type(x).__name__, numbers=count([torch.tensor(number, dtype=torch.float64)]))
    row, x = row._replace(shape=tuple(x.shape)), local_of(x)
    absmax, qmap = parts.get(".absmax"), parts.get(".qmap")
    if isinstance(absmax, Tensor) and isinstance(qmap, Tensor):
        absmax, qmap = local_of(absmax), local_of(qmap)
        row = row._replace(format="bitsandbytes 8bit", bytes=sum(part.nbytes for part in (x, absmax, qmap)))
        return _of_blocks(row, lambda: bitsandbytes.blocks_of(x, absmax, qmap))
    if torchao.is_torchao(x):
        own: Any = x
        qmap = getattr(own, "qmap", None)
        name = "fp8" if qmap is None else "4bit" if len(qmap) == 16 else "8bit"
        nbytes = sum(part.nbytes for part in (own.codes, own.scale, qmap) if part is not None)
        return _of_blocks(row._replace(format=f"torchao {name}", bytes=nbytes), lambda: [torchao.blocks_of(x)])
    dtype, numbers = _schema.name_of(x.dtype), x
    if x.layout is not torch.strided and not x.is_nested:  # gradients of embeddings, and so their momentum, are sparse
        dtype, numbers = f"{dtype}, sparse", dense_parts(x)[-1]
    odd = unreadable(numbers)
    row = row._replace(format=dtype, bytes=0 if odd and x.is_quantized else bytes_of(x))
    return row._replace(problems=[f"it is {odd}"]) if odd else row._replace(numbers=count(pieces(numbers)))


def _of_blocks(row: Row, blocks_of: Callable[[], list[Blocks]]) -> Row:
    try:
        found = blocks_of()
    except ValueError as error:
        return row._replace(problems=[str(error)])
    numbers = count(piece for blocks in found for piece in blocks.pieces(CHUNK))
    scales = _bad_scales(torch.stack([blocks.scales for blocks in found]), zero=True)
    return row._replace(block_size=found[0].block, numbers=numbers, problems=scales)
