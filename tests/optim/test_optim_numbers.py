"""Hyperparameters in the groups: read at each step, checked before anything is written."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refuses, run_pure, same
from optim_models import NUMBERS, adamw8bit, function_of, gradients, model_of, numbers, state_of, train

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


def test_each_group_has_its_own_numbers():
    model = model_of()
    groups: list[Any] = [
        {"params": list(model[0].named_parameters("0")), "lr": 0.5, "weight_decay": 0},
        {"params": list(model[1].named_parameters("1"))},
    ]
    optimizer = Optimizer(groups, adamw8bit, NUMBERS, backend="eager")
    grads = gradients(model, range(3))
    before = numbers(model)
    train(model, optimizer, range(3))
    for part, changed in (("0", {"lr": 0.5, "weight_decay": 0.0}), ("1", {})):
        own = {n: p for n, p in before.items() if n[0] == part}
        wanted, _ = run_pure(adamw8bit(**{**NUMBERS, **changed}), own, [{n: g[n] for n in own} for g in grads])
        assert same({n: numbers(model)[n] for n in own}, wanted)


def test_wrong_numbers_in_a_group():
    model = model_of()

    def tx(lr: Any, betas: Any, nesterov: bool) -> Any:
        return fl.adam8bit(lr, *betas, nesterov=nesterov)

    groups: list[Any] = [{"params": m.parameters()} for m in model]
    optimizer = Optimizer(groups, tx, {"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False}, backend="eager")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = numbers(model), state_of(optimizer)["state"]
    group = optimizer.param_groups[2]
    for kind, key, value, message in (
        (ValueError, "lr", float("nan"), "lr of group 2 must be finite, got nan"),
        (ValueError, "lr", torch.ones(2), "lr of group 2 must be a number, got a tensor of shape (2,)"),
        (TypeError, "lr", "fast", "lr of group 2 must be a number, got 'fast'"),
        (ValueError, "betas", (0.9,), "betas of group 2 must be 2 numbers, got (0.9,)"),
        (
            ValueError,
            "nesterov",
            True,
            "nesterov of group 2 was False when the optimizer was made, got True; only numbers whose default is a "
            "float can be changed",
        ),
    ):
        old, group[key] = group[key], value
        refuses(kind, f"Optimizer.step: {message}", optimizer.step)
        group[key] = old
    del group["lr"]
    message = "Optimizer.step: lr of group 2 is missing; set param_groups[2]['lr']"
    refuses(ValueError, message, optimizer.step)
    group["lr"] = 0.1
    model[2].bias.grad = torch.zeros(3).to_sparse()
    message = (
        "Optimizer.step: updates['5'] is sparse (torch.sparse_coo); only dense gradients are supported, call "
        ".to_dense() first"
    )
    refuses(TypeError, message, optimizer.step)
    assert same((numbers(model), state_of(optimizer)["state"]), before)


LOAD = "Optimizer.load_state_dict: "


def ranged(lr: Any, betas: Any, nesterov: bool) -> Any:
    return fl.adam8bit(lr, *betas, nesterov=nesterov)


RANGED: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False}


def two_groups(model: Any, function: Any = ranged) -> Any:
    return Optimizer([{"params": m.parameters()} for m in model[:2]], function, RANGED, backend="eager")


WRONG_NUMBERS: dict[str, tuple[type[Exception], str, Any, str]] = {
    "a word": (TypeError, "lr", "abc", "lr of group 1 must be a number, got 'abc'"),
    "not finite": (ValueError, "lr", float("inf"), "lr of group 1 must be finite, got inf"),
    "out of range": (ValueError, "betas", (0.9, 1.5), "group 1: scale_by_adam: b2 must be in [0, 1), got 1.5"),
    "out of range, a list": (
        ValueError,
        "betas",
        [-0.1, 0.9],
        "group 1: scale_by_adam: b1 must be in [0, 1), got -0.1",
    ),
    "out of range, a tensor": (
        ValueError,
        "betas",
        (0.9, torch.tensor(1.5)),
        "group 1: scale_by_adam: b2 must be in [0, 1), got 1.5",
    ),
    "another kind": (
        ValueError,
        "nesterov",
        True,
        "nesterov of group 1 was False when the optimizer was made, got True; only numbers whose default is a float "
        "can be changed",
    ),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_wrong_numbers_are_refused_before_anything_is_written(name):
    """At the step and at load. The numbers of group 0, which are right and others, are not taken either."""
    kind, key, value, message = WRONG_NUMBERS[name]
    model = model_of()
    optimizer = two_groups(model)
    train(model, optimizer, range(1))
    before = numbers(model), state_of(optimizer)
    spoilt = state_of(optimizer)
    train(model, optimizer, range(1, 2))
    spoilt["param_groups"][0]["lr"] = 0.5
    spoilt["param_groups"][1][key] = value
    after = numbers(model), state_of(optimizer)
    refuses(kind, LOAD + message, lambda: optimizer.load_state_dict(spoilt))
    assert same((numbers(model), state_of(optimizer)), after)

    group = optimizer.param_groups[1]
    kept = optimizer.param_groups[0]["lr"], group[key]
    optimizer.param_groups[0]["lr"], group[key] = 0.5, value
    for _ in range(2):  # what was refused is not taken for known
        refuses(kind, f"Optimizer.step: {message}", optimizer.step)
    optimizer.param_groups[0]["lr"], group[key] = kept
    assert same((numbers(model), state_of(optimizer)), after)
    assert not same(before[0], after[0])
    train(model, optimizer, range(2, 3))
    again = model_of()
    train(again, two_groups(again), range(3))
    assert same(numbers(model), numbers(again))


def test_a_file_without_a_number():
    """The optimizer's own would stay, silently."""
    model = model_of()
    optimizer = two_groups(model)
    saved = state_of(optimizer)
    del saved["param_groups"][1]["lr"]
    message = LOAD + "lr of group 1 is missing; set state_dict['param_groups'][1]['lr']"
    refuses(ValueError, message, lambda: optimizer.load_state_dict(saved))


