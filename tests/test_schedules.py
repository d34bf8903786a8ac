"""Schedules at known points, on tensors and numbers, whatever the default dtype."""

import math

import pytest
import torch

import functional_lowbit as fl

S = fl.schedules
FOREVER = 2**40

GOLDEN = {
    "constant": (S.constant_schedule(0.1), {0: 0.1, 7: 0.1, FOREVER: 0.1}),
    "linear": (S.linear_schedule(1.0, 0.0, 4), {0: 1.0, 1: 0.75, 2: 0.5, 4: 0.0, 5: 0.0, FOREVER: 0.0}),
    "linear, later": (S.linear_schedule(2.0, 4.0, 2, 3), {0: 2.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 4.0}),
    "cosine": (
        S.cosine_decay_schedule(2.0, 4),
        {0: 2.0, 1: 1 + math.cos(math.pi / 4), 2: 1.0, 3: 1 - math.cos(math.pi / 4), 4: 0.0, FOREVER: 0.0},
    ),
    "cosine to a tenth": (S.cosine_decay_schedule(2.0, 4, alpha=0.1), {0: 2.0, 2: 1.1, 4: 0.2, 9: 0.2}),
    "cosine squared": (S.cosine_decay_schedule(1.0, 4, exponent=2.0), {0: 1.0, 2: 0.25, 4: 0.0}),
    "warmup cosine": (
        S.warmup_cosine_decay_schedule(0.0, 1.0, 10, 30, 0.2),
        {0: 0.0, 5: 0.5, 9: 0.9, 10: 1.0, 20: 0.6, 30: 0.2, FOREVER: 0.2},
    ),
    "no warmup": (S.warmup_cosine_decay_schedule(0.5, 1.0, 0, 20), {0: 1.0, 10: 0.5, 20: 0.0}),
    "warmup to nothing": (S.warmup_cosine_decay_schedule(1.0, 0.0, 2, 4), {0: 1.0, 1: 0.5, 2: 0.0, 4: 0.0}),
    "joined": (
        S.join_schedules([S.linear_schedule(0.0, 1.0, 2), lambda step: 0.1 * step, lambda step: 7.0], [2, 5]),
        {0: 0.0, 1: 0.5, 2: 0.0, 3: 0.1, 4: 0.2, 5: 7.0, 6: 7.0},
    ),
    "joined floats": (S.join_schedules([lambda step: 0.1, lambda step: 0.3], [1]), {0: 0.1, 1: 0.3}),
}


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name, default):
    schedule, values = GOLDEN[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = {step: schedule(torch.tensor(step)) for step in values}
    finally:
        torch.set_default_dtype(before)
    for step, value in got.items():
        assert value.shape == ()
        assert value.dtype == torch.float64
        # 0.1 * step of a user's own schedule is torch's arithmetic on an int64 tensor: the default dtype
        rounding = {torch.float32: 1e-7, torch.bfloat16: 4e-3}[default] if name == "joined" else 1e-15
        assert math.isclose(float(value), values[step], rel_tol=rounding, abs_tol=1e-15)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_schedule_is_pure_and_the_same_number_at_each_call(name):
    schedule = GOLDEN[name][0]
    step = torch.tensor(3)
    assert torch.equal(schedule(step), schedule(step))
    assert step == 3


@pytest.mark.parametrize("name", GOLDEN)
def test_as_a_learning_rate(name):
    schedule = GOLDEN[name][0]
    tx = fl.sgd(schedule)
    params, state = torch.zeros(()), tx.init(torch.zeros(()))
    for step in range(6):
        updates, state = tx.update(torch.ones(()), state, params)
        assert torch.equal(updates, -schedule(torch.tensor(step)).float())
