"""Every learning rate scheduler of torch, beside torch.optim.AdamW in the same loop; and torch.optim.swa_utils."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import run_pure, same
from optim_models import NUMBERS, adamw8bit, gradients, model_of, named, numbers, state_of, train
from torch import Tensor, nn
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import functional_lowbit as fl

STEPS = 12


def _sequence(o: Any) -> Any:
    return s.SequentialLR(o, [s.LinearLR(o, 0.25, total_iters=3), s.CosineAnnealingLR(o, T_max=6)], milestones=[3])


def _chained(o: Any) -> Any:
    return s.ChainedScheduler([s.ConstantLR(o, 0.5, total_iters=4), s.ExponentialLR(o, 0.75)])


MAKE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: s.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.5**t]),  # one for each group
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda t: 0.75),
    "StepLR": lambda o: s.StepLR(o, step_size=2, gamma=0.25),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 5], gamma=0.25),
    "ConstantLR": lambda o: s.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: s.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.75),
    "SequentialLR": _sequence,
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, T_max=8),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: s.CyclicLR(o, base_lr=0.01, max_lr=0.125, step_size_up=3, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: s.OneCycleLR(o, max_lr=0.125, total_steps=STEPS + 1, cycle_momentum=True),
    "PolynomialLR": lambda o: s.PolynomialLR(o, total_iters=8, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}
MOVES_BETAS = {"CyclicLR", "OneCycleLR"}


def test_all_schedulers_are_here():
    assert set(MAKE) == {*s.__all__, "SWALR"} - {"LRScheduler"}


def groups_of(model: Any) -> list[Any]:
    return [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.0625}]


@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("name", MAKE)
def test_as_torchs_adamw(name, rate):
    """The same rates, to the last bit; parameters within the rounding of 12 steps; nothing is compiled again.

    A step of up to 0.125 is off by 1e-8, and parameters are below 2, so that each step rounds them by 1.2e-7 at most.
    """
    runs, rates = [], []
    for cls, options in ((fl.optim.AdamW8bit, {"format": "float32", "backend": "native"}), (torch.optim.AdamW, {})):
        model = model_of()
        groups = groups_of(model)
        groups[1]["lr"] = rate(groups[1]["lr"])
        optimizer: Any = cls(groups, lr=rate(0.125), weight_decay=0.1, **options)  # type: ignore[arg-type]
        schedule = MAKE[name](optimizer)
        seen, graphs = [], None
        for k in range(STEPS):
            seen.append([(float(g["lr"]), *map(float, g["betas"])) for g in optimizer.param_groups])
            train(model, optimizer, range(k, k + 1))
            if options:
                graphs = optimizer.graphs if graphs is None else graphs
                assert optimizer.graphs == graphs == 2  # one kernel, counted for each group
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()
            assert list(map(float, schedule.get_last_lr())) == [float(g["lr"]) for g in optimizer.param_groups]
        if rate is torch.tensor:
            assert all(isinstance(g["lr"], Tensor) for g in optimizer.param_groups)
        runs.append(model)
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len({lr for lr, *_ in itertools.chain(*rates[0])}) > 2
    assert (len({b1 for _, b1, _ in itertools.chain(*rates[0])}) > 1) == (name in MOVES_BETAS)
    for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert (a - b).abs().max() <= 5e-6


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR"])
def test_the_bits_of_a_transformation_made_anew(name):
    """With few-bit state: at each step the bits of the pure update with the group's floats. Numbers are saved."""
    model, plain = model_of(), model_of()
    optimizer = fl.optim.Optimizer(model.named_parameters(), adamw8bit, NUMBERS, backend="native")
    schedule = MAKE[name](optimizer)
    params, state = numbers(plain), None
    for k in range(6):
        group = {key: optimizer.param_groups[0][key] for key in NUMBERS}
        params, state = run_pure(adamw8bit(**group), params, gradients(plain, range(k, k + 1)), state)
        train(model, optimizer, range(k, k + 1))
        schedule.step()
        assert same(numbers(model), params)
        assert optimizer.graphs == 2  # of stored leaves and of small ones
    resumed = fl.optim.Optimizer(model.named_parameters(), adamw8bit, NUMBERS, backend="eager")
    resumed.load_state_dict(state_of(optimizer))
    for key in NUMBERS:
        assert resumed.param_groups[0][key] == optimizer.param_groups[0][key]


