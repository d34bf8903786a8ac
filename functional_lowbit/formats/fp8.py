"""e4m3 and e5m2: moments as floats of 8 bits, an exponent for each number beside the scale of its block.

With y = x / unit, where the unit makes the block's absmax the largest float there is (448, 57344), the code is the byte
of `y.to(torch.float8_e4m3fn)` or `y.to(torch.float8_e5m2)`: the nearest float, ties to the one with an even last bit.
It rests as uint8, since gloo cannot gather float8; `codes.view(torch.float8_e4m3fn)` reads it.

What differs from torch's cast:
    - It is arithmetic on float32 and int32, which any compiler vectorizes, and it needs no subnormal float32.
    - Inf is written as NaN, in e5m2 too, and e5m2's codes of Inf are read as NaN.
    - A non-negative number above 0 is never written as 0, and one below 0 is.

References:
    Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_lowbit.formats._format import Codec, Format, block_absmax, unit_of

NAN = 127  # and 255, of the other sign
EXPONENT = 0xFF << 23  # the exponent's bits of a float32; 127 << 23 is that of 1.0


class Float8(NamedTuple):
    """A kind of float: a sign, an exponent, a mantissa, from the highest bit down."""

    mantissa: int  # bits
    exponent: int  # of the smallest normal number; the subnormal ones below it have its spacing
    largest: float
    smallest_unit: float  # times the smallest float this is 2**-126; see SMALLEST_ABSMAX


E4M3 = Float8(mantissa=3, exponent=-6, largest=448.0, smallest_unit=2.0**-117)
E5M2 = Float8(mantissa=2, exponent=-14, largest=57344.0, smallest_unit=2.0**-110)


def _unit(x: Tensor, kind: Float8) -> Tensor:
    return unit_of(block_absmax(x), kind.largest).clamp_min(kind.smallest_unit)


def _round(y: Tensor, magnitude: Tensor, kind: Float8) -> Tensor:
    """The code of |y|, which is at most `kind.largest`; more than that for NaN and Inf: int32, like y."""
    dropped = 23 - kind.mantissa  # bits of the mantissa
    smallest = (127 + kind.exponent) << 23
    power = (y.view(torch.int32) & EXPONENT).clamp_min(smallest)  # the power of two at or below |y|
    # A sum with 2**dropped times that power has |y|'s spacing in the last place: it is rounded there, and its bits
    # count the steps. A whole power has 2**mantissa steps, and so has all that is below the smallest one.
    magic = power.view(torch.float32) * 2.0**dropped
    steps = (magnitude + magic).view(torch.int32) - magic.view(torch.int32)
    return steps + ((power - smallest) >> dropped)


def _encode_signed(x: Tensor, kind: Float8) -> tuple[Tensor, Tensor]:
    units = _unit(x, kind)
    y = x * (1.0 / units)
    codes = _round(y, y.abs(), kind).clamp_max(NAN)
    return (codes | ((y.view(torch.int32) >> 24) & 128)).to(torch.uint8), units


def _encode_nonnegative(x: Tensor, kind: Float8) -> tuple[Tensor, Tensor]:
    units = _unit(x, kind)
    y = x * (1.0 / units)
    codes = _round(y, y, kind).clamp(1, NAN)  # a live second moment must not read as 0: the step would be m / eps
    return torch.where(x <= 0, 0, codes).to(torch.uint8), units


def _magnitude(codes: Tensor, kind: Float8) -> Tensor:
    """The float of a code, without the sign: int32 -> float32."""
    # One exponent lower, the subnormal floats would be 1.m instead of 0.m: there, and only there, 2 f - 2**exponent is
    # the smaller one.
    bits = (codes << (23 - kind.mantissa)) + ((126 + kind.exponent) << 23)
    f = bits.view(torch.float32)
    f = torch.minimum(f, f + f - 2.0**kind.exponent)
    return torch.where(f <= kind.largest, f, float("nan"))


def _decode_signed(codes: Tensor, units: Tensor, kind: Float8) -> Tensor:
    codes = codes.to(torch.int32)
    return _magnitude(codes & 127, kind) * torch.where(codes < 128, units, -units)


def _decode_nonnegative(codes: Tensor, units: Tensor, kind: Float8) -> Tensor:
    return _magnitude(codes.to(torch.int32), kind) * units


# A codec's functions are found again by their names when a state is pickled, so they are written out.


def encode_e4m3_signed(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> uint8[n, b], float32[n, 1] unit, absmax / 448."""
    return _encode_signed(x, E4M3)


def decode_e4m3_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, without rounding."""
    return _decode_signed(codes, scales, E4M3)


def encode_e4m3_nonnegative(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b], float32[n, 1] unit, absmax / 448."""
    return _encode_nonnegative(x, E4M3)


def decode_e4m3_nonnegative(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, without rounding."""
    return _decode_nonnegative(codes, scales, E4M3)


def encode_e5m2_signed(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b] -> uint8[n, b], float32[n, 1] unit, absmax / 57344."""
    return _encode_signed(x, E5M2)


def decode_e5m2_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, without rounding."""
    return _decode_signed(codes, scales, E5M2)


def encode_e5m2_nonnegative(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32[n, b], >= 0 -> uint8[n, b], float32[n, 1] unit, absmax / 57344."""
    return _encode_nonnegative(x, E5M2)


def decode_e5m2_nonnegative(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, without rounding."""
    return _decode_nonnegative(codes, scales, E5M2)


e4m3 = Format(
    name="e4m3",
    bits=8,
    signed=Codec(encode_e4m3_signed, decode_e4m3_signed, torch.uint8, zero_scale=E4M3.smallest_unit),
    nonnegative=Codec(encode_e4m3_nonnegative, decode_e4m3_nonnegative, torch.uint8, zero_scale=E4M3.smallest_unit),
)
e5m2 = Format(
    name="e5m2",
    bits=8,
    signed=Codec(encode_e5m2_signed, decode_e5m2_signed, torch.uint8, zero_scale=E5M2.smallest_unit),
    nonnegative=Codec(encode_e5m2_nonnegative, decode_e5m2_nonnegative, torch.uint8, zero_scale=E5M2.smallest_unit),
)
