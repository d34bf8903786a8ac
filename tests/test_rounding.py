"""Keyed stochastic rounding: what the noise is, that rounding is unbiased, and whom it depends on."""

import math

import pytest
import torch
from helpers import bits, refuses
from hypothesis import given, strategies as st
from tiers import slow_unless
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit import rounding
from functional_lowbit.sharding._index import global_index

HALVES = (torch.bfloat16, torch.float16)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=str)
DROPPED = {torch.bfloat16: 16, torch.float16: 13}
STEP = {torch.bfloat16: (2.0**-7, 2.0**-133), torch.float16: (2.0**-10, 2.0**-24)}  # of a power of two; the smallest


def noise_of(n: int, key: int = 0) -> Tensor:
    return rounding.bits(*rounding.words(rounding.leaf_key(key, "w"), torch.arange(n)))


def fractions(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(where each number lies between its neighbours, in [0, 1); their distance), in float64."""
    relative, smallest = STEP[dtype]
    step = (2.0 ** torch.floor(torch.log2(x.double().abs())) * relative).clamp_min(smallest)
    return (x.double().abs() / step) % 1, step


# ------------------------------------------------------------------------------------------------------- hash
def test_the_hash_is_triple32_with_a_key_and_fold_in_is_splitmix64():
    def mix64(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def triple32(key: int, i: int) -> int:
        low, high = key % 2**32, (key // 2**32 + (i >> 31) * 0x9E3779B9) % 2**32
        x = (i % 2**31) ^ low
        x = ((x ^ (x >> 17)) * 0xED5AD4BB + high) % 2**32
        x = ((x ^ (x >> 11)) * 0xAC4C1B51) % 2**32
        x = ((x ^ (x >> 15)) * 0x31848BAB) % 2**32
        return x ^ (x >> 14)

    key = rounding.fold_in(3, 5)
    for i in [0, 1, 2**31 - 1, 2**31, 2**32 + 7, 2**45 + 1]:
        want = mix64(mix64((int(key) + 0x9E3779B97F4A7C15) % 2**64) ^ i)
        assert int(rounding.fold_in(key, i)) % 2**64 == want
        assert int(rounding.bits(*rounding.words(key, torch.tensor(i)))) % 2**32 == triple32(int(key) % 2**64, i)


def chi_square(counts: Tensor) -> float:
    """The chi-square of equal expectations, in sigma; normal to good approximation for this many cells."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected).square() / expected).sum() - freedom) / math.sqrt(2 * freedom)


def sequences() -> dict[str, Tensor]:
    """2**20 noise words that differ in one thing only, which counts up."""
    n = torch.arange(1 << 20)
    return {
        "index": noise_of(1 << 20),
        "step": rounding.bits(*rounding.words(rounding.fold_in(0, rounding.fold_in(1, n)), torch.tensor(9))),
        "leaf": rounding.bits(*rounding.words(rounding.fold_in(7, n), torch.tensor(9))),
        "beyond 2**31": rounding.bits(*rounding.words(rounding.leaf_key(0, "w"), n + 2**31)),
    }


def test_noise_is_uniform_and_uncorrelated():
    # 4.5 sigma: one test in 150,000 would fail by chance, and the noise is fixed.
    found = sequences()
    for u in found.values():
        assert abs(chi_square(torch.bincount((u >> 16 & 0xFFFF).long(), minlength=1 << 16).double())) < 4.5
        assert abs(chi_square(torch.bincount((u & 0xFFFF).long(), minlength=1 << 16).double())) < 4.5
        top = (u >> 24 & 0xFF).long()
        assert abs(chi_square(torch.bincount(top[1:] * 256 + top[:-1], minlength=1 << 16).double())) < 4.5
        f = u.double() - u.double().mean()
        for lag in (1, 2, 3, 64, 256, 1000):
            assert abs(float((f[lag:] * f[:-lag]).mean() / f.square().mean())) < 4.5 / math.sqrt(f.numel())
    # The same elements at another step, in another leaf, and 2**31 elements further on: pairs are uniform too.
    key = rounding.fold_in(0, 1)
    keys = (rounding.leaf_key(key, "w"), rounding.leaf_key(0, "x"), rounding.leaf_key(0, "w") + 1)
    others = [noise_of(1 << 20), found["beyond 2**31"]]
    others += [rounding.bits(*rounding.words(k, torch.arange(1 << 20))) for k in keys]
    tops = [(u >> 24 & 0xFF).long() for u in others]
    for i, a in enumerate(tops):
        for b in tops[:i]:
            assert abs(chi_square(torch.bincount(a * 256 + b, minlength=1 << 16).double())) < 4.5


def test_every_bit_of_the_index_flips_every_bit_of_the_noise_half_of_the_time():
    n = 1 << 16
    i, low, high = (rounding.words(rounding.fold_in(s, torch.arange(n)), torch.tensor(0)).low for s in (1, 2, 3))
    i = i & 0x7FFFFFFF
    base = rounding.bits(low, high, i)
    for bit in range(31):
        changed = rounding.bits(low, high, i ^ (1 << bit)) ^ base
        flips = torch.stack([(changed >> b & 1).float().mean() for b in range(32)])
        assert (flips - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(n)


def test_blocks_that_count_on_give_the_noise_of_their_elements_also_beyond_2_31_and_2_32():
    key = rounding.leaf_key(1, "w")
    for first in (0, 2**31 - 100, 2**32 - 100, 2**33 + 5, 2**40 - 3):
        index = torch.arange(first, first + 1000)
        low, high, start = rounding.words(key, index.view(4, 250)[:, :1])
        counted = rounding.bits(low, high, start + torch.arange(250, dtype=torch.int32), wide=True)
        assert torch.equal(counted.flatten(), rounding.bits(*rounding.words(key, index)))
    near, far = (rounding.bits(*rounding.words(key, torch.arange(1000) + d)) for d in (0, 2**32))
    assert (near == far).sum() == 0


# --------------------------------------------------------------------------------------------------- rounding
@slow_unless(lambda scale, sign: scale == 1.0 or sign == 1)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1.0, 3e-6, 4e-8, 6e4, 1e-39], ids="{}".format)
@EACH_HALF
def test_the_mean_is_the_number(dtype, scale, sign):
    # 200 numbers, 20,000 draws each. The variance of one draw is f(1 - f) step**2, f the fraction between neighbours.
    if dtype == torch.float16 and scale == 1e-39:
        scale = 1e-6
    n, draws = 200, 20_000
    x = sign * scale * (0.5 + 0.5 * torch.rand(n, generator=torch.Generator().manual_seed(1)))
    y = rounding.stochastic_round(x[:, None].expand(n, draws), dtype, noise_of(n * draws).view(n, draws))
    f, step = fractions(x, dtype)
    sigma = torch.sqrt(f * (1 - f) / draws) * step
    error = (y.double().mean(1) - x.double()) / sigma
    assert error.abs().max() < 4  # of 200 numbers
    assert error.mean().abs() < 4 / math.sqrt(n)
    assert (y.double() - x.double()[:, None]).abs().max() < step.max()


