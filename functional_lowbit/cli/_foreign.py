"""A leaf of another library's state as `inspect` sees it: format, numbers, problems. `convert` knows how to read it."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit.cli._numbers import CHUNK, Numbers, bad_scales, count, dense_parts, pieces, size_of, unreadable
from functional_lowbit.convert import _bitsandbytes as bitsandbytes, _torchao as torchao
from functional_lowbit.convert._kept import Blocks
from functional_lowbit.convert._torchao import is_torchao
from functional_lowbit.sharding import local_of


class Foreign(NamedTuple):
    """What was found of a leaf."""

    format: str
    shape: tuple[int, ...]
    block_size: int | None
    bytes: int
    numbers: Numbers | None
    problems: list[str]


def read_foreign(parts: Mapping[str, Any]) -> Foreign:
    """A leaf, by its parts: "" for the tensor or number, ".absmax" and ".qmap" beside it in bitsandbytes."""
    x = parts[""]
    if not isinstance(x, Tensor):
        numbers = count([torch.tensor(_float(x), dtype=torch.float64)])
        return Foreign(type(x).__name__, (), None, 0, numbers, [])
    x = local_of(x)
    shape, absmax, qmap = tuple(parts[""].shape), parts.get(".absmax"), parts.get(".qmap")
    if isinstance(absmax, Tensor) and isinstance(qmap, Tensor):
        absmax, qmap = local_of(absmax), local_of(qmap)
        nbytes = x.nbytes + absmax.nbytes + qmap.nbytes
        return _of_blocks("bitsandbytes 8bit", shape, nbytes, lambda: bitsandbytes.blocks_of(x, absmax, qmap))
    if is_torchao(x):
        own: Any = x
        qmap = getattr(own, "qmap", None)
        name = "fp8" if qmap is None else "4bit" if len(qmap) == 16 else "8bit"
        nbytes = sum(part.nbytes for part in (own.codes, own.scale, qmap) if part is not None)
        return _of_blocks(f"torchao {name}", shape, nbytes, lambda: [torchao.blocks_of(x)])
    dtype, numbers = str(x.dtype).removeprefix("torch."), x
    if x.layout is not torch.strided and not x.is_nested:  # gradients of embeddings, and so their momentum, are sparse
        dtype, numbers = f"{dtype}, sparse", dense_parts(x)[-1]
    odd = unreadable(numbers)
    if odd is not None:
        return Foreign(dtype, shape, None, 0 if x.is_quantized else size_of(x), None, [f"it is {odd}"])
    return Foreign(dtype, shape, None, size_of(x), count(pieces(numbers)), [])


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:  # an int of more than 1024 bits
        return inf


def _of_blocks(format: str, shape: tuple[int, ...], nbytes: int, blocks_of: Callable[[], list[Blocks]]) -> Foreign:
    try:
        found = blocks_of()
    except ValueError as error:
        return Foreign(format, shape, None, nbytes, None, [str(error)])
    numbers = count(piece for blocks in found for piece in blocks.pieces(CHUNK))
    scales = torch.stack([blocks.scales for blocks in found])
    return Foreign(format, shape, found[0].block, nbytes, numbers, bad_scales(scales, zero=True))
