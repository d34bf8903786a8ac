"""A float32 as a half-precision number and the bits that it lacks. Elementwise on bits, for `master_weights`.

The distance of a float32 from a neighbour in half precision is counted in units of the float32's own last place: as
integers, float32 numbers of one sign are in order, and the half-precision ones are those whose lower bits are 0 (16
bits for bfloat16, 13 for float16). The nearest one lies at most half of these bits away, below or above, so the
distance fits 16 bits, whatever power of two lies in between. 8 bits keep its upper half.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)
CODE_DTYPES = {8: torch.int8, 16: torch.int16}
SIGN, MAGNITUDE, INFINITE = -0x80000000, 0x7FFFFFFF, 0x7F800000  # of a float32's bits
SHIFT = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 behind those of the dtype
SMALLEST, SMALLEST_BITS = 2.0**-14, 0x38800000  # float16 has fixed steps below; see `_evenly`
OVERFLOW_BITS = 0x47800000  # 65536, the first that float16 has not


def write_master(master: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
    """float32 -> the nearest number of `dtype` (ties away from 0), and codes for what is left.

    The master is first rounded to the bits that are kept, if not all are. A tie goes away from 0, not to the even
    number, since half a step up would not fit the codes. What float16 has not (65520 and more) becomes Inf.

    Args:
        master: float32, any shape.
        dtype: bfloat16 or float16.
        bits: 8 or 16.

    Returns:
        (`dtype`, int8 or int16), of the same shape. Codes of 0, NaN and Inf are 0.
    """
    shift = SHIFT[dtype]
    unit = shift - min(bits, shift)
    raw = master.view(torch.int32)
    sign, magnitude = raw & SIGN, raw & MAGNITUDE
    small = magnitude < SMALLEST_BITS
    if dtype == torch.float16:
        magnitude = torch.where(small, _evenly(master), magnitude)
    kept = (magnitude + (1 << unit >> 1)) & -(1 << unit)
    near = (kept + (1 << (shift - 1))) & -(1 << shift)
    codes = (kept - near) >> unit
    finite = magnitude < INFINITE
    if dtype == torch.float16:
        finite = finite & (near < OVERFLOW_BITS)
        near = torch.where(small, (near.view(torch.float32) - SMALLEST).view(torch.int32), near)
        near = torch.where(finite, near, INFINITE)  # not left to the cast: inductor drops casts there and back
    near = torch.where(magnitude < INFINITE, near, magnitude)
    codes = torch.where(finite, codes, 0)
    # What rounds to 0 keeps its sign in the code: a step to -0.0 cannot be taken by adding to a parameter above 0.
    zero = near == 0
    codes = torch.where(zero & (sign != 0), -codes, codes)
    sign = torch.where(zero & (codes != 0), 0, sign)
    return (near | sign).view(torch.float32).to(dtype), codes.to(CODE_DTYPES[bits])


def read_master(p: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back from `write_master`: every float32 if no bits were left out, but for NaN's payload.

    float16 below 2**-14 has steps of 2**-24, so that 13 bits behind them end at 2**-37: the master is a multiple of it.

    Args:
        p: float32: numbers that `dtype` has.
        codes: int8 or int16.
        dtype: bfloat16 or float16.

    Returns:
        float32.
    """
    shift = SHIFT[dtype]
    unit = shift - min(8 if codes.dtype == torch.int8 else 16, shift)
    raw, distance = p.view(torch.int32), codes.to(torch.int32) << unit
    sign, magnitude = raw & SIGN, raw & MAGNITUDE
    zero = magnitude == 0
    sign = torch.where(zero & (distance < 0), SIGN, sign)
    distance = torch.where(zero, distance.abs(), distance)
    small = magnitude + distance < SMALLEST_BITS
    if dtype == torch.float16:
        magnitude = torch.where(small, _evenly(p), magnitude)
    magnitude = magnitude + distance
    if dtype == torch.float16:
        magnitude = torch.where(small, (magnitude.view(torch.float32) - SMALLEST).view(torch.int32), magnitude)
    return (magnitude | sign).view(torch.float32)


def step_to(p: Tensor, new_p: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The update that takes a parameter to its new value when it is added in float32; and codes for where that is.

    A new value below 2**-16 of the old one (float16: 2**-13) may be out of reach, since the float32 sum ends at 2**-24
    of the old one. Then the parameter becomes what the sum rounds to, and its code is 0. The master is off by half of
    its last place before the step, and half of the new parameter's.

    Args:
        p: bfloat16 or float16.
        new_p: Of the same dtype.
        codes: For `new_p`.

    Returns:
        (float32, codes).
    """
    old, new = p.float(), new_p.float()
    update = torch.where(old.view(torch.int32) == new.view(torch.int32), -0.0, new - old)  # -0.0 also leaves -0.0
    landed = old + update
    # As near as this it rounds to the new value. (To round and compare is no way: inductor drops casts there and back.)
    near = (landed - new).abs() <= 2.0**-20 * new.abs()
    reached = near & ((landed.view(torch.int32) ^ new.view(torch.int32)) >= 0)  # 0.0 is not -0.0
    return update, torch.where(reached, codes, 0)


def _evenly(x: Tensor) -> Tensor:
    """Bits of |x| + 2**-14: for |x| below 2**-14 these count in steps as even as float16's."""
    return (x.abs() + SMALLEST).view(torch.int32)


@dataclass(frozen=True)
class Split:
    """A float32 master as a half-precision parameter and the codes of what that lacks."""

    bits: int  # of a code: 8 or 16

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return CODE_DTYPES[self.bits]

    def read(self, p: Tensor, beside: Tensor) -> Tensor:
        """The master: float32."""
        return read_master(p.float(), beside, p.dtype)

    def step(self, p: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """The update that takes a parameter to a new master, float32, and the codes of what it still lacks there."""
        return step_to(p, *write_master(new, p.dtype, self.bits))

    def write(self, p: Tensor, beside: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """The parameter and the codes for a new master."""
        update, codes = self.step(p, new)
        return (p.to(torch.promote_types(p.dtype, torch.float32)) + update).to(p.dtype), codes
