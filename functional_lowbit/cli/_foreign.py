"""A leaf of another library's state: torch, torchao, bitsandbytes. Their tensors are read as they document them."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit.cli._numbers import CHUNK, Numbers, bad_scales, count, dense_parts, pieces, size_of, unreadable
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
        numbers = count([torch.tensor(_float(x), dtype=torch.float64)])
        return Foreign(type(x).__name__, (), None, 0, numbers, [])
    x = local_of(x)
    shape = tuple(parts[""].shape)
    if all(isinstance(parts.get(part), Tensor) for part in (".absmax", ".qmap")):
        return _bitsandbytes(x, local_of(parts[".absmax"]), local_of(parts[".qmap"]), shape)
    if hasattr(x, "__tensor_flatten__") and hasattr(x, "scale") and hasattr(x, "codes"):
        return _torchao(x, shape)
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


def _torchao(x: Any, shape: tuple[int, ...]) -> Foreign:
    """Codes [*shape] or two to a byte, scale [blocks] (0 for a block of zeros); qmap [256] or [16] but for FP8."""
    qmap = getattr(x, "qmap", None)
    name = "fp8" if qmap is None else "4bit" if len(qmap) == 16 else "8bit"
    nbytes = sum(part.nbytes for part in (x.codes, x.scale, qmap) if part is not None)
    codes, block = x.codes.flatten(), int(x.block_size)
    stored = block // 2 if name == "4bit" else block
    if x.scale.ndim != 1 or len(codes) != len(x.scale) * stored or (qmap is not None and len(qmap) not in (16, 256)):
        problem = f"{len(codes):,} codes in blocks of {block:,} do not fit {tuple(x.scale.shape)} scales"
        return Foreign(f"torchao {name}", shape, block, nbytes, None, [problem])

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
    """Codes uint8 [*shape], absmax [blocks], qmap [256]; the last block may be shorter.

    AdEMAMix keeps two first moments in one: codes [2, *shape], absmax [2, blocks].
    """
    nbytes = codes.nbytes + absmax.nbytes + qmap.nbytes
    two = absmax.ndim == 2 and codes.ndim > 1 and len(absmax) == len(codes)
    if absmax.numel() == 0 or not (two or absmax.ndim == 1) or len(qmap) != 256 or codes.dtype != torch.uint8:
        problem = f"codes {codes.dtype} {shape}, absmax {tuple(absmax.shape)}, qmap {tuple(qmap.shape)} do not fit"
        return Foreign("bitsandbytes 8bit", shape, None, nbytes, None, [problem])
    halves = list(zip(codes, absmax, strict=True)) if two else [(codes, absmax)]
    n, blocks = halves[0][0].numel(), len(halves[0][1])
    # The block size is not saved: it is a power of two that makes this many blocks, 256 or 2048 in all versions.
    block = next((b for b in (256, 2048, 4096, 1024, 512, 128, 64) if -(-n // b) == blocks), None)
    if block is None:
        problem = f"{blocks:,} scales for {n:,} codes fit no block size that the library has"
        return Foreign("bitsandbytes 8bit", shape, None, nbytes, None, [problem])
    at_once = max(1, CHUNK // block)

    def values() -> Iterator[Tensor]:
        for part, scales in halves:
            flat = part.flatten()
            for first in range(0, blocks, at_once):
                some = flat[first * block : (first + at_once) * block]
                scale = scales[first : first + at_once].repeat_interleave(block)[: len(some)]
                yield qmap[some.long()] * scale

    return Foreign("bitsandbytes 8bit", shape, block, nbytes, count(values()), bad_scales(absmax, zero=True))
