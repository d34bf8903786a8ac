"""Gradients accumulated over mini-steps: the numbers of one large step, and nothing run or written in between."""

import math
from typing import Any

import pytest
import torch
from helpers import averaged, clone, leaves, random_like, refuses, run_pure, run_step, same
from tiers import slow_unless

import functional_lowbit as fl

PARAMS = {"w": torch.empty(64, 65), "b": torch.empty(3)}
DECAY = {"w": True, "b": False}


def _k_of(gradient_step):
    return torch.where(gradient_step < 1, 1, 3)


TABLE: dict[str, Any] = {
    "adamw": lambda: fl.multi_steps(fl.adamw(0.1), 2),
    "sum": lambda: fl.multi_steps(fl.adamw8bit(0.1), 3, use_grad_mean=False),
    "k of 1": lambda: fl.multi_steps(fl.adamw8bit(0.1), 1),
    "k that changes": lambda: fl.multi_steps(fl.adam8bit(0.1), _k_of),
    "accumulator in few bits": lambda: fl.low_bit(fl.multi_steps(fl.adamw(0.1), 2)),
    "two formats": lambda: fl.low_bit(fl.multi_steps(fl.adamw4bit(0.1), 2), {"acc_grads": "companded8"}),
    "clip inside": lambda: fl.multi_steps(fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(0.1)), 2),
    "clip outside": lambda: fl.chain(fl.clip_by_global_norm(0.5), fl.multi_steps(fl.adamw8bit(0.1), 2)),
    "in a chain": lambda: fl.chain(
        fl.add_decayed_weights(0.1, DECAY), fl.multi_steps(fl.adam8bit(0.1), 2), fl.add_decayed_weights(0.01)
    ),
    "before a clip": lambda: fl.chain(fl.multi_steps(fl.sgd(0.1), 2), fl.clip_by_global_norm(0.1), fl.scale(0.5)),
    "masked": lambda: fl.chain(fl.masked(fl.multi_steps(fl.sgd(0.1, 0.9), 2), DECAY), fl.scale(0.5)),
    "of a mask": lambda: fl.multi_steps(fl.masked(fl.adam(0.1), DECAY), 2),
    "a gate outside": lambda: fl.apply_if_finite(fl.multi_steps(fl.adam8bit(0.1), 2)),
    "a gate inside": lambda: fl.multi_steps(fl.apply_if_finite(fl.adam8bit(0.1)), 2),
    "a gate behind": lambda: fl.chain(
        fl.multi_steps(fl.apply_if_finite(fl.adam8bit(0.1)), 2), fl.apply_if_finite(fl.trace(0.9))
    ),
    "in each other": lambda: fl.multi_steps(fl.chain(fl.multi_steps(fl.adam(0.1), 2), fl.add_decayed_weights(0.1)), 2),
    "master_weights": lambda: fl.master_weights(fl.multi_steps(fl.adamw8bit(0.1), 2)),
    "inject_hyperparams inside": lambda: fl.multi_steps(
        fl.inject_hyperparams(fl.adamw8bit)(fl.schedules.linear_schedule(0.1, 0.0, 5)), 2
    ),
    "inject_hyperparams outside": lambda: fl.inject_hyperparams(lambda rate, k: fl.multi_steps(fl.adamw8bit(rate), k))(
        fl.schedules.linear_schedule(0.1, 0.0, 10), k=2
    ),
    "a user's pair": lambda: fl.multi_steps(fl.chain(averaged(), fl.scale(-0.1)), 2),
    "a user's pair in few bits": lambda: fl.low_bit(fl.multi_steps(fl.chain(averaged(), fl.scale(-0.1)), 2)),
    "a rule that reduces": lambda: fl.multi_steps(fl.chain(fl.centralize(), fl.adam8bit(0.1)), 2),
}


@pytest.mark.parametrize("name", TABLE)
def test_compiled_equals_pure_in_place(name):
    tx, params = TABLE[name](), random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1 + t) for t in range(5)]
    if "gate" in name:
        grads[1]["b"][0] = math.nan
    if "pair" not in name:  # that one knows no None
        grads[2]["b"] = grads[3]["b"] = None
    state = tx.init(params)
    places = [x.data_ptr() for x in leaves(state)]
    step, ours, pure = fl.compile(tx, backend="eager"), (clone(params), state), (params, tx.init(params))
    for g in grads:
        pure = run_pure(tx, pure[0], [g], pure[1])
        ours = run_step(step, ours[0], [g], ours[1])
        assert same(ours, pure)
    assert [x.data_ptr() for x in leaves(ours[1])] == places


