"""dynamic8 and dynamic4: the maps of bitsandbytes, torchao and lpmm, code for code, without their tables.

With y = x / absmax, the map has seven decades, from 1e-6 up to 1. The decade D holds n values, at the middles of n
equal cells between 0.1 D and D; n doubles from one decade to the next. Beside them there are 0 and 1, but no -1: the
most negative value is -0.993, so an absmax with a minus sign shrinks by 0.7% each time that it is written. Codes number
the values from below; 0 is code 127 of the signed map and code 0 of the non-negative one.

A look-up among 256 values is a chain of gathers, which is what makes this map slow elsewhere. But inside a decade the
value is linear in the code and the code is linear in the value: six comparisons find the decade, and one line does the
rest. Where two decades meet, the steps on both sides differ, and y is halfway at D * (0.1 + 0.18 / n), with D and n of
the upper one, instead of at 0.1 D.

The rounding is to the nearest value, ties away from 0; float32 leaves the tie inside a decade uncertain by 2 ulp of y.
What differs from torchao:
    - A non-negative number above 0 is never written as 0; there, what is below 1.6e-7 of the absmax is.
    - Ties of negative numbers go away from 0; there, up. Within 2 ulp of a tie the two may choose different neighbours.
    - NaN and Inf do not enter the absmax. No code is free for them: NaN is written as code 255, the largest number, and
      Inf as the largest number of its sign. By then the parameter itself is no longer finite.
    - Blocks below `SMALLEST_SCALE` are scaled as if they reached it; there, the floor is 1e-12.

The signed map of 4 bits is the same with three decades, and 0 at code 7; its most negative value is -0.8875. The
non-negative one is linear: in torchao and lpmm its 16 values are 1/16, 2/16, … 1, and 0 is read as 1/16. Here 0 has
code 0, and 15/16 has none: code c is c / 16 up to 14, torchao's code c - 1, and code 15 is 1. (To give up 1/16 instead
would double the error of an Adam step's small second moments; 15/16 is hardly used.)

References:
    Dettmers, 2015, https://arxiv.org/abs/1511.04561; Dettmers et al., 2021, https://arxiv.org/abs/2110.02861; 4 bits:
    Li et al., 2023, https://arxiv.org/abs/2309.01507.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_lowbit.formats._format import Codec, Format, block_absmax

SMALLEST_SCALE = 2.0**-104
"""As `SMALLEST_ABSMAX`, for a map that reaches further down: 2**-104 * 3.25e-7 > 2**-126, the smallest normal one."""

# Values are counted from the bottom by their position: the number above 0, plus 1 in the non-negative map. It runs from
# n to 2n - 1 inside a decade of n values, so that the same lines serve all maps, and 1.0 is at twice the last n. A
# signed map's first decade has one value, and its cell starts halfway to 0.
DECADES = tuple(10.0**i for i in range(-6, 1))
SIGNED = tuple(2.0**i for i in range(7))  # n, for each decade
NONNEGATIVE = tuple(2.0**i for i in range(1, 8))
SIGNED_OF_4_BITS = SIGNED[:3]  # of the last three decades


def _select(x: Tensor, edges: Sequence[float], *tables: Sequence[float]) -> list[Tensor]:
    """Of each table values[i] where edges[i - 1] <= x < edges[i], and the last one for NaN: float32, like x."""
    # Tensors to begin with, since `where` of two Python floats has the default dtype.
    chosen = [torch.full_like(x, values[-1]) for values in tables]
    for i in reversed(range(len(edges))):
        below = x < edges[i]
        chosen = [torch.where(below, values[i], old) for values, old in zip(tables, chosen, strict=True)]
    return chosen


def _position(y: Tensor, counts: Sequence[float]) -> Tensor:
    """The position of the value nearest to |y|; above the last decade only for y > 0: float32, like y."""
    magnitude = y.abs()
    decades = DECADES[-len(counts) :]
    edges = [decade * (0.1 + 0.18 / n) for decade, n in zip(decades[1:], counts[1:], strict=True)]
    slopes = [n / 0.9 / decade for decade, n in zip(decades, counts, strict=True)]
    if counts[0] == 1:
        slopes[0] = (1 / 9) / (0.5 * 0.55 * decades[0])
    n, slope = _select(magnitude, edges, counts, slopes)
    cell = torch.floor(slope * magnitude - n * (1 / 9))
    cell = torch.minimum(cell, n - 1)  # what lies between the decade's last value and the next one's edge
    return torch.where(y < 1 - 0.225 / counts[-1], n + cell, 2 * counts[-1])  # also NaN


def _value(position: Tensor, counts: Sequence[float]) -> Tensor:
    """The way back: float32, like position, in [0, 1]; at most 2 ulp from torchao's table."""
    decades = DECADES[-len(counts) :]
    # 18 position - (16 n - 9) is a whole number, so only the slope and the product are rounded.
    offsets = [16 * n - 9 for n in counts]
    slopes = [decade / 20 / n for decade, n in zip(decades, counts, strict=True)]
    if counts[0] == 1:
        offsets[0], slopes[0] = 0.0, 0.55 * decades[0] / 18  # one value needs no line of its own: this one passes 0
    offset, slope = _select(position, counts[1:], offsets, slopes)
    return torch.where(position < 2 * counts[-1], slope * (18 * position - offset), 1.0)