@EACH_HALF
@given(raw=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 16))
def test_any_number_goes_to_its_neighbours_and_in_the_mean_over_all_noise_stays_exactly(dtype, raw, exponent):
    any_float = torch.tensor(raw - 2**31, dtype=torch.int32).view(torch.float32)
    dropped = DROPPED[dtype]
    every = torch.arange(1 << dropped, dtype=torch.int32) << (32 - dropped)
    for x in (any_float, torch.tensor(math.ldexp(1 + (raw & 0xFFFFFF) / 2**24, exponent))):
        y = rounding.stochastic_round(x.expand(every.shape), dtype, every)
        assert torch.equal(bits(rounding.stochastic_round(-x.expand(every.shape), dtype, every)), bits(-y))
        largest = torch.finfo(dtype).max
        if not x.isfinite() or (dtype == torch.float16 and x.abs() >= 65536):
            assert torch.equal(bits(y), bits(x.to(dtype).expand(every.shape)))
        elif x.abs() > largest:
            assert (y.double() == math.copysign(largest, x)).all()
        elif x.to(dtype) == x:
            assert torch.equal(y.view(torch.int16), x.to(dtype).expand(every.shape).view(torch.int16))
        else:
            _, step = fractions(x, dtype)
            found = y.double().unique()
            assert len(found) <= 2
            assert found[-1] - found[0] <= step
            assert (found - x.double()).abs().max() < step
            # 2**13 equally spaced noise words for float16 subnormals, whose fraction has more bits: within one word.
            finer = dtype == torch.float16 and x.abs() < 2.0**-14
            assert abs(float((y.double() - x.double()).mean())) <= (float(step) / 2**dropped if finer else 0.0)


