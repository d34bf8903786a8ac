"""The contract of a storage format: every format, signed and non-negative, against every promise.

What a format promises is a row of the table in format_table.py.
"""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from format_table import (
    BLOCK_LENGTHS,
    INF,
    MAGNITUDES,
    NAN,
    SMALLEST_NORMAL,
    TABLE,
    assert_same,
    assert_within_bound,
    blocks,
    codec,
    each_codec,
    each_scaled_codec,
    promise,
    roundtrip,
    written_codes,
)
from hypothesis import HealthCheck, given, settings, strategies as st
from tiers import slow
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functional_lowbit import formats
from functional_lowbit.formats import companded8, float32


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_every_format_is_in_the_tables():
    assert set(TABLE) == set(formats.names())
    documented = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    assert all(f"\n| `{name}`" in documented for name in formats.names())


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
def test_every_block_length(name: str, signed: bool):
    c, generator = codec(name, signed), torch.Generator().manual_seed(0)
    x = torch.randn(2, 260, generator=generator) ** 3
    x = x if signed else x.abs()
    for length in range(1, 261):
        codes, scales = c.write(x[:, :length])
        assert (codes.shape, codes.dtype) == ((2, c.width(length)), c.dtype)
        decoded = c.read(codes, scales, length)
        assert decoded.shape == (2, length)
        assert_within_bound(name, signed, x[:, :length], decoded)


@each_scaled_codec
def test_a_search_in_float64_finds_the_same_values(name: str, signed: bool):
    c, nearest_in = codec(name, signed), promise(name, signed).nearest_in
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(100, 200, generator=generator) ** torch.linspace(0.5, 6, 100)[:, None]
    x = x * torch.randn(x.shape, generator=generator).sign() if signed else x
    x[:, 0] = 1.0
    values = c.decode(written_codes(name, signed), c.encode(torch.ones(1, 1))[1])[0]
    values = values[~values.isnan()].unique()
    values = values if signed else values[1:]  # what is above 0 is not written as 0

    distance = (nearest_in(x.double())[..., None] - nearest_in(values.double())).abs()
    (nearest, second), found = distance.topk(2, largest=False)[0].unbind(-1), distance.argmin(-1)
    clear = second - nearest > 1e-3 * (second + nearest)  # else float32 may see the tie on the other side
    assert clear.double().mean() > 0.99
    assert_same(roundtrip(c, x)[clear], values[found][clear])


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
@pytest.mark.parametrize("name", [n for n in TABLE if n != "bfloat16"])
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
    for value, expected in zip((NAN, INF, -INF), promise(name, signed).spoilt, strict=False):
        spoilt, clean = x.clone(), x.clone()
        spoilt[1, 17], clean[1, 17] = value, 0.0
        decoded, wanted = roundtrip(c, spoilt), roundtrip(c, clean)
        # A format without a code for it has the largest of the block, which is 1 but for 20 bits of the unit.
        torch.testing.assert_close(decoded[1, 17], torch.tensor(expected), rtol=1e-5, atol=0, equal_nan=True)
        wanted[1, 17] = decoded[1, 17]
        assert_same(decoded, wanted)


@each_scaled_codec
def test_a_device_that_flushes_subnormals_gives_the_same(name: str, signed: bool):
    c, x = codec(name, signed), blocks(signed, 129)
    x = torch.where(x.abs() >= SMALLEST_NORMAL, x, 0.0)
    codes, scales = c.encode(x)
    decoded = c.decode(codes, scales)
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormals"
    try:
        flushed_codes, flushed_scales = c.encode(x)
        flushed = c.decode(codes, scales)
    finally:
        torch.set_flush_denormal(False)
    assert_same(flushed_codes, codes)
    assert_same(flushed_scales, scales)
    assert_same(flushed, decoded)


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


@slow
@pytest.mark.parametrize("name", [n for n in TABLE if formats.get(n).scaled])
@torch._dynamo.config.patch(recompile_limit=100)  # it counts the graphs of `both` over all formats
def test_compiled_is_eager_bit_for_bit(name: str):
    """Both halves in one graph, since compiling takes seconds."""
    halves = (codec(name, True), codec(name, False))

    def both(*given: Tensor) -> list[Tensor | None]:
        found = []
        for c, x in zip(halves, given, strict=True):
            codes, scales = c.encode(x)
            found += [codes, scales, c.decode(codes, scales)]
        return found

    compiled = torch.compile(both, fullgraph=True)
    for length in BLOCK_LENGTHS[3:]:
        given = []
        for signed in (True, False):
            x = torch.cat([blocks(signed, length), torch.zeros(1, length), torch.full((1, length), 1e-40)])
            x[0, 1:4] = torch.tensor([NAN, INF, -INF])
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(x, dim)
            given.append(x)
        for actual, expected in zip(compiled(*given), both(*given), strict=True):
            assert_same(actual, expected)


