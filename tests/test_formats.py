"""The contract of a storage format, as a table: every format, signed and non-negative, against every promise.

A new format gets a row in `BOUNDS`, in `SPOILT` and in `CODES`, and is then held to all of this.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit.formats import Codec, bfloat16, companded8, dynamic8, float32

Bound = Callable[[Tensor, Tensor], Tensor]  # float64 |x|, float64 absmax of its block -> largest |decoded - x|


def of_absmax(bound: Callable[[Tensor], Tensor], floor: float) -> Bound:
    """A bound that is stated for y = |x| / absmax, for a format that takes no absmax below `floor`."""

    def scaled(magnitude: Tensor, absmax: Tensor) -> Tensor:
        absmax = absmax.clamp_min(floor)
        return absmax * bound(magnitude / absmax)

    return scaled


# The error that each format states, (signed, non-negative).
BOUNDS: dict[str, tuple[Bound, Bound]] = {
    # Signed: y = c / (254 - c), so dy / dc = (1 + y)**2 / 254, and c is off by 1/2: (1 + y)**2 / 508 to first order. At
    # c + 1/2 the slope is larger by (1 - (1 + y) / 508)**-2 <= 1.008.
    # Non-negative: the root is off by 1 / 508 of the largest, r'**2 - r**2 = (r' - r) (r' + r), and what would round to
    # 0 becomes 1 / 254**2. Float32 leaves the position of a tie uncertain by 2e-4 codes: 1.001.
    "companded8": (
        of_absmax(lambda y: (1 + y) ** 2 / 504, 2.0**-110),
        of_absmax(lambda y: 1.001 * (y.sqrt() / 254 + 254.0**-2), 2.0**-110),
    ),
    # Half a cell is 0.45 D / n, with n = 64 D**0.301 values in the decade that ends at D, so 0.45 / 64 D**0.699, and
    # D <= 10 y. (Between two decades it is 1.35 D / n, but there D <= y / 0.55.) Rounding to 0, or up to the smallest
    # number, adds at most 3.25e-7. The non-negative map has twice as many values.
    "dynamic8": (
        of_absmax(lambda y: (0.036 * y**0.7).clamp_max(0.45 / 64) + 3.3e-7, 2.0**-104),
        of_absmax(lambda y: (0.018 * y**0.7).clamp_max(0.45 / 128) + 3.3e-7, 2.0**-104),
    ),
    # Half of the last of 4 (e5m2: 3) significant bits; below the smallest normal float half of the smallest one, or up to
    # it. The unit has 20 bits, which moves all by 2**-20.
    "e4m3": (
        of_absmax(lambda y: 1.00001 * torch.maximum(y / 16, 2.0**-10 / 448 + 0 * y), 448 * 2.0**-117),
        of_absmax(lambda y: 1.00001 * torch.maximum(y / 16, 2.0**-9 / 448 + 0 * y), 448 * 2.0**-117),
    ),
    "e5m2": (
        of_absmax(lambda y: 1.00001 * torch.maximum(y / 8, 2.0**-17 / 57344 + 0 * y), 57344 * 2.0**-110),
        of_absmax(lambda y: 1.00001 * torch.maximum(y / 8, 2.0**-16 / 57344 + 0 * y), 57344 * 2.0**-110),
    ),
    # Signed: half the step from k**2 to (k + 1)**2 is k + 1/2, which is at most 7 sqrt(y) where it is reached, and nearer
    # to k**2 the error shrinks faster than the root. Non-negative: the fourth root is off by 1/30, and what would round
    # to 0 becomes 15**-4.
    "root4": (
        of_absmax(lambda y: 1.0001 * (y.sqrt() / 7).clamp_max(6.5 / 49) + 1e-5, 49 * 2.0**-114),
        of_absmax(lambda y: 1.0001 * ((y**0.25 + 1 / 30) ** 4 - y + 15.0**-4), 15**4 * 2.0**-124),
    ),
    # Signed: as dynamic8, with 4 D**0.301 values, and 0.00275 to 0. Non-negative: half of 1/16; up to 1/16; and the value
    # 15/16 is missing.
    "dynamic4": (
        of_absmax(lambda y: (0.57 * y**0.7).clamp_max(0.45 / 4) + 0.0028, 2.0**-104),
        of_absmax(lambda y: 1e-6 + torch.where(y < 14 / 16, (1 / 16 - y).clamp_min(1 / 32), 1 / 16), 2.0**-104),
    ),
    # Half of the last of 8 significant bits; below 2**-126 half of the smallest subnormal, or up to the smallest normal
    # number.
    "bfloat16": (
        lambda x, _: 2.0**-8 * x + 2.0**-134,
        lambda x, _: 2.0**-8 * x + 2.0**-126,
    ),
    "float32": (lambda x, _: 0 * x, lambda x, _: 0 * x),
}

# What a NaN, an Inf and a -Inf (signed only) read as, in a block whose largest finite magnitude is 1.
NAN, INF = math.nan, math.inf
SPOILT: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "companded8": ((NAN, NAN, NAN), (NAN, NAN)),
    "dynamic8": ((1.0, 1.0, -0.99296875), (1.0, 1.0)),  # it has no code for them
    "e4m3": ((NAN, NAN, NAN), (NAN, NAN)),
    "e5m2": ((NAN, NAN, NAN), (NAN, NAN)),
    "root4": ((NAN, NAN, NAN), (1.0, 1.0)),
    "dynamic4": ((1.0, 1.0, -0.8875), (1.0, 1.0)),
    "bfloat16": ((NAN, INF, -INF), (NAN, INF)),
    "float32": ((NAN, INF, -INF), (NAN, INF)),
}

# The codes that are written, (signed, non-negative), as integers; all in the order of their values, but for NaN's.
Codes = tuple[list[int], list[int]]
EVERY = list(range(256))
CODES: dict[str, Codes] = {
    "companded8": (list(range(-128, 128)), EVERY),
    "dynamic8": (EVERY, EVERY),
    "e4m3": ([*range(255, 127, -1), *range(128)], EVERY[:128]),
    "e5m2": ([255, *range(251, 127, -1), *range(124), 127], [*range(124), 127]),
    "root4": (EVERY[:16], EVERY[:16]),
    "dynamic4": (EVERY[:16], EVERY[:16]),
}

BLOCK_LENGTHS = (1, 2, 3, 100, 129, 192, 241, 250, 256)
MAGNITUDES = (1e-38, 1e-36, 1e-33, 1e-31, 1e-20, 1e-8, 1e-3, 1.0, 1e5, 1e19, 1e30, 3e38)
SMALLEST_NORMAL = 2.0**-126

CODECS = [
    pytest.param(name, s, id=f"{name}-{'signed' if s else 'nonnegative'}") for name in BOUNDS for s in (True, False)
]
SCALED_CODECS = [p for p in CODECS if formats.get(str(p.values[0])).scaled]
each_codec = pytest.mark.parametrize(("name", "signed"), CODECS)
each_scaled_codec = pytest.mark.parametrize(("name", "signed"), SCALED_CODECS)


def codec(name: str, signed: bool) -> Codec:
    return formats.get(name).codec(signed)


def roundtrip(c: Codec, x: Tensor) -> Tensor:
    return c.decode(*c.encode(x))


def blocks(signed: bool, length: int) -> Tensor:
    """One block for each of MAGNITUDES, which is its largest element and comes first; then heavy-tailed, with zeros."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(len(MAGNITUDES), length, generator=generator, dtype=torch.float64) ** 5
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x)
    x = x / x.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    x[:, 0] = 1.0
    x = (x * torch.tensor(MAGNITUDES, dtype=torch.float64)[:, None]).float()
    return x if signed else x.abs()


