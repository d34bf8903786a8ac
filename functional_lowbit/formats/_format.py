"""What a format is: a way to write a block of float32 numbers in few bits, and to read it back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALLEST_ABSMAX = 2.0**-110
"""Blocks whose largest magnitude is below this are scaled as if it were this.

It keeps every decoded non-zero number a normal float32 (2**-110 / 255**2 > 2**-126), so that a device which flushes
subnormals cannot turn a live second moment into 0, and it gives an all-zero block a scale without a division by 0.
"""


class Codec(NamedTuple):
    """How one kind of moment (signed, or non-negative) is written and read.

    Both functions are pure, work on a grid of blocks, and are traced into the compiled step. They know nothing of
    packing: with two codes in a byte, a code is still one uint8 here, and `write` and `read` pack and unpack.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # float32[n, b] -> codes [n, b], scales [n, 1]
    decode: Callable[[Tensor, Any], Tensor]  # the way back, float32[n, b]; scales are None only where encode's are
    dtype: torch.dtype  # of the codes
    zero_code: int = 0  # what 0 is written as, in every block
    zero_scale: float | None = SMALLEST_ABSMAX  # the scale of an all-zero block; None for codes without scales
    packing: int = 1  # codes in one stored byte: 1, or 2 for 4-bit codes
    idempotent: bool = True  # whether encode(decode(codes)) are the same codes; else unchanged blocks are left alone

    def write(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """float32[n, b] -> what rests: codes [n, width(b)], scales [n, 1]."""
        codes, scales = self.encode(x)
        return (codes if self.packing == 1 else pack(codes)), scales

    def read(self, codes: Tensor, scales: Tensor | None, block: int) -> Tensor:
        """The way back: float32[n, block]."""
        return self.decode(codes if self.packing == 1 else unpack(codes, block), scales)

    def width(self, block: int) -> int:
        """Stored codes of a block of `block` elements."""
        return -(-block // self.packing)

    @property
    def stored_zero(self) -> int:
        """What rests of zeros: the code of 0, in both halves of a byte where two share it."""
        return self.zero_code if self.packing == 1 else self.zero_code | (self.zero_code << 4)

    @property
    def parts(self) -> int:
        """How many tensors a moment rests in: codes, and perhaps scales."""
        return 1 if self.zero_scale is None else 2


class Format(NamedTuple):
    """A storage format for moments. A leaf is stored as codes, and one float32 scale for each block."""

    name: str
    bits: int  # of one code
    signed: Codec
    nonnegative: Codec
    block_size: int = 256  # default; elements that share one scale
    scaled: bool = True  # False: codes only, no scales (bfloat16, float32)

    def codec(self, signed: bool) -> Codec:
        """The signed or the non-negative half."""
        return self.signed if signed else self.nonnegative

    def __repr__(self) -> str:
        return f"<format {self.name}>"


def block_absmax(x: Tensor) -> Tensor:
    """The largest finite magnitude of each block, at least `SMALLEST_ABSMAX`: float32[n, b] -> float32[n, 1].

    NaN and Inf are passed over, so that they cannot spoil the rest of their block.
    """
    return block_max(x.abs()).clamp_min(SMALLEST_ABSMAX)


def block_max(x: Tensor) -> Tensor:
    """The largest finite number of each block, and at least 0: float32[n, b] -> float32[n, 1]."""
    return torch.where(x < float("inf"), x, 0.0).amax(dim=-1, keepdim=True)


def unit_of(largest: Tensor, levels: float) -> Tensor:
    """What makes `levels` units the largest number of a block, to 20 significant bits: float32[n, 1], like `largest`.

    Products of a unit with a number of 4 bits (up to 15, or a float of 8 bits) are exact. So the largest number that is
    read gives the same unit when it is written again, on a device with any kind of division.
    """
    bits = (largest * (1.0 / levels)).view(torch.int32)
    return ((bits + 7) & -16).view(torch.float32)  # 7 and not 8: float32's largest number goes down, not to Inf


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes in one byte: uint8[n, b] -> uint8[n, h], h = ceil(b / 2).

    Element j shares a byte with element j + h, which has the high half, so that no strided access is needed. With an
    odd b the last high half is unused: it repeats the block's first code.
    """
    half = (codes.shape[-1] + 1) // 2
    longer = torch.cat([codes, codes[:, :1]], dim=-1)
    return longer[:, :half] | (longer[:, half : 2 * half] << 4)


def unpack(packed: Tensor, block: int) -> Tensor:
    """The way back: uint8[n, h] -> uint8[n, block]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)[:, :block]