@EACH_HALF
def test_every_number_of_the_dtype_stays(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for noise in (0, -1, 2**31 - 1, -(2**31), 12345):
        y = rounding.stochastic_round(x.float(), dtype, torch.tensor(noise, dtype=torch.int32))
        assert torch.equal(y.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])
        assert torch.equal(y.isnan(), x.isnan())


def test_other_dtypes_are_cast():
    x, noise = torch.tensor([1.1]), torch.tensor([5], dtype=torch.int32)
    assert rounding.stochastic_round(x, torch.float32, noise) is x
    assert rounding.stochastic_round(x, torch.float64, noise).dtype == torch.float64
    refuses(
        TypeError,
        "stochastic_round: x must be float32, got torch.float64",
        lambda: rounding.stochastic_round(x.double(), torch.bfloat16, noise),
    )


# ----------------------------------------------------------------------------------------------- apply_updates
@EACH_HALF
def test_updates_too_small_for_the_nearest_number_move_params_on_average(dtype):
    params = {"w": torch.ones(300, 257, dtype=dtype), "b": torch.ones(64), "d": torch.ones(2, dtype=torch.float64)}
    updates = {"w": torch.full((300, 257), 1e-4), "b": torch.full((64,), 1e-4), "d": None}
    steps = 20
    new, nearest = params, params
    for step in range(steps):
        nearest = fl.apply_updates(nearest, updates)
        new = fl.apply_updates(new, updates, rounding="stochastic", key=rounding.fold_in(0, step))
    assert torch.equal(nearest["w"], params["w"])
    assert torch.equal(new["b"], nearest["b"])
    assert new["d"] is params["d"]
    step = float(torch.finfo(dtype).eps)
    sigma = math.sqrt(steps * (1e-4 / step) * (1 - 1e-4 / step) / new["w"].numel()) * step
    # float32 adds 1e-4 to 1 with an error of 2**-24 at most.
    assert abs(float(new["w"].double().mean()) - 1 - steps * 1e-4) < 4 * sigma + steps * 2**-24


def test_noise_depends_on_key_path_and_element_and_on_nothing_else():
    w, u = torch.randn(64, 65, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.full((64, 65), 1e-3)

    def apply(params, updates, key=5):
        return fl.apply_updates(params, updates, rounding="stochastic", key=key)

    alone = apply({"w": w}, {"w": u})["w"]
    assert torch.equal(apply({"b": w[:3].clone(), "w": w}, {"b": u[:3], "w": u})["w"], alone)
    assert torch.equal(apply({"w": w}, {"w": u}, torch.tensor(5))["w"], alone)  # an int and a tensor
    assert torch.equal(apply({"w": w.t().contiguous().t()}, {"w": u})["w"], alone)  # the stride
    assert not torch.equal(apply({"w": w}, {"w": u}, 6)["w"], alone)
    assert not torch.equal(apply({"v": w}, {"v": u})["v"], alone)
    assert not torch.equal(apply({"w": w}, {"w": u})["w"].flatten(), apply({"w": w.flip(0)}, {"w": u})["w"].flip(0))


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (
            None,
            ValueError,
            "apply_updates: rounding='stochastic' needs a key, an int or a 0-d int64 tensor that is another one at "
            "each step: key=fl.rounding.fold_in(seed, step)",
        ),
        (0.5, TypeError, "apply_updates: key must be an int or a 0-d int64 tensor, got float"),
        (2**63, ValueError, "apply_updates: key must fit in 64 bits, got 9223372036854775808"),
        (
            torch.zeros(2),
            ValueError,
            "apply_updates: key must be an int or a 0-d int64 tensor, got torch.float32 of shape (2,)",
        ),
    ],
)
def test_keys_that_are_refused(key, error, message):
    p = torch.ones(2, dtype=torch.bfloat16)
    refuses(error, message, lambda: fl.apply_updates(p, p, rounding="stochastic", key=key))


def test_data_that_is_refused():
    refuses(TypeError, "fold_in: data must be an int or an int64 tensor, got float", lambda: rounding.fold_in(0, 0.5))
    refuses(
        TypeError,
        "fold_in: data must be an int or an int64 tensor, got torch.int32",
        lambda: rounding.fold_in(0, torch.zeros((), dtype=torch.int32)),
    )


def test_the_index_of_a_plain_leaf_counts_its_elements():
    for shape in [(), (5,), (0, 3), (3, 4, 5)]:
        index = global_index(shape, None).elements()
        assert torch.equal(index, torch.arange(torch.Size(shape).numel()))
