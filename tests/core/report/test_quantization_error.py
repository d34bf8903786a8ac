"""Quantization errors: against a float64 loop, and as a recorder that changes nothing and costs nothing in between."""

import io
import json
from itertools import accumulate

import numpy as np
import pytest
import torch
from helpers import averaged, clone, random_like, refuses, run_pure, run_step, same

import functional_lowbit as fl

B1, B2, EPS = 0.9, 0.99, 1e-8
SHAPES = {"w": torch.empty(33, 257), "v": torch.empty(64, 128), "b": torch.empty(7)}


def _params(dtype=torch.float32):
    return random_like(SHAPES, seed=0, dtype=dtype)


def _grads(n, dtype=torch.float32):
    return [random_like(SHAPES, seed=1 + t, dtype=dtype) for t in range(n)]


def _norm(x):
    return float(np.sqrt(np.sum(np.square(x))))


def _adam(m, v, g, t):
    """One element after the other would say the same: new moments and the update, float64."""
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    return m, v, m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)


def _by_hand(state, g, t, format):
    """Errors of the step number t (from 1) of one leaf, whose moments are stored in `state`."""
    m, v = (x.dequantize().double().numpy() for x in state)
    g = g.double().numpy()
    m, v, _ = _adam(m, v, g, t)
    read = [
        fl.quantize(torch.from_numpy(x).float(), format, signed=signed).dequantize().double().numpy()
        for x, signed in ((m, True), (v, False))
    ]
    right, wrong = _adam(m, v, g, t + 1)[2], _adam(*read, g, t + 1)[2]
    return {
        "mu": _norm(read[0] - m) / _norm(m),
        "nu": _norm(read[1] - v) / _norm(v),
        "update": _norm(wrong - right) / _norm(right),
    }


@pytest.mark.parametrize("format", ["companded8", "dynamic8", "e4m3", "root4", "bfloat16"])
def test_errors_are_those_of_a_float64_loop(format):
    tx, params = fl.adam8bit(0.1, B1, B2, EPS, format=format), _params()
    state = tx.init(params)
    for t, grads in enumerate(_grads(3), start=1):
        report = fl.quantization_error(tx, grads, state, params)
        for path in ("v", "w"):
            wanted = _by_hand((state[0].mu[path], state[0].nu[path]), grads[path], t, format)
            got = {row.what: row.error for row in report.rows if row.path == path}
            # float32 moments and updates beside errors of 0.002 and more: 2**-24 of the norm is 3e-5 of the error; a
            # number that float32 takes to another code is off by a whole step of the map, once in some thousands.
            assert got == pytest.approx(wanted, rel=1e-3)
        assert [(row.what, row.error, row.format) for row in report.rows if row.path == "b"] == [
            ("mu", 0.0, "float32"),
            ("nu", 0.0, "float32"),
            ("update", 0.0, "float32"),
        ]
        _, state = tx.update(grads, state, params)


def test_formats_by_field_and_a_table():
    tx, params = fl.low_bit(fl.adam(0.1), {"mu": "root4", "nu": "bfloat16"}), {"w": torch.zeros(64, 64)}
    report = fl.quantization_error(tx, {"w": torch.linspace(-1, 1, 4096).view(64, 64)}, tx.init(params), params)
    assert [(row.what, row.format) for row in report.rows] == [
        ("mu", "root4"),
        ("nu", "bfloat16"),
        ("update", "root4 and bfloat16"),
    ]
    assert report.rows[0].error > 10 * report.rows[1].error > 0
    lines = str(report).splitlines()
    assert lines[0].split() == ["path", "what", "format", "error", "mean", "largest"]
    assert lines[2].split() == ["w", "nu", "bfloat16", *3 * [f"{100 * report.rows[1].error:.3f}", "%"]]
    found = json.loads(json.dumps(report.to_dict()))
    assert found["step"] is None
    assert found["rows"][0] == {**report.rows[0]._asdict()}


def test_moments_of_one_name_are_told_apart():
    tx = fl.low_bit(fl.chain(fl.trace(0.9), fl.masked(fl.trace(0.5), {"w": True, "v": False, "b": False})))
    report = fl.quantization_error(tx, _grads(1)[0], tx.init(_params()), _params())
    assert [(row.path, row.what) for row in report.rows if row.path in "vw"] == [
        ("v", "0.trace"),
        ("v", "update"),
        ("w", "0.trace"),
        ("w", "1.inner_state.trace"),
        ("w", "update"),
    ]
    assert all(row.error > 0 for row in report.rows if row.path in "vw")


