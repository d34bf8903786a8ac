"""float32 and bfloat16: moments that rest as ordinary floats, without blocks or scales."""

import torch
from torch import Tensor

from functional_lowbit.formats._format import Codec, Format

SMALLEST_BFLOAT16 = 2.0**-126  # the smallest normal one; see SMALLEST_ABSMAX for why no subnormal


def encode_float32(x: Tensor) -> tuple[Tensor, None]:
    """The number itself."""
    return x, None


def decode_float32(codes: Tensor, scales: Tensor | None) -> Tensor:
    """The number itself."""
    return codes


def encode_bfloat16(x: Tensor) -> tuple[Tensor, None]:
    """Rounded to the nearest bfloat16, ties to even."""
    return x.to(torch.bfloat16), None


def encode_bfloat16_nonnegative(x: Tensor) -> tuple[Tensor, None]:
    """The same, but what is above 0 stays above 0."""
    return torch.where(x > 0, x.clamp_min(SMALLEST_BFLOAT16), x).to(torch.bfloat16), None


def decode_bfloat16(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Every bfloat16 is a float32."""
    return codes.float()


float32 = Format(
    name="float32",
    bits=32,
    signed=Codec(encode_float32, decode_float32, torch.float32, zero_scale=None),
    nonnegative=Codec(encode_float32, decode_float32, torch.float32, zero_scale=None),
    scaled=False,
)
bfloat16 = Format(
    name="bfloat16",
    bits=16,
    signed=Codec(encode_bfloat16, decode_bfloat16, torch.bfloat16, zero_scale=None),
    nonnegative=Codec(encode_bfloat16_nonnegative, decode_bfloat16, torch.bfloat16, zero_scale=None),
    scaled=False,
)
