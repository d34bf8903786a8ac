"""e4m3 and e5m2 against torch's own cast, bit for bit."""

import pytest
import torch
from format_table import assert_same
from torch import Tensor

from functional_lowbit.formats import Format, e4m3, e5m2

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
both = pytest.mark.parametrize("format", [e4m3, e5m2], ids=["e4m3", "e5m2"])
both_signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "nonnegative"])

ALL_CODES = torch.arange(256, dtype=torch.uint8)
ONE = torch.ones(1, 1)


def assert_cast(format: Format, signed: bool, y: Tensor) -> None:
    """The codes of y, with a largest float beside it so that the unit is 1, are torch's."""
    largest = LARGEST[format.name]
    y = y if signed else y[y >= 0].abs()
    y = torch.cat([y[y.abs() <= largest], torch.tensor([largest])])
    codes, units = format.codec(signed).encode(y[None])
    assert_same(units, ONE)
    expected = y.to(DTYPE[format.name]).view(torch.uint8)
    if not signed:
        expected = torch.where(y > 0, expected.clamp_min(1), expected)  # what is above 0 stays so
    assert_same(codes[0], expected)


@both
@both_signs
def test_every_code_reads_as_torch_reads_it(format: Format, signed: bool):
    codes = ALL_CODES if signed else ALL_CODES[:128]
    values = codes.view(DTYPE[format.name]).float()
    decoded = format.codec(signed).decode(codes[None], ONE)[0]
    assert_same(decoded, torch.where(values.isinf(), float("nan"), values))
    assert_same(decoded.signbit()[values.isfinite()], values.signbit()[values.isfinite()])


@both
@both_signs
def test_every_bfloat16_is_cast_as_torch_casts_it(format: Format, signed: bool):
    assert_cast(format, signed, torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float())


@both
@both_signs
def test_numbers_at_every_tie_are_cast_as_torch_casts_them(format: Format, signed: bool):
    """Halfway between neighbours, the halves of the smallest float among them, and up to 3 ulp to both sides."""
    values = ALL_CODES[:128].view(DTYPE[format.name]).float()
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    near = (middle.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32).flatten()
    assert_cast(format, signed, torch.cat([near, -near]))


@both
@both_signs
def test_floats_of_every_exponent_are_cast_as_torch_casts_them(format: Format, signed: bool):
    """A million bit patterns, subnormals among them."""
    bits = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32)
    assert_cast(format, signed, bits.view(torch.float32))


@both
def test_a_block_is_cast_in_units_of_its_scale(format: Format):
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 500)[:, None]
    codes, units = format.signed.encode(x)
    assert_same(codes, (x * (1 / units)).to(DTYPE[format.name]).view(torch.uint8))
    assert_same(codes.view(DTYPE[format.name]).float() * units, format.signed.decode(codes, units))
    largest = format.signed.decode(codes, units).abs().amax(-1) / x.abs().amax(-1)
    assert ((codes & 127).amax(-1) == format.signed.encode(ONE)[0]).all()
    assert (largest - 1).abs().max() < 1.2 * 2.0**-20  # the unit has 20 bits