@slow_unless(lambda name: name == "a gate outside")
@pytest.mark.parametrize("name", ["two formats", "a gate outside", "master_weights", "in a chain"])
def test_kernels_of_mini_steps_are_compiled_once(name):
    dtype = torch.bfloat16 if name == "master_weights" else torch.float32
    tx, params = TABLE[name](), random_like(PARAMS, seed=0, dtype=dtype)
    grads = [random_like(PARAMS, seed=1 + t, dtype=torch.float32) for t in range(4)]
    step, graphs, wanted = fl.compile(tx, donate=False), [], (params, tx.init(params))
    ours = wanted
    for g in grads:
        ours = step(g, ours[1], ours[0])
        graphs.append(step.graphs)
        wanted = run_pure(tx, wanted[0], [g], wanted[1])
        assert same(ours, wanted)
    assert graphs[0] < graphs[1] == graphs[2] == graphs[3]


@pytest.mark.parametrize("use_grad_mean", [True, False])
def test_golden_values(use_grad_mean):
    """SGD at rate 1 moves by the mean (1 + 3) / 2 and (5 + 7 + 9) / 3, or by the sums."""
    tx = fl.multi_steps(fl.sgd(1.0), lambda step: 2 if step == 0 else 3, use_grad_mean)
    state, moved, counts = tx.init(torch.zeros(1)), [], []
    for g in (1.0, 3.0, 5.0, 7.0, 9.0):
        updates, state = tx.update(torch.tensor([g]), state)
        moved.append(float(updates))
        counts.append((int(state.mini_step), int(state.gradient_step), float(state.acc_grads)))
    if use_grad_mean:
        assert moved == [0.0, -2.0, 0.0, 0.0, -7.0]
        assert counts == [(1, 0, 1.0), (0, 1, 0.0), (1, 1, 5.0), (2, 1, 6.0), (0, 2, 0.0)]
    else:
        assert moved == [0.0, -4.0, 0.0, 0.0, -21.0]
        assert counts == [(1, 0, 1.0), (0, 1, 0.0), (1, 1, 5.0), (2, 1, 12.0), (0, 2, 0.0)]


