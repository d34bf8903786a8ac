"""What a format is: a way to write a block of float32 numbers in few bits, and to read it back."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_ABSMAX = 2.0**-110
"""Blocks whose largest magnitude is below this are scaled as if it were this.

It keeps every decoded non-zero number a normal float32 (2**-110 / 255**2 > 2**-126), so that a device which flushes
subnormals cannot turn a live second moment into 0, and it gives an all-zero block a scale without a division by 0.
"""


class Codec(NamedTuple):
    """How one kind of moment (signed, or non-negative) is written and read.

    Both functions are pure, work on a grid of blocks, and are traced into the compiled step.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # float32[n, b] -> codes [n, b / packing], scales [n, 1]
    decode: Callable[[Tensor, Tensor | None], Tensor]  # the way back, float32[n, b]
    dtype: torch.dtype  # of the codes
    zero_code: int = 0  # what 0 is written as, in every block
    zero_scale: float | None = SMALLEST_ABSMAX  # the scale of an all-zero block; None for codes without scales
    packing: int = 1  # elements in one code

    def width(self, block: int) -> int:
        """Codes of a block of `block` elements."""
        return -(-block // self.packing)

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
    magnitude = x.abs()
    finite = torch.where(magnitude < float("inf"), magnitude, 0.0)
    return finite.amax(dim=-1, keepdim=True).clamp_min(SMALLEST_ABSMAX)