def _scale(x: Tensor) -> Tensor:
    """float32[n, b] -> float32[n, 1]."""
    return block_absmax(x).clamp_min(SMALLEST_SCALE)


def _encode_signed(x: Tensor, counts: Sequence[float]) -> tuple[Tensor, Tensor]:
    scales = _scale(x)
    y = x / scales  # not x * (1 / scales), which would move numbers across a tie
    position, zero = _position(y, counts), 2 * counts[-1] - 1
    return torch.where(y < 0, zero - position, zero + position).to(torch.uint8), scales


def _decode_signed(codes: Tensor, scales: Tensor, counts: Sequence[float]) -> Tensor:
    position = codes.float() - (2 * counts[-1] - 1)
    return _value(position.abs(), counts) * torch.where(position < 0, -scales, scales)


def encode_signed(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> uint8[n, b], float32[n, 1] absmax."""
    return _encode_signed(x, SIGNED)


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse."""
    return _decode_signed(codes, scales, SIGNED)


def encode_nonnegative(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b], float32[n, 1] absmax."""
    scales = _scale(x)
    position = _position(x / scales, NONNEGATIVE)
    # The smallest value is at position 2. A live second moment must not read as 0: the step would be m / eps. Ask x
    # and not y, which may have underflowed.
    position = torch.where(position < 2, 2.0, position)
    return torch.where(x <= 0, 0.0, position - 1).to(torch.uint8), scales


def decode_nonnegative(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse."""
    codes = codes.float()
    return torch.where(codes == 0, 0.0, _value(codes + 1, NONNEGATIVE) * scales)


def encode_signed_4_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> uint8[n, b] (0 … 15), float32[n, 1] absmax."""
    return _encode_signed(x, SIGNED_OF_4_BITS)


def decode_signed_4_bits(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse."""
    return _decode_signed(codes, scales, SIGNED_OF_4_BITS)


def encode_nonnegative_4_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b] (0 … 15), float32[n, 1] absmax."""
    scales = _scale(x)
    y = x / scales
    codes = torch.floor(16 * y + 0.5).clamp(1.0, 14.0)  # again, a live second moment must not read as 0
    codes = torch.where(y < 15 / 16, codes, 15.0)  # also NaN
    return torch.where(x <= 0, 0.0, codes).to(torch.uint8), scales


def decode_nonnegative_4_bits(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse."""
    codes = codes.float()
    return torch.where(codes < 15, codes * (1 / 16), 1.0) * scales


dynamic8 = Format(
    name="dynamic8",
    bits=8,
    signed=Codec(encode_signed, decode_signed, torch.uint8, 127, SMALLEST_SCALE, idempotent=False),
    nonnegative=Codec(encode_nonnegative, decode_nonnegative, torch.uint8, zero_scale=SMALLEST_SCALE),
)
dynamic4 = Format(
    name="dynamic4",
    bits=4,
    signed=Codec(
        encode_signed_4_bits, decode_signed_4_bits, torch.uint8, 7, SMALLEST_SCALE, packing=2, idempotent=False
    ),
    nonnegative=Codec(
        encode_nonnegative_4_bits, decode_nonnegative_4_bits, torch.uint8, zero_scale=SMALLEST_SCALE, packing=2
    ),
    block_size=128,
)
