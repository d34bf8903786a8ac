"""Codes that other libraries keep by blocks of the flattened tensor: looked up in their map, and known by it."""

from functools import cache

import torch
from torch import Tensor

from functional_lowbit import formats

EQUAL = 4e-7  # relative; our decoded values are at most 2 ulp from the tables of torchao and bitsandbytes


def by_map(codes: Tensor, qmap: Tensor, scales: Tensor, block: int) -> Tensor:
    """float32 numbers of uint8 codes [n]; the last block may be shorter."""
    return qmap.float()[codes.long()] * per_element(scales, block, codes.numel())


def per_element(scales: Tensor, block: int, n: int) -> Tensor:
    """The scale of each element: float32 [n]."""
    return scales.float().reshape(-1).repeat_interleave(block)[:n]


def is_map_of(format: str, signed: bool, qmap: Tensor) -> bool:
    """Whether a table has the values of one of our formats, code for code."""
    ours = _table(format, signed)
    theirs = qmap.detach().cpu().float()
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=EQUAL, atol=0)


@cache
def _table(format: str, signed: bool) -> Tensor:
    codec = formats.get(format).codec(signed)
    codes = torch.arange(256 if codec.packing == 1 else 16, dtype=torch.uint8, device="cpu")
    return codec.decode(codes[None], torch.ones(1, 1, device="cpu"))[0]
