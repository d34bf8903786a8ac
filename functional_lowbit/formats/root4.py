"""root4: 4 bits, spaced by a root. The default at 4 bits.

A signed moment has the values ±unit**2 * k**2, k = 0 … 7, at the codes 8 ± k; a non-negative one has unit**4 * k**4 at
the code k, and only 0 itself is at k = 0. The unit makes the largest k the block's absmax.
Both roots put more values near 0, and the fourth root reaches down to 2e-5 of the absmax: a second moment spreads as
the square of the first, and the small ones of a block must not be read as much larger, nor as 0.

Rounding is to the nearest value for a signed moment, and to the nearest k (>= 1, for what is above 0) for a
non-negative one, where the relative error counts. Ties go to the even k.

Code 0 of a signed moment is NaN, which is also what Inf is written as. A non-negative moment has no code to spare: NaN
and Inf are written as the largest value. In Adam the first moment of that element is NaN by then, but for a gradient
whose square alone is too large.

References:
    Li et al., 2023, https://arxiv.org/abs/2309.01507, for 4 bits and a second moment without zero.
"""

import torch
from torch import Tensor

from functional_lowbit.formats._exact import sqrt
from functional_lowbit.formats._format import Codec, Format, block_absmax, unit_of

SIGNED_ZERO, LARGEST_SIGNED, SIGNED_NAN = 8, 7, 0
LARGEST = 15  # k of a non-negative moment

# As SMALLEST_ABSMAX: the square and the fourth power are normal floats.
SMALLEST_SIGNED_UNIT = 2.0**-57
SMALLEST_UNIT = 2.0**-31


def encode_signed(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> uint8[n, b] (0 … 15), float32[n, 1] unit, the root of absmax / 7."""
    units = unit_of(sqrt(block_absmax(x)), LARGEST_SIGNED).clamp_min(SMALLEST_SIGNED_UNIT)
    per_unit = 1.0 / units
    magnitude = x.abs()
    squares = magnitude * (per_unit * per_unit)
    # The middle of k**2 and (k + 1)**2 is (k + 1/2)**2 + 1/4, so this rounds to the nearest value and not root.
    k = torch.round(sqrt((squares - 0.25).clamp_min(0.0)))
    codes = torch.where(x < 0, SIGNED_ZERO - k, SIGNED_ZERO + k)
    return torch.where(magnitude < float("inf"), codes, float(SIGNED_NAN)).to(torch.uint8), units


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse; k * unit is exact."""
    c = codes.float()
    root = (c - SIGNED_ZERO) * scales
    return torch.where(c == SIGNED_NAN, float("nan"), root * root.abs())


def encode_nonnegative(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b] (0 … 15), float32[n, 1] unit, the fourth root of absmax / 15."""
    units = unit_of(sqrt(sqrt(block_absmax(x))), LARGEST).clamp_min(SMALLEST_UNIT)
    k = torch.round(sqrt(sqrt(x)) * (1.0 / units))
    k = torch.where(k <= LARGEST, k.clamp_min(1.0), float(LARGEST))  # a live second moment must not read as 0
    return torch.where(x <= 0, 0.0, k).to(torch.uint8), units


def decode_nonnegative(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse; k * unit is exact."""
    root = codes.float() * scales
    square = root * root
    return square * square


root4 = Format(
    name="root4",
    bits=4,
    signed=Codec(encode_signed, decode_signed, torch.uint8, SIGNED_ZERO, SMALLEST_SIGNED_UNIT, packing=2),
    nonnegative=Codec(encode_nonnegative, decode_nonnegative, torch.uint8, zero_scale=SMALLEST_UNIT, packing=2),
    block_size=128,
)