def written_codes(name: str, signed: bool) -> Tensor:
    """uint8 or int8 [1, n]."""
    return torch.tensor([CODES[name][0 if signed else 1]], dtype=codec(name, signed).dtype)


def assert_same(actual: Tensor | None, expected: Tensor | None) -> None:
    """Bit for bit, but any NaN is like another."""
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_within_bound(name: str, signed: bool, x: Tensor, decoded: Tensor) -> None:
    exact = x.double()
    absmax = exact.abs().amax(-1, keepdim=True)
    bound = BOUNDS[name][0 if signed else 1](exact.abs(), absmax)
    excess = (decoded.double() - exact).abs() - bound
    worst = int(excess.argmax())
    assert excess.max() <= 0, f"{exact.flatten()[worst]} was read as {decoded.flatten()[worst]}"


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_every_format_is_in_the_tables():
    assert set(BOUNDS) == set(SPOILT) == set(formats.names())
    assert set(CODES) == {name for name in formats.names() if formats.get(name).scaled}


@each_codec
@pytest.mark.parametrize("length", BLOCK_LENGTHS)
def test_promises_at_every_length_and_magnitude(name: str, signed: bool, length: int):
    c, x = codec(name, signed), blocks(signed, length)
    before = x.clone()
    codes, scales = c.encode(x)
    decoded = c.decode(codes, scales)

    assert torch.equal(x, before)
    assert (codes.shape, codes.dtype) == (x.shape, c.dtype)
    assert (decoded.shape, decoded.dtype) == (x.shape, torch.float32)
    if formats.get(name).scaled:
        assert scales is not None
        assert (scales.shape, scales.dtype) == ((len(MAGNITUDES), 1), torch.float32)
    else:
        assert scales is None

    assert (decoded[x == 0] == 0).all()
    assert (decoded * x.sign() >= 0).all()
    assert decoded.isfinite().all()
    if not signed:
        assert (decoded[x > 0] > 0).all()
    assert_within_bound(name, signed, x, decoded)

    codes_again, scales_again = c.encode(decoded)
    assert_same(codes_again, codes)
    assert_same(scales_again, scales)