def test_bfloat16_gradients_are_accumulated_in_float32():
    tx, params = fl.multi_steps(fl.sgd(1.0), 4), torch.zeros(2, dtype=torch.bfloat16)
    state, updates = tx.init(params), params
    for g in (256.0, 1.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        assert state.acc_grads.dtype == torch.float32
        updates, state = tx.update(torch.full((2,), g, dtype=torch.bfloat16), state, params)
    assert updates.dtype == torch.bfloat16
    assert torch.equal(updates, torch.full((2,), -64.75).bfloat16())


def test_k_of_1_allocates_nothing():
    params = random_like(PARAMS, seed=0)
    state = fl.multi_steps(fl.adam8bit(0.1), 1).init(params)
    assert state.acc_grads is None
    extra = [r.path for r in fl.describe(state).rows if not r.path.startswith("inner_opt_state")]
    assert extra == ["mini_step", "gradient_step"]


def test_where_the_accumulator_rests():
    params = random_like(PARAMS, seed=0)

    def formats_of(tx):
        return {
            r.path.replace("inner_opt_state.0.", ""): r.format
            for r in fl.describe(tx.init(params)).rows
            if r.path.endswith("w")
        }

    few = {"mu.w": "companded8", "nu.w": "companded8"}
    assert formats_of(fl.multi_steps(fl.adam8bit(0.1), 2)) == {"acc_grads.w": "float32", **few}
    assert formats_of(fl.low_bit(fl.multi_steps(fl.adam(0.1), 2))) == {"acc_grads.w": "companded8", **few}
    only = fl.low_bit(fl.multi_steps(fl.adam(0.1), 2), {"mu": "companded8", "nu": "companded8"})
    assert formats_of(only) == {"acc_grads.w": "float32", **few}


def test_a_mini_step_runs_nothing_inside_and_touches_no_parameter():
    calls = []

    def count(updates, params):
        calls.append(1)
        return updates

    tx, params = fl.multi_steps(fl.chain(fl.stateless(count), fl.adam8bit(0.1)), 3), random_like(PARAMS, seed=0)
    step, state = fl.compile(tx), tx.init(params)
    versions = [p._version for p in params.values()]
    inner = [x._version for x in leaves(state.inner_opt_state)]
    for g in (1, 2):
        step(random_like(PARAMS, seed=g), state, params)
    assert [p._version for p in params.values()] == versions
    assert [x._version for x in leaves(state.inner_opt_state)] == inner
    assert calls == []
    step(random_like(PARAMS, seed=3), state, params)
    assert calls == [1]
    assert [p._version for p in params.values()] != versions


@pytest.mark.parametrize("use_grad_mean", [True, False])
@pytest.mark.parametrize("format", ["float32", "companded8", "bfloat16"])
def test_a_gradient_of_none_counts_as_zeros(format, use_grad_mean):
    """Until the last mini-step. There it leaves its leaf out, and nothing is left for a later step, no NaN either."""
    tx, params = fl.multi_steps(fl.sgd(1.0), 3, use_grad_mean), random_like(PARAMS, seed=0)
    tx = fl.low_bit(tx, format)
    grads = [random_like(PARAMS, seed=1 + t) for t in range(9)]
    grads[3]["w"][0, 0] = math.nan
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    with_none, with_zeros = [dict(g) for g in grads], [dict(g) for g in grads]
    for t in (1, 5, 6):
        with_none[t]["w"] = with_none[t]["b"] = None
        with_zeros[t] = zeros
    step = fl.compile(tx, backend="eager", donate=False)
    for run in (lambda *args: run_step(step, *args), lambda *args: run_pure(tx, *args)):
        first, second = run(params, with_none[:3], tx.init(params)), run(params, with_zeros[:3], tx.init(params))
        assert same(first, second)
        left_out = run(first[0], with_none[3:6], first[1])
        assert same(left_out[0], first[0])
        assert not any(_numbers(x).any() for x in left_out[1].acc_grads.values())
        third = run(left_out[0], with_none[6:], left_out[1])
        assert same(third, run(left_out[0], with_zeros[6:], left_out[1]))
        assert all(p.isfinite().all() for p in third[0].values())


def _numbers(x):
    return x.dequantize() if isinstance(x, fl.QuantizedTensor) else x


def test_a_nan_leaves_nothing_behind():
    tx, params = fl.multi_steps(fl.sgd(1.0), 2), torch.zeros(2)
    state = tx.init(params)
    for g in (math.nan, 1.0, 2.0):
        _, state = tx.update(torch.full((2,), g), state)
    assert torch.equal(tx.update(torch.full((2,), 4.0), state)[0], torch.full((2,), -3.0))


def test_wrong_numbers_of_mini_steps_are_refused():
    for k in (0, 2.0, True, None):
        message = (
            "multi_steps: every_k_schedule must be an int of at least 1, or a function of gradient_step to one, got "
            f"{k!r}"
        )
        refuses(ValueError, message, lambda k=k: fl.multi_steps(fl.sgd(0.1), k))
    refuses(
        TypeError,
        "multi_steps: tx must be a GradientTransformation, got function; call it: sgd(...)",
        lambda: fl.multi_steps(fl.sgd, 2),
    )
    refuses(
        ValueError,
        "multi_steps.update: the state must be a MultiStepsState, got tuple; it was made for another transformation",
        lambda: fl.multi_steps(fl.sgd(0.1), 2).update(torch.ones(1), ()),
    )


@pytest.mark.parametrize(("k", "text"), [(0, "0"), (torch.tensor(1.5), "tensor(1.5000)"), (None, "None")])
def test_a_wrong_number_of_mini_steps_in_training_is_refused_before_anything_is_written(k, text):
    tx, params = fl.multi_steps(fl.adam(0.1), lambda step: k), torch.zeros(2)
    state = tx.init(params)
    before = clone((params, state))
    message = f"multi_steps: every_k_schedule must return an int of at least 1, got {text} at gradient_step 0"
    refuses(ValueError, message, lambda: tx.update(params, state, params))
    refuses(ValueError, message, lambda: fl.compile(tx, backend="eager")(torch.ones(2), state, params))
    assert same((params, state), before)