def test_momentum_of_sgd():
    """OneCycleLR moves `momentum` where there are no betas."""
    runs = []
    for cls, options in ((fl.optim.SGD8bit, {"format": "float32", "backend": "eager"}), (torch.optim.SGD, {})):
        model = model_of()
        optimizer: Any = cls(model.parameters(), lr=0.01, momentum=0.9, **options)  # type: ignore[arg-type]
        schedule = s.OneCycleLR(optimizer, max_lr=0.01, total_steps=7)
        momenta = set()
        for k in range(6):
            momenta.add(optimizer.param_groups[0]["momentum"])
            train(model, optimizer, range(k, k + 1))
            schedule.step()
        runs.append(model)
        assert len(momenta) > 3
    for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert (a - b).abs().max() <= 2e-6  # parameters below 1, sums of gradients below 10


def test_what_is_computed_from_numbers():
    """Twice the rate, a choice by the decay, a schedule made of the rate: from the group's numbers, at each step."""

    def rule(lr: Any, weight_decay: Any) -> fl.GradientTransformation:
        decay = fl.add_decayed_weights(min(weight_decay, 0.5)) if weight_decay > 0.25 else fl.add_decayed_weights(0.0)
        cosine = fl.schedules.cosine_decay_schedule(2 * lr, decay_steps=10)
        return fl.chain(fl.scale_by_adam(), decay, fl.scale_by_learning_rate(cosine))

    model, plain = model_of(), model_of()
    options = {"lr": 0.1, "weight_decay": 0.125}
    optimizer = fl.optim.Optimizer(model.named_parameters(), rule, options, backend="native")
    params, state = numbers(plain), None
    for k, (lr, decay) in enumerate(((0.1, 0.125), (0.2, 0.375), (0.05, 0.75), (0.05, 0.75))):
        optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        train(model, optimizer, range(k, k + 1))
        params, state = run_pure(rule(lr, decay), params, gradients(plain, range(k, k + 1)), state)
        assert same(numbers(model), params)
        assert optimizer.graphs == 1


def test_a_plateau_changes_the_rate_of_a_users_function():
    model, plain = model_of(), model_of()
    optimizer = fl.optim.Optimizer(model.named_parameters(), adamw8bit, NUMBERS, backend="eager")
    schedule = s.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    params, state = numbers(plain), None
    for seed, rate in enumerate((0.1, 0.1, 0.05)):
        train(model, optimizer, range(seed, seed + 1))
        schedule.step(1.0)
        tx = adamw8bit(**{**NUMBERS, "lr": rate})
        params, state = run_pure(tx, params, gradients(plain, range(seed, seed + 1)), state)
        assert same(numbers(model), params)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.75)], ids=["mean", "EMA"])
def test_averaged_models(average):
    """swa_utils: the mean of what was trained, and its batch norm made anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    averaged = AveragedModel(model, multi_avg_fn=average)
    optimizer = fl.optim.AdamW8bit(model.parameters(), lr=0.1, backend="eager")
    expected: dict[str, Tensor] = {}
    data = torch.randn(16, 4)
    for k in range(1, 4):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        for n, p in numbers(model).items():
            weight = 1 / k if average is None else 1.0 if k == 1 else 0.25
            expected[n] = p if k == 1 else expected[n] + weight * (p - expected[n])
    update_bn([data], averaged)
    for n, p in named(averaged.module).items():
        torch.testing.assert_close(p.detach(), expected[n])
    assert averaged.module[1].num_batches_tracked == 1