def test_what_needs_all_leaves_together_is_looked_at_as_a_whole():
    """A clip looks at all gradients: the errors are those of the clipped gradients, whatever else is looked at."""
    params, grads = _params(), _grads(1)[0]
    inner = fl.adam8bit(0.1)
    clipped, _ = fl.clip_by_global_norm(0.01).update(grads, fl.clip_by_global_norm(0.01).init(params), params)
    outside = fl.quantization_error(inner, clipped, inner.init(params), params)
    tx = fl.chain(fl.clip_by_global_norm(0.01), inner)
    inside = fl.quantization_error(tx, grads, tx.init(params), params)
    assert inside == outside
    pair = fl.low_bit(averaged())
    assert {row.what for row in fl.quantization_error(pair, grads, pair.init(params), params).rows} == {
        "mean",
        "update",
    }


def test_elements_that_are_not_finite_are_left_out():
    tx, params, grads = fl.adam8bit(0.1), _params(), _grads(1)[0]
    clean = fl.quantization_error(tx, grads, tx.init(params), params)
    spoilt = clone(grads)
    spoilt["w"][3, 5], spoilt["v"][0, 0] = float("nan"), float("inf")
    report = fl.quantization_error(tx, spoilt, tx.init(params), params)
    for row, old in zip(report.rows, clean.rows, strict=True):
        # One number of thousands is missing, and its block has another scale.
        assert row.error == pytest.approx(old.error, rel=0.05)


def test_leaves_without_gradient_and_nested_trees():
    params = {"a": [torch.zeros(64, 64), torch.zeros(64, 64)], "n": None}
    tx = fl.record_quantization_error(fl.sgd8bit(0.1), every=1)
    state = tx.init(params)
    g = torch.linspace(-1, 1, 4096).view(64, 64)
    _, state = tx.update({"a": [g, None], "n": None}, state, params)
    _, state = tx.update({"a": [g, g], "n": None}, state, params)
    rows = fl.recorded_quantization_error(state).rows
    assert [(row.path, row.what, row.looks) for row in rows] == [
        ("a.0", "trace", 2),
        ("a.0", "update", 2),
        ("a.1", "trace", 1),
        ("a.1", "update", 1),
    ]
    only = fl.quantization_error(fl.sgd8bit(0.1), {"a": [None, g], "n": None}, fl.sgd8bit(0.1).init(params), params)
    assert [(row.path, row.error) for row in only.rows] == [(r.path, r.error) for r in rows[2:]]


@pytest.mark.parametrize("make", [fl.adamw8bit, fl.lion8bit, fl.sgd8bit, fl.adamw4bit])
def test_recording_changes_nothing(make):
    params, grads = _params(), _grads(5)
    tx = fl.record_quantization_error(make(0.1), every=2)
    wanted, wanted_state = run_pure(make(0.1), params, grads)
    new, state = run_pure(tx, params, grads)
    assert same(new, wanted)
    assert same(state.inner_state, wanted_state)
    for backend, donate in (("eager", True), ("native", False)):
        step = fl.compile(tx, backend=backend, donate=donate)
        got = run_step(step, clone(params), grads, tx.init(params))
        assert same(got, (wanted, state))


ONLY_W = {"w": True, "v": False, "b": False}
AROUND = {
    "masked inside": lambda: fl.record_quantization_error(fl.masked(fl.adam8bit(0.1), ONLY_W), every=2),
    "masked outside": lambda: fl.masked(fl.record_quantization_error(fl.adam8bit(0.1), every=2), ONLY_W),
    "sums": lambda: fl.record_quantization_error(fl.chain(fl.adam8bit(0.1), fl.scale_by_trust_ratio()), every=2),
    "whole matrices": lambda: fl.record_quantization_error(fl.low_bit(fl.scale_by_muon()), every=2),
    "a gate inside": lambda: fl.record_quantization_error(fl.apply_if_finite(fl.adam8bit(0.1)), every=2),
    "masters inside": lambda: fl.record_quantization_error(fl.master_weights(fl.adam8bit(0.1)), every=2),
    "a user's pair": lambda: fl.record_quantization_error(fl.low_bit(averaged()), every=2),
}