@each_codec
def test_monotone_on_a_fine_sweep(name: str, signed: bool):
    down = torch.logspace(0, -9, 200_001, dtype=torch.float64).float()
    x = torch.cat([down.flip(0), torch.linspace(0, 1, 200_001)]).sort().values
    x = torch.cat([-x.flip(0), x]) if signed else x
    decoded = roundtrip(codec(name, signed), x[None])
    assert (decoded.diff() >= 0).all()
    assert_within_bound(name, signed, x[None], decoded)


@each_codec
@pytest.mark.parametrize("length", BLOCK_LENGTHS)
def test_all_zero_block(name: str, signed: bool, length: int):
    c = codec(name, signed)
    codes, scales = c.encode(torch.zeros(3, length))
    assert (codes == c.zero_code).all()
    if scales is not None:
        assert (scales == c.zero_scale).all()
    assert_same(c.decode(codes, scales), torch.zeros(3, length))


@each_codec
def test_no_block_at_all(name: str, signed: bool):
    assert roundtrip(codec(name, signed), torch.empty(0, 256)).shape == (0, 256)


@each_codec
@pytest.mark.parametrize("absmax", [1e-45, 1e-40, 1.1754942e-38, 2.0**-110, 2.0**-104, 2.0**-100])
def test_subnormal_and_tiny_block(name: str, signed: bool, absmax: float):
    x = torch.linspace(-absmax if signed else 0.0, absmax, 255)[None]
    decoded = roundtrip(codec(name, signed), x)
    assert_within_bound(name, signed, x, decoded)
    assert (decoded * x.sign() >= 0).all()
    if not signed:
        assert (decoded[x > 0] > 0).all()
    if formats.get(name).scaled or (name == "bfloat16" and not signed):
        # What is above 0 must also be so on a device that flushes subnormals.
        assert ((decoded == 0) | (decoded.abs() >= SMALLEST_NORMAL)).all()


@each_codec
def test_tiny_beside_huge(name: str, signed: bool):
    x = torch.tensor([[1e-45, 1e-38, 1.0, 3e38, 0.0]])
    decoded = roundtrip(codec(name, signed), x)
    assert decoded[0, 3] == roundtrip(codec(name, signed), x[:, 3:4])
    assert decoded[0, 4] == 0
    if not signed:
        assert (decoded[0, :4] > 0).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", [n for n in BOUNDS if n != "bfloat16"])
def test_largest_float32_stays_finite(name: str, signed: bool):
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, largest / 2]]) * torch.tensor([1.0, 1.0 if signed else -1.0, 1.0])
    decoded = roundtrip(codec(name, signed), x)
    assert decoded.isfinite().all()
    assert_within_bound(name, signed, x, decoded)


@each_codec
def test_nan_and_inf_spoil_only_their_own_element(name: str, signed: bool):
    c = codec(name, signed)
    x = torch.linspace(-0.5 if signed else 0.0, 1.0, 250).repeat(3, 1)
    for value, expected in zip((NAN, INF, -INF), SPOILT[name][0 if signed else 1], strict=False):
        spoilt, clean = x.clone(), x.clone()
        spoilt[1, 17], clean[1, 17] = value, 0.0
        decoded, wanted = roundtrip(c, spoilt), roundtrip(c, clean)
        # A format without a code for it has the largest of the block, which is 1 but for 20 bits of the unit.
        torch.testing.assert_close(decoded[1, 17], torch.tensor(expected), rtol=1e-5, atol=0, equal_nan=True)
        wanted[1, 17] = decoded[1, 17]
        assert_same(decoded, wanted)