def test_a_function_is_called_when_numbers_change():
    """So that constant numbers cost nothing."""
    calls = []
    model = model_of()
    optimizer = two_groups(model, lambda **numbers: calls.append(numbers) or ranged(**numbers))
    train(model, optimizer, range(1))
    made = len(calls)
    train(model, optimizer, range(1, 3))
    optimizer.param_groups[1]["betas"] = [0.9, 0.99]  # the same numbers
    train(model, optimizer, range(3, 4))
    assert len(calls) == made
    optimizer.param_groups[1]["lr"] = 0.2
    train(model, optimizer, range(4, 6))
    assert calls[made:] == [{"lr": 0.2, "betas": (0.9, 0.99), "nesterov": False}]


def test_a_tensor_that_is_the_groups_no_longer():
    """A step takes the number that stands in the group, also if an equal one took the place of the first."""
    rate, p = torch.tensor(0.5), torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([p], fl.sgd, {"learning_rate": rate}, backend="eager")
    p.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # the group has a copy now
    rate.fill_(100.0)
    optimizer.step()
    assert torch.equal(p, torch.full((2,), -1.0))
    optimizer.param_groups[0]["learning_rate"].fill_(2.0)
    optimizer.step()
    assert torch.equal(p, torch.full((2,), -3.0))


def test_a_default_that_is_a_tensor():
    """The function is given a tensor, whose methods it may need."""
    model, plain = model_of(), model_of()
    tx = lambda lr: fl.adamw8bit(lr.detach())  # noqa: E731
    optimizer = Optimizer(model.named_parameters(), tx, {"lr": torch.tensor(0.1)}, backend="eager")
    params, state = numbers(plain), None
    for seed, rate in enumerate((0.125, 0.25)):
        optimizer.param_groups[0]["lr"].fill_(rate)
        train(model, optimizer, range(seed, seed + 1))
        params, state = run_pure(fl.adamw8bit(rate), params, gradients(plain, range(seed, seed + 1)), state)
        assert same(numbers(model), params)


def test_a_plain_transformation_reads_no_numbers():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, optimizer, range(1))
    before = numbers(model), state_of(optimizer)["state"]
    message = (
        "group 0 has 'lr', which a transformation does not read; give a function tx(**hyperparameters) and defaults"
    )
    for value in (0.0, 0, torch.tensor(0.0), np.float32(0), (0.0,), [0.0, 0.1]):
        optimizer.param_groups[0]["lr"] = value
        refuses(ValueError, f"Optimizer.step: {message}", optimizer.step)
    del optimizer.param_groups[0]["lr"]
    function = Optimizer(model.parameters(), function_of, {"lr": 0.1}, backend="eager")
    refuses(ValueError, LOAD + message, lambda: optimizer.load_state_dict(function.state_dict()))
    assert same((numbers(model), state_of(optimizer)["state"]), before)
    lr_scheduler = torch.optim.lr_scheduler
    optimizers = optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    optimizer.load_state_dict(state_of(optimizer))
    for o in optimizers:
        for schedule in (lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0), lr_scheduler.ReduceLROnPlateau):
            with pytest.raises(KeyError) as caught:
                schedule(o)
            assert caught.value.args == (
                "Optimizer: a group has no 'lr', since a transformation reads no numbers from it; give a function "
                "tx(**hyperparameters) and defaults, or give the transformation a schedule",
            )
    optimizer.step()