@pytest.mark.parametrize("name", AROUND)
def test_around_anything_and_inside_anything(name):
    tx, params, grads = AROUND[name](), _params(), _grads(3)
    wanted = run_pure(tx, params, grads)
    assert same(run_step(fl.compile(tx, backend="eager"), clone(params), grads, tx.init(params)), wanted)
    errors = {row.path: row.error for row in fl.recorded_quantization_error(wanted[1]).rows if row.what == "update"}
    assert errors["w"] > 0
    if "masked" in name:
        assert errors.get("v", 0.0) == 0


def test_what_is_recorded():
    params, grads = _params(), _grads(5)
    inner = fl.adam8bit(0.1)
    tx = fl.record_quantization_error(inner, every=2)
    state, inner_state, seen = tx.init(params), inner.init(params), []
    assert fl.recorded_quantization_error(state) == ((), None)
    for t, g in enumerate(grads):
        if t % 2 == 1:
            seen.append(fl.quantization_error(inner, g, inner_state, params))
        _, inner_state = inner.update(g, inner_state, params)
        _, state = tx.update(g, state, params)
        recorded = fl.recorded_quantization_error((state, "somewhere inside"))
        assert recorded.step == (2 * ((t + 1) // 2) if t else None)
        for i, row in enumerate(recorded.rows):
            errors = [report.rows[i].error for report in seen]
            assert (row.path, row.what, row.format) == seen[0].rows[i][:3]
            assert row.error == errors[-1]
            assert row.largest == max(errors)
            assert row.mean == pytest.approx(np.mean(errors), rel=1e-6)  # float32, five roundings at most
            assert row.looks == len(errors)
    assert [row.path for row in recorded.rows] == 3 * ["b"] + 3 * ["v"] + 3 * ["w"]


def test_between_looks_a_step_is_one_kernel():
    """What comes before is fused with it, as if the recorder were not there; a look runs it by itself."""
    params, grads = _params(), _grads(3)
    tx = fl.chain(fl.clip(0.5), fl.record_quantization_error(fl.adam8bit(0.01), every=2))
    plain = fl.compile(fl.chain(fl.clip(0.5), fl.adam8bit(0.01)), donate=False)
    step = fl.compile(tx, donate=False)
    state = tx.init(params)
    plain(grads[0], (state[0], state[1].inner_state), params)
    step(grads[0], state, params)
    assert step.graphs == plain.graphs
    assert same(run_step(step, params, grads, state), run_pure(tx, params, grads))


def test_a_step_that_is_left_out_is_not_recorded():
    params, grads = _params(), _grads(3)
    grads[0]["b"][0] = float("nan")
    tx = fl.apply_if_finite(fl.record_quantization_error(fl.adam8bit(0.01), every=2))
    state = tx.init(params)
    step = fl.compile(tx, backend="eager")
    p, state = step(grads[0], state, clone(params))
    assert fl.recorded_quantization_error(state).rows == ()
    p, state = run_step(step, p, grads[1:], state)
    assert same((p, state), run_pure(tx, params, grads))
    assert fl.recorded_quantization_error(state).step == 2
    assert {row.looks for row in fl.recorded_quantization_error(state).rows} == {1}


def test_it_survives_files_and_masters():
    params, grads = _params(torch.bfloat16), _grads(4, torch.bfloat16)
    tx = fl.master_weights(fl.record_quantization_error(fl.adamw8bit(0.1), every=2))
    wanted = run_pure(tx, params, grads)
    p, state = run_pure(tx, params, grads[:2])
    file = io.BytesIO()
    torch.save(fl.state_dict(state), file)
    file.seek(0)
    loaded = fl.load_state_dict(tx.init(params), torch.load(file, weights_only=True))
    assert same(loaded, state)
    assert same(run_pure(tx, p, grads[2:], loaded), wanted)
    assert same(run_step(fl.compile(tx, backend="eager"), clone(params), grads, tx.init(params)), wanted)
    names = [name for name in fl.state_dict(state) if name.endswith(".w")]
    assert "inner_state.largest.update.w" in names


def test_gradients_of_few_bits_do_not_hide_it():
    """The updates come back in the gradients' dtype: rounded to bfloat16 they would all look off by 0.2%."""
    params, tx = _params(), fl.low_bit(fl.sgd(0.1, 0.9), "companded8")
    grads = _grads(1, torch.bfloat16)[0]
    in_few = fl.quantization_error(tx, grads, tx.init(params), params)
    assert in_few == fl.quantization_error(tx, {k: g.float() for k, g in grads.items()}, tx.init(params), params)


def test_in_an_optimizer():
    model = torch.nn.Linear(64, 65)
    optimizer = fl.optim.Optimizer(model.named_parameters(), fl.record_quantization_error(fl.adamw8bit(0.1), every=1))
    model(torch.ones(3, 64)).square().sum().backward()
    optimizer.step()
    own = optimizer.state[model.weight]
    assert float(own["last.update"]) > 0
    assert int(own["looks"]) == 1
    optimizer.load_state_dict(optimizer.state_dict())


def test_its_numbers_are_described():
    tx = fl.record_quantization_error(fl.sgd8bit(0.1))
    rows = {row.path: row for row in fl.describe(tx.init(_params())).rows}
    assert rows["last.update.w"][1:] == ("float32", (), 4, "a number of its leaf")
    assert rows["looks.w"].why == "a number of its leaf"
    assert rows["step"].why == "shared by all leaves"
    assert rows["inner_state.0.trace.w"].why == "at least 4,096 elements"


def test_empty_trees_and_states_without_moments():
    tx = fl.record_quantization_error(fl.adam8bit(0.1), every=1)
    _, state = tx.update({}, tx.init({}), {})
    assert int(state.step) == 1
    assert fl.recorded_quantization_error(state).rows == ()
    report = fl.quantization_error(fl.sgd(0.1), _grads(1)[0], fl.sgd(0.1).init(_params()), _params())
    assert [(row.what, row.error, row.format) for row in report.rows] == 3 * [("update", 0.0, "")]


def test_an_update_of_zero_has_no_error():
    """A schedule that begins at 0."""
    tx, params = fl.adam8bit(lambda step: 0.0 * step), _params()
    report = fl.quantization_error(tx, _grads(1)[0], tx.init(params), params)
    assert {row.error for row in report.rows if row.what == "update"} == {0.0}
    assert all(row.error > 0 for row in report.rows if row.what == "mu" and row.path != "b")


def test_what_is_refused():
    refuses(
        TypeError,
        "record_quantization_error: tx must be a GradientTransformation, got function; call it: adam8bit(...)",
        lambda: fl.record_quantization_error(fl.adam8bit),
    )
    for every, kind in ((1.5, "float"), (True, "bool"), ("2", "str")):
        refuses(
            TypeError,
            f"record_quantization_error: every must be an int, got {kind}",
            lambda every=every: fl.record_quantization_error(fl.adam8bit(0.1), every),
        )
    refuses(
        ValueError,
        "record_quantization_error: every must be at least 1, got 0",
        lambda: fl.record_quantization_error(fl.adam8bit(0.1), 0),
    )
    refuses(
        ValueError,
        "record_quantization_error: low_bit must be inside, since what is outside stores what this one cannot see; "
        "write record_quantization_error(low_bit(tx))",
        lambda: fl.low_bit(fl.record_quantization_error(fl.adam(0.1))).init(_params()),
    )
    refuses(
        ValueError,
        "recorded_quantization_error: the state has no QuantizationErrorState inside; use "
        "fl.record_quantization_error(tx)",
        lambda: fl.recorded_quantization_error(fl.adam8bit(0.1).init(_params())),
    )
    tx = fl.record_quantization_error(fl.adam8bit(0.1))
    refuses(
        ValueError,
        "record_quantization_error.update: the state must be a QuantizationErrorState, got tuple; it was made for "
        "another transformation",
        lambda: tx.update(_grads(1)[0], fl.adam8bit(0.1).init(_params()), _params()),
    )


def _most(do):
    """The most bytes in tensors that were made while `do()` ran, at any moment of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        do()
    results = profile.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in events))


def test_a_look_needs_memory_for_some_leaves_only():
    params = {f"l{i:02}": torch.zeros(128, 128) for i in range(32)}
    grads = {k: torch.full_like(p, 0.1) for k, p in params.items()}
    tx = fl.adam8bit(0.1)
    state = tx.init(params)
    in_float32 = 2 * sum(p.nbytes for p in params.values())
    # Two leaves at a time: their moments before, after and rounded, two updates, and what is on the way to them.
    assert _most(lambda: fl.quantization_error(tx, grads, state, params)) < 0.5 * in_float32
    # A whole look has all of these for all leaves.
    whole = fl.chain(fl.clip_by_global_norm(1.0), tx)
    state = whole.init(params)
    assert _most(lambda: fl.quantization_error(whole, grads, state, params)) > 3 * in_float32
