"""torchao's optimizer state: OptimState8bit, OptimState4bit and OptimStateFp8, known by what they hold.

All three have blocks over the flattened local tensor. The classes are not imported: whoever has such a tensor has them.

References:
    torchao/optim/subclass_8bit.py, subclass_4bit.py, subclass_fp8.py.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._kept import Blocks, Codes, Kept, by_map, is_map_of
from functional_lowbit.convert._read import plain, signed
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.sharding import local_of


def is_torchao(x: Any) -> bool:
    """Whether a tensor, or this rank's part of it, is one of torchao's."""
    return isinstance(x, Tensor) and hasattr(own := local_of(x), "codes") and hasattr(own, "scale")


def blocks_of(x: Any) -> Blocks:
    """This rank's codes. A block of zeros has the scale 0."""
    own: Any = local_of(x)
    codes, scales, qmap = own.codes.detach().reshape(-1), own.scale.detach().reshape(-1), getattr(own, "qmap", None)
    if qmap is not None and len(qmap) not in (16, 256):
        raise WrongValue(f"a map of {len(qmap)} numbers, but 16 or 256 codes")
    n, packed = prod(own.shape), qmap is not None and len(qmap) == 16
    if codes.numel() * (2 if packed else 1) != n or (n and (not scales.numel() or n % scales.numel())):
        raise WrongValue(f"{codes.numel()} codes and {scales.numel()} scales for {n} elements")
    decode = (lambda codes, scales: codes.float() * scales) if qmap is None else by_map(qmap.detach())
    return Blocks(codes, scales, n // scales.numel() if n else 1, decode, packed)


def read_moment(param: SavedParam, entry: str, x: Any) -> Kept:
    """A moment of torchao's Adam and AdamW."""
    if not is_torchao(x):  # small parameters have plain tensors
        return plain(param, entry, x)
    try:
        blocks = blocks_of(x)
    except WrongValue as error:
        raise WrongValue(f"{entry!r} of {param.words} has {error}; the file is damaged") from error
    own: Any = local_of(x)
    return blocks.kept(x, _known(blocks, getattr(own, "qmap", None), bool(getattr(own, "signed", signed(entry)))))


def _known(blocks: Blocks, qmap: Tensor | None, is_signed: bool) -> Codes | None:
    """The codes as one of our formats has them."""
    if qmap is None:
        return blocks._replace(codes=blocks.codes.view(torch.uint8)).known("e4m3", is_signed)
    for format in ("dynamic8", "dynamic4"):
        if is_map_of(format, is_signed, qmap):
            return blocks.known(format, is_signed)
    steps = torch.arange(1, 17, device=qmap.device) / 16
    if not is_signed and qmap.shape == steps.shape and torch.equal(qmap.float(), steps):
        # Ours keeps a code for 0 and has none for 15/16, which becomes 1.
        return Codes("dynamic4", False, lambda: (blocks.each() + 1).clamp_max(15), blocks.scales, blocks.block)
    return None
