"""What format_study.py puts beside the library's formats: ideas that would have to earn a place.

A candidate keeps the promises that the study's numbers depend on (0 is 0, a live second moment never reads as 0), and
not all of those in tests/support/format_table.py: NaN, Inf and tiny blocks are not looked after.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from functional_lowbit.formats import Codec, Format, fp8, root4
from functional_lowbit.formats._format import SMALLEST_ABSMAX, block_absmax

Read = Callable[[Tensor, bool, int | None], tuple[Tensor, int]]  # moment, signed?, block size -> what is read, bytes


# ---------------------------------------------------------------------------------- other spacings, block-local
# Softsign of any strength bends y in [0, 1] to (1 + a) y / (1 + a y), whose slope at 0 is 1 + a times the average.
def _encode_soft(x: Tensor, a: float, levels: int, zero: int) -> tuple[Tensor, Tensor]:
    scales = block_absmax(x)
    k = torch.round(levels * ((1 + a) * x / (scales + a * x.abs())))
    return (zero + k).to(torch.int8 if zero == 0 else torch.uint8), scales


def _decode_soft(codes: Tensor, scales: Tensor | None, a: float, levels: int, zero: int) -> Tensor:
    assert scales is not None
    c = codes.float() - zero
    return scales * (c / (levels * (1 + a) - a * c.abs()))


def _encode_soft_root(x: Tensor, a: float, levels: int) -> tuple[Tensor, Tensor]:
    root = x.sqrt()
    scales = root.amax(-1, keepdim=True).clamp_min(SMALLEST_ABSMAX**0.5)
    k = torch.round(levels * ((1 + a) * root / (scales + a * root)))
    return torch.where((k < 1) & (root > 0), 1.0, k).to(torch.uint8), scales


def _decode_soft_root(codes: Tensor, scales: Tensor | None, a: float, levels: int) -> Tensor:
    assert scales is not None
    c = codes.float()
    root = scales * (c / (levels * (1 + a) - a * c))
    return root * root


def soft(bits: int, mu: float, nu: float) -> Format:
    """A signed moment bent by `mu`, the root of a second moment bent by `nu`."""
    packing, signed_levels, levels = (1, 127, 254) if bits == 8 else (2, 7, 15)
    zero = 0 if bits == 8 else 8
    signed = {"a": mu, "levels": signed_levels, "zero": zero}
    root = {"a": nu, "levels": levels}
    return Format(
        f"soft{bits}({mu:g}, {nu:g})",
        bits,
        Codec(
            partial(_encode_soft, **signed),
            partial(_decode_soft, **signed),
            torch.int8 if bits == 8 else torch.uint8,
            zero,
            packing=packing,
        ),
        Codec(partial(_encode_soft_root, **root), partial(_decode_soft_root, **root), torch.uint8, packing=packing),
        block_size=256 if bits == 8 else 128,
    )


def _encode_square(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = block_absmax(x)
    k = torch.round(127 * (x.abs() / scales).sqrt())
    return torch.where(x < 0, -k, k).to(torch.int8), scales


def _decode_square(codes: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None
    c = codes.float() * (1 / 127)
    return scales * c * c.abs()


def _encode_quartic(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = block_absmax(x)
    k = torch.round(254 * (x / scales).sqrt().sqrt()).clamp_min(1.0)
    return torch.where(x > 0, k, 0.0).to(torch.uint8), scales


def _decode_quartic(codes: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None
    c = codes.float() * (1 / 254)
    return scales * (c * c) * (c * c)


root8 = Format(
    "root8", 8, Codec(_encode_square, _decode_square, torch.int8), Codec(_encode_quartic, _decode_quartic, torch.uint8)
)


# ------------------------------------------------------------------------------------- COAT's range expansion
# A block's range, absmax / smallest, is raised to the power that makes it E4M3's. Absmax and power rest as two bfloat16
# halves of the one float32 that every block has anyway.
E4M3_RANGE = math.log(448 * 2.0**9)


def _expansion(x: Tensor) -> Tensor:
    """Float32[n, 1]: its high half is the absmax, rounded up; its low half the power, rounded down."""
    magnitude = x.abs()
    absmax = block_absmax(x)
    smallest = torch.where(magnitude > 0, magnitude, absmax).amin(-1, keepdim=True)
    power = E4M3_RANGE / (absmax / smallest).log().clamp_min(0.1)
    power = power.clamp(0.25, 16.0)
    high = (absmax.view(torch.int32) + 0xFFFF) & -65536
    return (high | (power.view(torch.int32) >> 16)).view(torch.float32)


def _halves(scales: Tensor) -> tuple[Tensor, Tensor]:
    bits = scales.view(torch.int32)
    return (bits & -65536).view(torch.float32), (bits << 16).view(torch.float32)


def _encode_coat(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    scales = _expansion(x)
    absmax, power = _halves(scales)
    y = 448 * (x.abs() / absmax).pow(power)
    codes = fp8._round(y, y, fp8.E4M3)
    if not signed:
        return torch.where(x > 0, codes.clamp_min(1), 0).to(torch.uint8), scales
    return (codes | torch.where(x < 0, 128, 0)).to(torch.uint8), scales


def _decode_coat(codes: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None
    absmax, power = _halves(scales)
    codes = codes.to(torch.int32)
    y = fp8._magnitude(codes & 127, fp8.E4M3) * (1 / 448)
    return torch.where(codes < 128, absmax, -absmax) * y.pow(1 / power)


coat = Format(
    "e4m3 + expansion",
    8,
    Codec(partial(_encode_coat, signed=True), _decode_coat, torch.uint8),
    Codec(partial(_encode_coat, signed=False), _decode_coat, torch.uint8),
)

FORMATS = (soft(8, 2, 0), soft(8, 2, 1), soft(8, 3, 3), soft(8, 7, 7), root8, coat, soft(4, 1, 1), soft(4, 1, 3))
"""All but `soft(8, 1, 0)`, which is companded8."""


# ----------------------------------------------------------------------------------------------- rank-1 scales
def _rank1(x: Tensor, levels: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """A second moment in 4 bits whose scale is the smaller of its row's and its column's largest.

    A scale for each row and column, not for each block: the column's needs the whole matrix.
    """
    matrix = x.flatten(1) if x.ndim > 1 else x.view(1, -1)
    scale = torch.minimum(matrix.amax(1, keepdim=True), matrix.amax(0, keepdim=True))
    y = torch.where(scale > 0, matrix / scale, 0.0)
    read = torch.where(matrix > 0, levels(y) * scale, 0.0)
    return read.view(x.shape), (matrix.numel() + 1) // 2 + 4 * sum(matrix.shape)


def _linear_without_zero(y: Tensor) -> Tensor:
    return torch.round(16 * y).clamp(1, 16) / 16


def _fourth_root(y: Tensor) -> Tensor:
    return (torch.round(15 * y.sqrt().sqrt()).clamp_min(1) / 15) ** 4


def rank1(levels: Callable[[Tensor], Tensor], store: Callable[..., tuple[Tensor, int]]) -> Read:
    """First moments rest as root4 in blocks, second ones with rank-1 scales."""
    return lambda x, signed, block: store(root4, x, True, block) if signed else _rank1(x, levels)


RANK1 = {"rank1 linear": _linear_without_zero, "rank1 root": _fourth_root}
"""lpmm's second moment (Li et al., 2023, https://arxiv.org/abs/2309.01507), and with root4's spacing."""
