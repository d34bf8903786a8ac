"""Every code of every format, and to which code a tie goes."""

import pytest
import torch
from format_table import (
    SMALLEST_NORMAL,
    assert_same,
    codec,
    each_scaled_codec,
    roundtrip,
    written_codes,
)

from functional_lowbit import formats
from functional_lowbit.formats import Format, bfloat16, companded8, dynamic4, dynamic8, root4


@each_scaled_codec
@pytest.mark.parametrize("absmax", [2.0**-104, 1e-20, 3.3e-7, 1.0, 7.7e11, 3e38])
def test_every_code(name: str, signed: bool, absmax: float):
    c, codes = codec(name, signed), written_codes(name, signed)
    _, scales = c.encode(torch.full((1, 1), absmax))
    values = c.decode(codes, scales)

    known = ~values.isnan()
    zeros = 2 if signed and name in ("e4m3", "e5m2") else 1  # those have a -0
    assert (values[known].diff() > 0).sum() == known.sum() - zeros
    assert (values[known].diff() >= 0).all()
    assert (values == 0).sum() == zeros
    assert (values[codes == c.zero_code] == 0).all()
    assert values[known].isfinite().all()
    assert (values[known & (values != 0)].abs() >= SMALLEST_NORMAL).all()
    assert (values[known] >= 0).all() or signed

    codes_again, scales_again = c.encode(values)
    assert_same(codes_again[known], codes[known])
    assert c.decode(codes_again, scales_again)[~known].isnan().all()
    assert_same(scales_again, scales)


@pytest.mark.parametrize("signed", [True, False])
def test_every_bfloat16(signed: bool):
    c = bfloat16.codec(signed)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)[None]
    if not signed:
        every = every[(every == 0) | (every >= SMALLEST_NORMAL)][None]
    assert_same(c.encode(c.decode(every, None))[0], every)


@pytest.mark.parametrize(
    ("x", "absmax", "code"), [(1.0, 507.0, 0), (3.0, 505.0, 2), (5.0, 503.0, 2), (-3.0, 505.0, -2)]
)
def test_companded8_signed_ties_go_to_the_even_code(x: float, absmax: float, code: int):
    """254 x / (absmax + |x|) is 1/2, 3/2, 5/2."""
    assert companded8.signed.encode(torch.tensor([[x, absmax]]))[0].tolist() == [[code, 127]]


@pytest.mark.parametrize(("root", "code"), [(0.5, 1), (1.5, 2), (2.5, 2), (3.5, 4)])
def test_companded8_nonnegative_ties_go_to_the_even_code(root: float, code: int):
    """But for 1/2, where the even code is 0."""
    assert companded8.nonnegative.encode(torch.tensor([[root**2, 254.0**2]]))[0].tolist() == [[code, 254]]


@pytest.mark.parametrize(
    ("name", "signed", "gap"),
    [
        ("dynamic8", True, 0.45 / 64),
        ("dynamic8", False, 0.45 / 128),
        ("dynamic4", True, 0.45 / 4),
        ("dynamic4", False, 2 / 16),
    ],
)
def test_dynamic_ties_go_away_from_0(name: str, signed: bool, gap: float):
    """Halfway between the two largest values, 1 - gap and 1."""
    tie = torch.tensor(1 - gap / 2)
    x = torch.stack([torch.tensor(1.0), tie, torch.nextafter(tie, torch.tensor(0.0))])[None]
    largest = 2 ** formats.get(name).bits - 1
    assert codec(name, signed).encode(x)[0].tolist() == [[largest, largest, largest - 1]]


@pytest.mark.parametrize(("x", "k"), [(0.5, 0), (2.5, 2), (-2.5, -2), (6.5, 2), (12.5, 4)])
def test_root4_signed_ties_go_to_the_even_k(x: float, k: int):
    """Halfway between k**2 and (k + 1)**2."""
    assert root4.signed.encode(torch.tensor([[x, 49.0]]))[0].tolist() == [[8 + k, 15]]


@pytest.mark.parametrize(("root", "k"), [(0.5, 1), (1.5, 2), (2.5, 2), (3.5, 4)])
def test_root4_nonnegative_ties_go_to_the_even_k(root: float, k: int):
    """But for 1/2, where the even k is 0."""
    assert root4.nonnegative.encode(torch.tensor([[root**4, 15.0**4]]))[0].tolist() == [[k, 15]]


@pytest.mark.parametrize(("format", "n"), [(dynamic8, 64), (dynamic4, 4)], ids=["dynamic8", "dynamic4"])
def test_dynamic_negative_absmax_shrinks(format: Format, n: int):
    """The maps hold 1 but not -1, as in bitsandbytes and torchao."""
    x = torch.tensor([[-1.0, 0.25]])
    decoded = roundtrip(format.signed, x)
    assert decoded[0, 0] == pytest.approx(-(1 - 0.45 / n), abs=1e-6)
    assert roundtrip(format.signed, decoded)[0, 0] == pytest.approx(-((1 - 0.45 / n) ** 2), abs=1e-6)
    assert not format.signed.idempotent
