"""Every learning rate scheduler of torch."""

from typing import Any

import pytest
import torch
from helpers import run_pure, same
from optim_models import NUMBERS, adamw8bit, gradients, model_of, numbers, state_of, train
from torch import Tensor

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


def make_schedule(name: str, optimizer: Any) -> Any:
    lr_scheduler = torch.optim.lr_scheduler
    if name == "StepLR":
        return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8, cycle_momentum=True)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR"])
def test_torchs_schedulers(name, rate):
    """As a transformation made anew at each step with the group's floats; one set of graphs."""
    model, plain = model_of(), model_of()
    rate = rate.clone() if isinstance(rate, Tensor) else rate
    optimizer = Optimizer(model.named_parameters(), adamw8bit, {**NUMBERS, "lr": rate}, backend="native")
    schedule = make_schedule(name, optimizer)
    params, state = numbers(plain), None
    graphs, seen = None, set()
    for seed in range(6):
        group = {k: optimizer.param_groups[0][k] for k in NUMBERS}
        group["lr"] = float(group["lr"])
        seen.add((group["lr"], *group["betas"]))
        params, state = run_pure(adamw8bit(**group), params, gradients(plain, range(seed, seed + 1)), state)
        train(model, optimizer, range(seed, seed + 1))
        schedule.step()
        assert same(numbers(model), params)
        graphs = optimizer.graphs if graphs is None else graphs
        assert optimizer.graphs == graphs == 2
    assert len(seen) == (3 if name == "StepLR" else 6)
    assert (len({b1 for _, b1, _ in seen}) > 1) == (name == "OneCycleLR")
    resumed = Optimizer(model.named_parameters(), adamw8bit, NUMBERS)
    resumed.load_state_dict(state_of(optimizer))
    for key in NUMBERS:
        assert resumed.param_groups[0][key] == optimizer.param_groups[0][key]


def test_a_plateau_changes_the_rate():
    model, plain = model_of(), model_of()
    optimizer = Optimizer(model.named_parameters(), adamw8bit, NUMBERS, backend="eager")
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    params, state = numbers(plain), None
    for seed, rate in enumerate((0.1, 0.1, 0.05)):
        train(model, optimizer, range(seed, seed + 1))
        schedule.step(1.0)
        tx = adamw8bit(**{**NUMBERS, "lr": rate})
        params, state = run_pure(tx, params, gradients(plain, range(seed, seed + 1)), state)
        assert same(numbers(model), params)