@each_codec
def test_block_without_a_finite_element(name: str, signed: bool):
    _, scales = codec(name, signed).encode(torch.full((1, 4), NAN))
    if scales is not None:
        assert (scales == codec(name, signed).zero_scale).all()


@each_codec
def test_default_dtype_does_not_matter(name: str, signed: bool, default_dtype: torch.dtype):
    c, x = codec(name, signed), blocks(signed, 100)
    codes, scales = c.encode(x)
    decoded = c.decode(codes, scales)
    torch.set_default_dtype(torch.float32)
    expected_codes, expected_scales = c.encode(x)
    assert_same(codes, expected_codes)
    assert_same(scales, expected_scales)  # assert_close compares dtypes too
    assert_same(decoded, c.decode(expected_codes, expected_scales))


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


@pytest.mark.parametrize(("signed", "n"), [(True, 64), (False, 128)])
def test_dynamic8_ties_go_away_from_0(signed: bool, n: int):
    """Halfway between the two largest values, 1 - 0.45 / n and 1."""
    tie = torch.tensor(1 - 0.225 / n)
    x = torch.stack([torch.tensor(1.0), tie, torch.nextafter(tie, torch.tensor(0.0))])[None]
    assert dynamic8.codec(signed).encode(x)[0].tolist() == [[255, 255, 254]]


def test_dynamic8_negative_absmax_shrinks():
    """The map holds 1 but not -1, as in bitsandbytes and torchao."""
    x = torch.tensor([[-1.0, 0.25]])
    decoded = roundtrip(dynamic8.signed, x)
    assert decoded[0, 0] == pytest.approx(-(1 - 0.45 / 64), abs=1e-6)
    assert roundtrip(dynamic8.signed, decoded)[0, 0] == pytest.approx(-((1 - 0.45 / 64) ** 2), abs=1e-6)


@each_scaled_codec
def test_compiled_is_eager_bit_for_bit(name: str, signed: bool):
    c = codec(name, signed)

    def both(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        codes, scales = c.encode(x)
        return codes, scales, c.decode(codes, scales)

    torch._dynamo.reset()  # it counts the graphs of `both` over all codecs, and stops at 8
    compiled = torch.compile(both, fullgraph=True)
    for length in BLOCK_LENGTHS[3:]:
        x = torch.cat([blocks(signed, length), torch.zeros(1, length), torch.full((1, length), 1e-40)])
        x[0, 1:4] = torch.tensor([NAN, INF, -INF])
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        for actual, expected in zip(compiled(x), both(x), strict=True):
            assert_same(actual, expected)


def float32s(signed: bool) -> st.SearchStrategy[list[float]]:
    largest = 1.75 * 2.0**127  # a float32, as hypothesis demands
    number = st.floats(-largest if signed else 0.0, largest, width=32)
    near_one = st.floats(-1.0 if signed else 0.0, 1.0, width=32)
    return st.lists(number, min_size=1, max_size=40) | st.lists(near_one, min_size=1, max_size=40)


@each_codec
@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],  # which a busy machine is
)
@given(data=st.data())
def test_properties_of_any_block(name: str, signed: bool, data: st.DataObject):
    c = codec(name, signed)
    x = torch.tensor(data.draw(float32s(signed)), dtype=torch.float32).sort().values[None]
    if x[0, 0] < -x[0, -1]:
        x = -x.flip(-1)  # dynamic8 keeps the absmax only where it is positive
    codes, scales = c.encode(x)
    decoded = c.decode(codes, scales)
    assert (decoded[x == 0] == 0).all()
    assert (decoded * x.sign() >= 0).all()
    assert (decoded.diff() >= 0).all()
    assert_within_bound(name, signed, x, decoded)
    if not signed:
        assert (decoded[x > 0] > 0).all()
    codes_again, scales_again = c.encode(decoded)
    assert_same(codes_again, codes)
    assert_same(scales_again, scales)


def test_get():
    assert formats.get("companded8") is companded8
    assert formats.get(float32) is float32
    with pytest.raises(ValueError, match=r"^formats\.get: format must be one of .*companded8.*; got 'companded7'$"):
        formats.get("companded7")
    with pytest.raises(TypeError, match=r"^formats\.get: format must be a name or a Format, got int$"):
        formats.get(8)  # type: ignore[arg-type]
