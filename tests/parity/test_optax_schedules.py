"""Schedules against optax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import functional_lowbit as fl

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda s: s.constant_schedule(0.3),
    "linear": lambda s: s.linear_schedule(1.0, 0.1, 30),
    "linear_begin": lambda s: s.linear_schedule(0.0, 2.0, 25, transition_begin=7),
    "linear_one_step": lambda s: s.linear_schedule(0.5, 2.0, 1),
    "cosine_decay": lambda s: s.cosine_decay_schedule(0.7, 40),
    "cosine_decay_alpha": lambda s: s.cosine_decay_schedule(0.7, 40, alpha=0.1),
    "cosine_decay_exponent": lambda s: s.cosine_decay_schedule(0.7, 40, alpha=0.05, exponent=1.5),
    "warmup_cosine_decay": lambda s: s.warmup_cosine_decay_schedule(0.0, 1.0, 10, 40),
    "warmup_cosine_decay_end": lambda s: s.warmup_cosine_decay_schedule(0.1, 1.0, 10, 40, end_value=0.02),
    "warmup_cosine_decay_exponent": lambda s: s.warmup_cosine_decay_schedule(0.1, 2.0, 5, 40, 0.02, exponent=2.0),
    "warmup_cosine_decay_no_warmup": lambda s: s.warmup_cosine_decay_schedule(0.1, 1.0, 0, 40),
    "warmup_cosine_decay_peak_0": lambda s: s.warmup_cosine_decay_schedule(0.1, 0.0, 10, 40),
    "join": lambda s: s.join_schedules(
        [s.constant_schedule(0.1), s.linear_schedule(0.1, 1.0, 8), s.cosine_decay_schedule(1.0, 20)], [5, 13]
    ),
    "join_one": lambda s: s.join_schedules([s.linear_schedule(0.0, 1.0, 8)], []),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    """Steps 0 to 60; every schedule here has ended by 45.

    Ours compute in float64. Against optax in float32: 1e-6 of the largest value (a cosine near -1 cancels, so that the
    last values before the end are good to that and no better). Against optax in float64: 1e-12 of the value itself,
    and the cancellation's 1e-15.
    """
    mine = SCHEDULES[name](fl.schedules)
    steps = range(61)
    ours = np.array([float(mine(torch.tensor(t))) for t in steps])
    single = np.array([float(SCHEDULES[name](optax.schedules)(jnp.asarray(t))) for t in steps])
    with jax.enable_x64(True):
        double = np.array([float(SCHEDULES[name](optax.schedules)(jnp.asarray(t))) for t in steps])
    assert np.abs(ours - single).max() <= 1e-6 * np.abs(single).max()
    np.testing.assert_allclose(ours, double, rtol=1e-12, atol=1e-15)