def test_lists_for_tuples():
    """torch.distributed.checkpoint makes lists of tuples."""
    tx = lambda betas, kinds: fl.adamw8bit(0.1, *betas)  # noqa: E731
    model = model_of()
    optimizer = Optimizer(model.parameters(), tx, {"betas": (0.9, 0.99), "kinds": ("a", 1)}, backend="eager")
    optimizer.param_groups[0].update(betas=[0.9, 0.99], kinds=["a", 1])
    train(model, optimizer, range(1))
    assert same(
        numbers(model), run_pure(fl.adamw8bit(0.1, 0.9, 0.99), numbers(model_of()), gradients(model, range(1)))[0]
    )


def test_a_group_that_is_added_counts_from_0():
    for tx, defaults in ((fl.adamw8bit(0.1, weight_decay=1e-2), None), (adamw8bit, NUMBERS)):
        model = model_of()
        optimizer = Optimizer([{"params": [*model[0].parameters()]}], tx, defaults, backend="eager")
        train(model, optimizer, range(2))
        before = numbers(model)
        optimizer.add_param_group({"params": [*model[1].parameters()]})
        train(model, optimizer, range(2, 4))
        assert optimizer.state[model[0].weight]["0.step"].item() == 4
        assert optimizer.state[model[1].weight]["0.step"].item() == 2
        own = {n: p for n, p in before.items() if n[0] == "1"}
        grads = [{n: g[n] for n in own} for g in gradients(model, range(2, 4))]
        wanted, _ = run_pure(fl.adamw8bit(0.1, weight_decay=1e-2), own, grads)
        assert same({n: numbers(model)[n] for n in own}, wanted)
        message = (
            "scale_by_adam.init: params['4'] must be float16, bfloat16, float32 or float64, got torch.int64; leave it "
            "out of the tree or mask it with fl.masked"
        )
        refuses(TypeError, message, lambda o=optimizer: o.add_param_group({"params": [torch.ones(2).long()]}))
        assert len(optimizer.param_groups) == 2
        resumed = Optimizer([{"params": [*model[0].parameters()]}], tx, defaults)
        resumed.add_param_group({"params": [*model[1].parameters()]})
        resumed.load_state_dict(state_of(optimizer))
        assert same(state_of(resumed)["state"], state_of(optimizer)["state"])


def test_groups_added_are_not_groups_given():
    model = model_of()
    optimizer = Optimizer(model[0].parameters(), fl.adamw(0.1), backend="eager")
    train(model[0], optimizer, range(1))
    optimizer.add_param_group({"params": model[1].parameters()})
    other = Optimizer([{"params": m.parameters()} for m in model[:2]], fl.adamw(0.1))
    refuses(
        ValueError,
        LOAD + "'0.step' is 1 for '0' and 0 for '2', but one step updates both; load into an optimizer with the groups "
        "of the saved one",
        lambda: other.load_state_dict(optimizer.state_dict()),
    )


def test_a_function_that_makes_another_kind_of_transformation():
    """Its states would be others. Nothing is written, and the numbers before are still those of the step."""

    def rule(lr: float, clip: float) -> fl.GradientTransformation:
        return fl.chain(fl.clip(clip), fl.adamw8bit(lr)) if clip else fl.adamw8bit(lr)

    model, plain = model_of(), model_of()
    optimizer = Optimizer(model.parameters(), rule, {"lr": 0.1, "clip": 0.0}, backend="eager")
    train(model, optimizer, range(1))
    before = numbers(model), state_of(optimizer)["state"]
    for clip in (1.0, 1.0):
        optimizer.param_groups[0]["clip"] = clip
        refuses(
            ValueError,
            "Optimizer.step: group 0: the transformation that the function makes must not change its structure with "
            "its hyperparameters, but LowBit became Chain; make another one for that",
            optimizer.step,
        )
    assert same((numbers(model), state_of(optimizer)["state"]), before)
    optimizer.param_groups[0].update(lr=0.2, clip=0.0)
    train(model, optimizer, range(1, 2))
    second = Optimizer(plain.parameters(), rule, {"lr": 0.1, "clip": 0.0}, backend="eager")
    train(plain, second, range(1))
    second.param_groups[0]["lr"] = 0.2
    train(plain, second, range(1, 2))
    assert same(numbers(model), numbers(plain))
