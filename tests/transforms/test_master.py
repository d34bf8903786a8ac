"""master_weights: half-precision parameters that are trained as if they were float32."""

import io
import math

import pytest
import torch
from helpers import bits, clone, random_like, refuses, run_pure, run_step, same
from hypothesis import example, given, strategies as st
from tiers import slow, slow_unless
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit.formats._halves import read_master, step_to, write_master

HALVES = (torch.bfloat16, torch.float16)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=str)
EACH_BITS = pytest.mark.parametrize("n_bits", [8, 16], ids="{} bits".format)
FRACTION = {torch.bfloat16: 7, torch.float16: 10}  # bits behind the point
# bits that a master has behind the point
KEPT = {(torch.bfloat16, 8): 15, (torch.bfloat16, 16): 23, (torch.float16, 8): 18, (torch.float16, 16): 23}


def wide_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def any_floats() -> Tensor:
    """Random bits, random magnitudes around float16's range, and every edge."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    exponents = torch.randint(-42, 17, (1 << 18,), generator=generator)
    common = torch.randn(1 << 18, generator=generator) * torch.pow(2.0, exponents)
    powers = torch.pow(2.0, torch.arange(-149, 128, dtype=torch.float64)).float()
    near = torch.cat([wide_of(powers) + d for d in (-32769, -32768, -4096, -1, 0, 1, 4095, 4096, 32767, 32768)])
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519, 65520, 65536, 3.4e38])
    both = torch.cat([edges, near.view(torch.float32)])
    return torch.cat([raw.view(torch.float32), common, both, -both])


@EACH_HALF
@EACH_BITS
def test_a_master_is_read_as_it_was_written(dtype, n_bits):
    m = any_floats()
    p, codes = write_master(m, dtype, n_bits)
    read = read_master(p.float(), codes, dtype)
    assert (p.dtype, codes.dtype) == (dtype, {8: torch.int8, 16: torch.int16}[n_bits])
    assert torch.equal(bits(read)[m.isnan()], bits(m)[m.isnan()])
    assert (codes[~p.isfinite() & ~m.isfinite()] == 0).all()
    assert torch.equal(read.sign(), m.sign() * (read != 0)) or n_bits == 8 or dtype == torch.float16
    normal = m.abs() >= (2.0**-126 if dtype == torch.bfloat16 else 2.0**-14)
    inside = normal & (m.abs() < torch.finfo(dtype).max)
    if n_bits == 16:
        assert torch.equal(wide_of(read)[inside], wide_of(m)[inside])
    if dtype == torch.bfloat16 and n_bits == 16:  # also subnormal, and above the largest bfloat16
        assert torch.equal(wide_of(read)[~m.isnan()], wide_of(m)[~m.isnan()])
    error = (read.double() - m.double()).abs()
    assert (error <= 2.0 ** -(KEPT[dtype, n_bits] + 1) * m.double().abs())[inside].all()
    small = m.abs() < 2.0**-14
    if dtype == torch.float16:
        # Rounded to 2**-37, then to 2**-32.
        assert error[small].max() <= 2.0**-38 + (2.0**-33 if n_bits == 8 else 0)
        assert (read[m.abs() >= 65520].isinf()).all()
    again = write_master(read, dtype, n_bits)
    assert same((wide_of(again[0].float())[~m.isnan()], again[1]), (wide_of(p.float())[~m.isnan()], codes))


@EACH_HALF
@EACH_BITS
def test_the_parameter_is_the_nearest_number(dtype, n_bits):
    m = any_floats()
    p, _ = write_master(m, dtype, n_bits)
    nearest = m.to(dtype)
    away = (p.double() - m.double()).abs() - (nearest.double() - m.double()).abs()
    # A tie goes away from 0. Where the master is rounded first (8 bits, small float16), a tie is missed by half a unit.
    missed = torch.where(m.abs() < 2.0**-14, 2.0**-37, 0.0) if dtype == torch.float16 else torch.zeros(())
    step = (m.double().abs() * 2.0 ** -FRACTION[dtype]).clamp_min(2.0**-133 if dtype == torch.bfloat16 else 2.0**-24)
    finite = p.isfinite() & nearest.isfinite()
    assert (away <= missed + (step * 2.0**-8 if n_bits == 8 else 0))[finite].all()
    assert torch.equal(p.isinf(), nearest.isinf()) or n_bits == 8


@EACH_HALF
@EACH_BITS
def test_a_parameter_without_error_reads_as_itself(dtype, n_bits):
    p = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes = torch.zeros(p.shape, dtype={8: torch.int8, 16: torch.int16}[n_bits])
    assert torch.equal(wide_of(read_master(p.float(), codes, dtype))[~p.isnan()], wide_of(p.float())[~p.isnan()])
    written, new_codes = write_master(p.float(), dtype, n_bits)
    assert torch.equal(written.view(torch.int16)[~p.isnan()], p.view(torch.int16)[~p.isnan()])
    assert torch.equal(written.isnan(), p.isnan())
    assert (new_codes == 0).all()


@EACH_HALF
@given(old=st.floats(-100, 100, width=16), new=st.floats(-100, 100, width=32))
@example(old=1.0, new=0.0)
@example(old=-1.0, new=-0.0)
@example(old=-0.0, new=-0.0)
@example(old=-0.0, new=0.0)
@example(old=1.0, new=-1e-9)
@example(old=1.0, new=2.0**-15)
@example(old=0.0, new=-1e-42)
@example(old=17.0, new=0.0013095223112031817)
def test_a_step_leads_exactly_to_the_new_parameter(dtype, old, new):
    p, m = torch.tensor([old]).to(dtype), torch.tensor([new], dtype=torch.float32)
    new_p, codes = write_master(m, dtype, 16)
    update, codes_after = step_to(p, new_p, codes)
    landed = (p.float() + update).to(dtype)
    master = read_master(landed.float(), codes_after, dtype)
    if abs(new) >= {torch.bfloat16: 2**-16, torch.float16: 2**-13}[dtype] * abs(float(p)) or float(new_p) == 0:
        assert bits(landed).item() == bits(new_p).item()
    exact = bits(master).item() == bits(read_master(new_p.float(), codes, dtype)).item()
    # Half of the old parameter's last place as a float32, and half of the new one's in its dtype.
    half_place = max(
        {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * abs(new), torch.finfo(dtype).smallest_normal * 2**-10
    )
    assert exact or abs(float(master) - new) <= 2**-24 * abs(float(p)) + half_place + 2.0**-149


@slow
def test_a_compiler_gives_the_same_bits():
    # inductor keeps intermediate results in float32, so a cast to half precision and back would do nothing.
    m = any_floats()
    olds = [m.flip(0).to(dtype) for dtype in HALVES]

    def split(m: Tensor, *olds: Tensor) -> list[Tensor]:
        found = []
        for old, n_bits in zip(olds, (16, 8), strict=True):
            new_p, codes = write_master(m, old.dtype, n_bits)
            found += [new_p, codes, *step_to(old, new_p, codes), read_master(new_p.float(), codes, old.dtype)]
        return found

    assert same(torch.compile(split)(m, *olds), split(m, *olds))


def params_of(dtype: torch.dtype) -> dict[str, Tensor]:
    return random_like({"w": torch.empty(70, 65), "b": torch.empty(3)}, seed=0, dtype=dtype)


@EACH_HALF
def test_training_is_float32_training_bit_for_bit(dtype):
    params = params_of(dtype)
    wide = {k: p.float() for k, p in params.items()}
    grads = [random_like(params, seed=1 + t, dtype=dtype) for t in range(40)]
    tx = fl.adamw(3e-4, weight_decay=0.1)
    wanted, wanted_state = run_pure(tx, wide, [{k: g.float() for k, g in gs.items()} for gs in grads])
    got, state = run_pure(fl.master_weights(tx), params, grads)
    masters = fl.master_params(got, state)
    # float16 masters below 2**-14 are rounded to 2**-37; Adam's moments do not depend on parameters.
    exact = {k: m.abs() >= (2.0**-14 if dtype == torch.float16 else 0) for k, m in wanted.items()}
    assert all(torch.equal(bits(masters[k][exact[k]]), bits(wanted[k][exact[k]])) for k in wanted)
    assert same(state.inner_state, wanted_state)
    assert all((got[k].float() - wanted[k]).abs().max() <= 2.0 ** -FRACTION[dtype] * 4 for k in wanted)
    nearest = run_pure(tx, params, grads)[0]
    assert not torch.equal(nearest["w"], got["w"])  # what is lost without masters


def test_eight_bits_follow_updates_that_bfloat16_ignores():
    params = {"w": torch.linspace(0.5, 1.0, 1000).bfloat16()}
    steps = 100
    grads = [{"w": torch.full((1000,), -1e-4)} for _ in range(steps)]
    tx = fl.sgd(1.0)
    assert same(run_pure(tx, params, grads)[0], params)
    got, state = run_pure(fl.master_weights(tx, bits=8), params, grads)
    wanted = params["w"].double() + steps * 1e-4
    # 100 roundings of a number below 2 to 15 bits behind the point.
    assert (fl.master_params(got, state)["w"].double() - wanted).abs().max() <= steps * 2.0**-16
    assert (got["w"].double() - wanted).abs().max() <= steps * 2.0**-16 + 2.0**-8


@EACH_HALF
@EACH_BITS
def test_compiled_eager_and_pure_give_the_same_bits(dtype, n_bits):
    params = params_of(dtype)
    grads = [random_like(params, seed=1 + t, dtype=dtype) for t in range(3)]
    tx = fl.chain(fl.clip(1.0), fl.master_weights(fl.adamw8bit(1e-2), n_bits))
    before = clone((params, grads))
    wanted = run_pure(tx, params, grads)
    assert same((params, grads), before)
    for backend in ("eager", "inductor") if (dtype, n_bits) == (torch.bfloat16, 16) else ("eager",):
        given = clone(params)
        state = tx.init(given)
        got = run_step(fl.compile(tx, backend=backend), given, grads, state)
        assert same(got, wanted)
        assert got[0]["w"] is given["w"]
        assert got[1][1].error["w"] is state[1].error["w"]  # donated too


@slow_unless(lambda n_bits: n_bits == 16)
@EACH_HALF
@EACH_BITS
@pytest.mark.parametrize("backend", ["native", "inductor"])
def test_around_everything_it_is_a_part_of_the_kernel(dtype, n_bits, backend):
    if backend == "inductor" and (dtype, n_bits) != (torch.bfloat16, 16):
        backend = "eager"  # to compile takes long, and the two agree on what one of them compiles
    params = params_of(dtype) | {"f": torch.ones(40)}
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    grads[1]["f"] = torch.full((40,), float("inf"))
    for inner in (fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2)), fl.apply_if_finite(fl.lion(1e-2))):
        tx = fl.master_weights(inner, n_bits)
        wanted = run_pure(tx, params, grads)
        step = fl.compile(tx, backend=backend)
        given, state = clone(params), tx.init(params)
        got = run_step(step, given, grads, state)
        assert same(got, wanted)
        assert got[1].error["w"] is state.error["w"]
        assert step.graphs >= 2 or backend == "eager"  # an update that is called as it is needs one only, to add
    with pytest.raises((TypeError, ValueError), match="MasterWeightsState"):
        step(grads[0], fl.adamw(0.1).init(params), given)


def test_wrappers_inside_and_outside():
    params = params_of(torch.bfloat16)
    params["f"] = torch.ones(4)
    grads = [random_like(params, seed=t) for t in range(3)]
    plain = run_pure(fl.master_weights(fl.adamw(1e-2)), params, grads)
    assert plain[1].error["f"] is None
    inside, outside = fl.master_weights(fl.low_bit(fl.adamw(1e-2))), fl.low_bit(fl.master_weights(fl.adamw(1e-2)))
    assert isinstance(outside.init(params).inner_state[0].mu["w"], fl.QuantizedTensor)
    assert same(run_pure(inside, params, grads), run_pure(outside, params, grads))
    assert same(run_pure(fl.apply_if_finite(fl.master_weights(fl.adamw(1e-2))), params, grads)[0], plain[0])
    mask = {"w": True, "b": False, "f": False}
    masked = run_pure(fl.masked(fl.master_weights(fl.adamw(1e-2)), mask), params, grads)
    assert same(masked[0]["w"], plain[0]["w"])
    assert same(fl.master_params(*masked)["w"], fl.master_params(*plain)["w"])
    assert same(fl.master_params(*masked)["b"], masked[0]["b"].float())
    state = plain[1]
    updates, after = fl.master_weights(fl.adamw(1e-2)).update({**grads[0], "w": None}, state, plain[0])
    assert updates["w"] is None
    assert after.error["w"] is state.error["w"]


def test_a_state_survives_a_file():
    tx, params = fl.master_weights(fl.adamw8bit(1e-2), bits=8), params_of(torch.bfloat16)
    params["f"] = torch.ones(4)
    grads = [random_like(params, seed=t) for t in range(3)]
    params, state = run_pure(tx, params, grads[:1])
    file = io.BytesIO()
    torch.save(fl.state_dict(state), file)
    file.seek(0)
    loaded = fl.load_state_dict(tx.init(params), torch.load(file, weights_only=True))
    assert same(loaded, state)
    assert same(run_pure(tx, params, grads[1:], loaded), run_pure(tx, params, grads[1:], state))


@EACH_BITS
def test_inf_nan_and_zeros(n_bits):
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0], dtype=torch.bfloat16)
    tx = fl.master_weights(fl.sgd(1.0), n_bits)
    for step in (0.0, 1e-3):
        params, state = run_pure(tx, values, [torch.full((6,), step), torch.full((6,), step)])
        wanted = run_pure(fl.sgd(1.0), values.float(), [torch.full((6,), step), torch.full((6,), step)])[0]
        assert torch.equal(params.isinf(), wanted.isinf())
        assert torch.equal(params.isnan(), wanted.isnan())
        assert torch.equal(params.signbit()[[0, 1, 3, 4, 5]], wanted.signbit()[[0, 1, 3, 4, 5]])
        assert (state.error[:3] == 0).all()
        grads = torch.tensor([math.nan, math.inf])
        bad, state = run_pure(tx, torch.ones(2, dtype=torch.bfloat16), [grads])
        assert bad.isnan().tolist() == [True, False]
        assert bad.isinf().tolist() == [False, True]
        assert (state.error == 0).all()


def test_what_is_refused():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    tx = fl.master_weights(fl.sgd(0.1))
    state = tx.init(params)
    refuses(ValueError, "master_weights: bits must be 8 or 16, got 4", lambda: fl.master_weights(fl.sgd(0.1), 4))
    refuses(
        ValueError,
        "master_weights.update: params are needed; call update(updates, state, params)",
        lambda: tx.update(params, state),
    )
    message = (
        "master_weights.update: state.error['w'] must be torch.int8 of shape (3,) for a torch.bfloat16 parameter, got "
        "torch.int8 of shape (3, 2); the state was made for other parameters or another number of bits"
    )
    refuses(ValueError, message, lambda: fl.master_weights(fl.sgd(0.1), 8).update(params, state, params))
    message = (
        "master_weights.update: state.error['w'] must be none for a torch.float32 parameter, got torch.int8 of shape "
        "(3, 2); the state was made for other parameters or another number of bits"
    )
    wide = {"w": torch.ones(3)}
    refuses(ValueError, message, lambda: tx.update(wide, state, wide))
    elsewhere = state._replace(error={"w": torch.zeros(3, 2, dtype=torch.int8, device="meta")})
    message = (
        "master_weights.update: state.error['w'] is on meta, but its parameter is on cpu; make the state with "
        "init(params) after the parameters are moved"
    )
    refuses(ValueError, message, lambda: tx.update(params, elsewhere, params))
    turned = state._replace(error={"w": torch.zeros(2, 3, dtype=torch.int8).t()})
    refuses(
        ValueError,
        "master_weights.update: state.error['w'] must be contiguous, as init makes it; copy it",
        lambda: tx.update(params, turned, params),
    )
    refuses(
        ValueError,
        "master_params: the state has no MasterWeightsState inside; use fl.master_weights",
        lambda: fl.master_params(params, fl.sgd(0.1).init(params)),
    )
