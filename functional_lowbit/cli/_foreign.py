"""A leaf of another library's state: torch, torchao, bitsandbytes. Their tensors are read as they document them."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit.cli._numbers import CHUNK, Numbers, bad_scales, count, pieces
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
    """A leaf, by its parts: "" for the tensor or number, ".absmax" and ".qmap" for what bitsandbytes keeps beside it.

    References:
        torchao/optim/subclass_8bit.py, subclass_4bit.py, subclass_fp8.py; bitsandbytes/optim/optimizer.py.
    """
    x = parts[""]
    if not isinstance(x, Tensor):
        numbers = count([torch.tensor(float(x), dtype=torch.float64)])
        return Foreign(type(x).__name__, (), None, 0, numbers, [])
    x = local_of(x)
    shape = tuple(parts[""].shape)
    if ".absmax" in parts and ".qmap" in parts:
        return _bitsandbytes(x, local_of(parts[".absmax"]), local_of(parts[".qmap"]), shape)
    if hasattr(x, "__tensor_flatten__") and hasattr(x, "scale") and hasattr(x, "codes"):
        return _torchao(x, shape)
    nbytes = x.nbytes
    return Foreign(str(x.dtype).removeprefix("torch."), shape, None, nbytes, count(pieces(x)), [])


def _torchao(x: Any, shape: tuple[int, ...]) -> Foreign:
    """Codes [*shape] or two to a byte, scale [blocks] (0 for a block of zeros); qmap [256] or [16] but for FP8."""
    qmap = getattr(x, "qmap", None)
    name = "fp8" if qmap is None else "4bit" if len(qmap) == 16 else "8bit"
    nbytes = sum(part.nbytes for part in (x.codes, x.scale, qmap) if part is not None)
    codes, block = x.codes.flatten(), int(x.block_size)
    stored = block // 2 if name == "4bit" else block

    def values() -> Iterator[Tensor]:
        at_once = max(1, CHUNK // block)
        for first in range(0, len(x.scale), at_once):
            scale = x.scale[first : first + at_once, None]
            part = codes[first * stored : (first + len(scale)) * stored]
            if name == "4bit":  # the even element has the high half
                part = torch.stack([part >> 4, part & 15], dim=-1).flatten()
            number = part.float() if qmap is None else qmap[part.long()]
            yield number.view(len(scale), -1) * scale

    return Foreign(f"torchao {name}", shape, block, nbytes, count(values()), bad_scales(x.scale, zero=True))


def _bitsandbytes(codes: Tensor, absmax: Tensor, qmap: Tensor, shape: tuple[int, ...]) -> Foreign:
    """Codes uint8 [*shape], absmax [blocks], qmap [256]; the last block may be shorter."""
    nbytes = codes.nbytes + absmax.nbytes + qmap.nbytes
    if len(absmax) == 0 or len(qmap) != 256 or codes.dtype != torch.uint8:
        problem = f"codes {codes.dtype} {shape}, absmax {tuple(absmax.shape)}, qmap {tuple(qmap.shape)} do not fit"
        return Foreign("bitsandbytes 8bit", shape, None, nbytes, None, [problem])
    n = prod(codes.shape)
    # The block size is not saved: it is a power of two that makes this many blocks, 256 or 2048 in all versions.
    block = next((b for b in (256, 2048, 4096, 1024, 512, 128, 64) if -(-n // b) == len(absmax)), None)
    if block is None:
        problem = f"{len(absmax):,} scales for {n:,} codes fit no block size that the library has"
        return Foreign("bitsandbytes 8bit", shape, None, nbytes, None, [problem])
    flat, at_once = codes.flatten(), max(1, CHUNK // block)

    def values() -> Iterator[Tensor]:
        for first in range(0, len(absmax), at_once):
            part = flat[first * block : (first + at_once) * block]
            scale = absmax[first : first + at_once].repeat_interleave(block)[: len(part)]
            yield qmap[part.long()] * scale

    return Foreign("bitsandbytes 8bit", shape, block, nbytes, count(values()), bad_scales(absmax, zero=True))
