"""companded8: 8 bits, spaced by arithmetic instead of a table. The default.

A signed moment is softsign-companded: with y = x / absmax, the code is 127 * 2y / (1 + |y|), which puts more codes near
0. A non-negative moment is stored as its square root, so that an Adam step, which divides by that root, sees a uniform
grid. Rounding is to the nearest code, ties to the even one.

The idea of companding the moments is FlashOptim's (https://arxiv.org/abs/2602.23349); the handling of zeros, tiny and
non-finite numbers is ours.
"""

import torch
from torch import Tensor

from functional_lowbit.formats._exact import sqrt
from functional_lowbit.formats._format import SMALLEST_ABSMAX, Codec, Format, block_absmax, block_max

SMALLEST_ROOT = SMALLEST_ABSMAX**0.5
SIGNED_NAN = -128  # the one int8 code that the symmetric range -127 … 127 leaves free
LARGEST_ROOT, ROOT_NAN = 254, 255  # 254 and not 255 levels, since one code is kept for NaN


def encode_signed(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> int8[n, b], float32[n, 1] absmax."""
    scales = block_absmax(x)
    # x / (absmax/2 + |x|/2) and not 2x / (absmax + |x|), which overflows for magnitudes above half of float32's.
    # The division also turns +-Inf (and NaN) into NaN.
    companded = x / (0.5 * scales + 0.5 * x.abs())
    codes = torch.where(companded == companded, torch.round(127.0 * companded), float(SIGNED_NAN))
    return codes.to(torch.int8), scales


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse: y = c / (254 - |c|), which is exactly 1 at c = 127."""
    c = codes.float()
    x = scales * (c / (254.0 - c.abs()))
    return torch.where(c == SIGNED_NAN, float("nan"), x)


def encode_nonnegative(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b], float32[n, 1] root of absmax."""
    root = sqrt(x)  # an Adam step needs it too, and a compiler computes it once
    scales = block_max(root).clamp_min(SMALLEST_ROOT)
    level = torch.round(root * (LARGEST_ROOT / scales))
    # A live second moment must not read as 0: the step would be m / eps.
    level = torch.where((level < 1) & (root > 0), 1.0, level)
    codes = torch.where(level <= LARGEST_ROOT, level, float(ROOT_NAN))  # also NaN, Inf, and a negative x
    return codes.to(torch.uint8), scales


def decode_nonnegative(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse: (scale * c / 254) ** 2."""
    c = codes.float()
    root = scales * (c * (1.0 / LARGEST_ROOT))  # 254 * float32(1 / 254) is exactly 1, so the largest element is exact
    return torch.where(c == ROOT_NAN, float("nan"), root * root)


companded8 = Format(
    name="companded8",
    bits=8,
    signed=Codec(encode_signed, decode_signed, torch.int8),
    nonnegative=Codec(encode_nonnegative, decode_nonnegative, torch.uint8, zero_scale=SMALLEST_ROOT),
)