ELEMENTWISE = {
    *("add", "sub", "rsub", "mul", "div", "reciprocal", "neg", "abs", "sqrt", "floor", "round"),
    *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "lt", "le", "gt", "ge", "eq", "ne"),
    *("bitwise_and", "bitwise_or", "__lshift__", "__rshift__", "_to_copy", "view", "full_like", "scalar_tensor"),
    *("amax", "detach", "alias"),  # torch 2.14 has an alias where 2.13 had none
}


@each_codec
def test_a_code_generator_finds_nothing_but_elementwise_operations(name: str, signed: bool):
    """And the largest of a block: no gather, no sort, no slice, nothing that depends on the data."""
    c, x = codec(name, signed), blocks(signed, 100)
    for graph in (make_fx(c.encode)(x), make_fx(c.decode)(*c.encode(x))):
        used = {n.target.overloadpacket.__name__ for n in graph.graph.nodes if n.op == "call_function"}
        assert used <= ELEMENTWISE


def float32s(signed: bool) -> st.SearchStrategy[list[float]]:
    largest = 1.75 * 2.0**127  # a float32, as hypothesis demands
    number = st.floats(-largest if signed else 0.0, largest, width=32)
    near_one = st.floats(-1.0 if signed else 0.0, 1.0, width=32)
    return st.lists(number, min_size=1, max_size=40) | st.lists(near_one, min_size=1, max_size=40)


@each_codec
@settings(
    derandomize=True,
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


@each_codec
@settings(
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    rows=st.integers(1, 7),
    length=st.integers(1, 300),
    exponents=st.tuples(st.floats(-38, 38.4), st.floats(-38, 38.4)),
    seed=st.integers(0, 2**31),
    specials=st.lists(st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e-45, 1e-40, 3.4e38]), max_size=9),
)
def test_properties_of_any_shape_and_range(
    name: str,
    signed: bool,
    rows: int,
    length: int,
    exponents: tuple[float, float],
    seed: int,
    specials: list[float],
):
    c, generator = codec(name, signed), torch.Generator().manual_seed(seed)
    low, high = min(exponents), max(exponents)
    x = 10.0 ** (low + (high - low) * torch.rand(rows, length, generator=generator))
    x = x * torch.randn(x.shape, generator=generator).sign() if signed else x
    places = torch.randint(x.numel(), (len(specials),), generator=generator)
    x.view(-1)[places] = torch.tensor(specials)
    x = x if signed else torch.where(x >= 0, x, x.abs())

    codes, scales = c.write(x)
    decoded = c.read(codes, scales, length)
    finite = x.isfinite() if name != "bfloat16" else x.abs() < 3.3e38  # larger ones are nearer to Inf
    assert decoded[finite].isfinite().all()
    assert (decoded[x == 0] == 0).all()
    assert ((decoded * x.sign())[finite] >= 0).all()
    if not signed:
        assert (decoded[finite & (x > 0)] > 0).all()
    assert_within_bound(name, signed, torch.where(finite, x, NAN), decoded)
    alone, scales_alone = c.write(torch.where(x.isfinite(), x, 0.0))  # what the others are without NaN and Inf
    assert_same(c.read(alone, scales_alone, length)[x.isfinite()], decoded[x.isfinite()])
    for row in range(rows):
        order = x[row][finite[row]].argsort()
        assert (decoded[row][finite[row]][order].diff() >= 0).all()
    if c.idempotent:
        clean = c.read(alone, scales_alone, length)
        assert_same(c.write(clean)[0], alone)
        assert_same(c.write(clean)[1], scales_alone)


@pytest.mark.parametrize("name", formats.names())
def test_a_format_is_the_same_after_a_copy(name: str):
    """A state that is pickled or copied is still one of this format."""
    format = formats.get(name)
    assert pickle.loads(pickle.dumps(format)) == copy.deepcopy(format) == format


def test_get():
    assert formats.get("companded8") is companded8
    assert formats.get(float32) is float32
    with pytest.raises(ValueError, match=r"^formats\.get: format must be one of .*companded8.*; got 'companded7'$"):
        formats.get("companded7")
    with pytest.raises(TypeError, match=r"^formats\.get: format must be a name or a Format, got int$"):
        formats.get(8)  # type: ignore[arg-type]
