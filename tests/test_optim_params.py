"""The parameters of fl.optim.Optimizer: wrong ones, moved ones, and groups that were changed by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import clone, refuses, same
from optim_models import NUMBERS, adamw8bit, function_of, model_of, numbers, state_of, train
from torch import nn

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


GROUPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "replaced": (
        lambda groups: groups[1]["params"].__setitem__(0, nn.Parameter(torch.ones(64, 70))),
        "parameter '1.weight' was replaced in group 1, or taken out of it; make a new optimizer",
    ),
    "taken out": (
        lambda groups: groups[0]["params"].pop(0),
        "parameter '0.weight' was replaced in group 0, or taken out of it; make a new optimizer",
    ),
    "appended": (
        lambda groups: groups[1]["params"].append(nn.Parameter(torch.ones(3))),
        "parameter 2 of group 1, of shape (3,), was put there by hand; take it out and give it to add_param_group",
    ),
    "turned": (
        lambda groups: groups[1]["params"].reverse(),
        "parameter '1.bias' of group 1 was put at position 0; make a new optimizer",
    ),
    "twice": (
        lambda groups: groups[1]["params"].append(groups[1]["params"][0]),
        "parameter '1.weight' of group 1 was put at position 2; make a new optimizer",
    ),
    "a group more": (
        lambda groups: groups.append({"params": [nn.Parameter(torch.ones(3))]}),
        "param_groups has 3 groups, but 2 were given; add one with add_param_group, and make a new optimizer to leave "
        "one out",
    ),
    "a group less": (
        lambda groups: groups.pop(),
        "param_groups has 1 groups, but 2 were given; add one with add_param_group, and make a new optimizer to leave "
        "one out",
    ),
}


@pytest.mark.parametrize("form", ["tx", "function"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_changed_by_hand(name, form):
    """The second group is added later. Nothing is written."""
    change, message = GROUPS[name]
    tx, defaults = (fl.adamw8bit(0.1), None) if form == "tx" else (function_of, {"lr": 0.1})
    model = model_of()
    optimizer = Optimizer(model[0].named_parameters("0"), tx, defaults, backend="eager")
    optimizer.add_param_group({"params": list(model[1].named_parameters("1"))})
    train(model, optimizer, range(1))
    saved = state_of(optimizer)
    before = numbers(model), [clone(optimizer.state[p]) for p in list(model.parameters())[:4]]
    change(optimizer.param_groups)
    for speaker, act in (
        ("Optimizer.step", optimizer.step),
        ("Optimizer.state_dict", optimizer.state_dict),
        ("Optimizer.load_state_dict", lambda: optimizer.load_state_dict(saved)),
        ("Optimizer", lambda: copy.deepcopy(optimizer)),
    ):
        refuses(ValueError, f"{speaker}: {message}", act)
    assert same((numbers(model), [clone(optimizer.state[p]) for p in list(model.parameters())[:4]]), before)


def test_wrong_arguments():
    p = nn.Parameter(torch.ones(2))
    sgd = fl.sgd(0.1)
    function = "; a function that makes one needs defaults"
    for kind, message, make in (
        (TypeError, f"tx must be a GradientTransformation, got function{function}", lambda: Optimizer([p], adamw8bit)),
        (TypeError, f"tx must be a GradientTransformation, got float{function}", lambda: Optimizer([p], 0.1)),  # type: ignore[arg-type]
        (
            TypeError,
            "with defaults, tx must be a function of hyperparameters, got GradientTransformation",
            lambda: Optimizer([p], sgd, {"lr": 0.1}),
        ),
        (
            TypeError,
            "group 0: tx(**hyperparameters) must return a GradientTransformation, got int",
            lambda: Optimizer([p], lambda lr: 3, {"lr": 0.1}),  # type: ignore[arg-type, return-value]
        ),
        (
            ValueError,
            "group 1 has 'weight_decay', which a transformation does not read; give a function "
            "tx(**hyperparameters) and defaults",
            lambda: Optimizer([{"params": [p]}, {"params": [nn.Parameter(p)], "weight_decay": 0}], sgd),
        ),
        (
            ValueError,
            "two parameters have the name 'a'; rename one",
            lambda: Optimizer([("a", p), ("a", nn.Parameter(torch.ones(2)))], sgd),
        ),
        (
            ValueError,
            "parameter 'a' is on the meta device; give it memory first (Module.to_empty), since its state is made now",
            lambda: Optimizer([("a", nn.Parameter(torch.ones(2, device="meta")))], sgd),
        ),
    ):
        refuses(kind, f"Optimizer: {message}", make)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        refuses(
            ValueError,
            "Optimizer: parameter '1' stands twice in group 0; leave one out",
            lambda: Optimizer([p, p], sgd),
        )
    refuses(
        ValueError,
        "some parameters appear in more than one parameter group",
        lambda: Optimizer([{"params": [p]}, {"params": [p]}], sgd),
    )
    refuses(ValueError, "optimizer got an empty parameter list", lambda: Optimizer([], sgd))
    refuses(
        ValueError,
        "Optimizer: group 0: scale_by_adam: b1 must be in [0, 1), got 1.5",
        lambda: Optimizer([p], adamw8bit, {**NUMBERS, "betas": (1.5, 0.9)}),
    )
    refuses(
        ValueError,
        "compile: rounding='stochastic' needs a key, an int or a 0-d int64 tensor",
        lambda: Optimizer([p], sgd, rounding="stochastic"),
    )


def test_a_parameter_that_has_moved():
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    before = numbers(model), state_of(optimizer)
    p = model[2].weight
    p.data = torch.zeros(5, 64)
    for q in model.parameters():
        q.grad = torch.ones_like(q)
    words = "when the optimizer was made, and is a tensor of shape {} on {} now; make the optimizer after the model is "
    refuses(
        ValueError,
        f"Optimizer.step: parameter '2.weight' was a tensor of shape (3, 64) on cpu {words.format((5, 64), 'cpu')}"
        "moved and sharded",
        optimizer.step,
    )
    torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(3, 64, device="meta")))
    refuses(
        ValueError,
        f"Optimizer.step: parameter '2.weight' was a tensor of shape (3, 64) on cpu {words.format((3, 64), 'meta')}"
        "moved and sharded",
        optimizer.step,
    )
    torch.utils.swap_tensors(p, nn.Parameter(before[0]["2.weight"]))
    assert same((numbers(model), state_of(optimizer)), before)
    optimizer.step()


def test_a_state_that_was_replaced():
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, optimizer, range(1))
    optimizer.state[model[1].weight]["0.nu.codes"] = optimizer.state[model[1].weight]["0.nu.codes"] + 1
    before = numbers(model)
    message = (
        "Optimizer.step: {} in the state of {} was replaced; use load_state_dict, which writes into the optimizer's "
        "own tensors"
    )
    refuses(ValueError, message.format("'0.nu.codes'", "'1.weight'"), optimizer.step)
    optimizer.state.clear()
    refuses(ValueError, message.format("'0.mu.codes'", "'0.weight'"), optimizer.step)
    assert same(numbers(model), before)


def test_a_state_that_was_copied():
    """As Lightning does, which moves the state to the device of the parameters. What is stepped is put back."""
    model, plain = model_of(), model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    for k in range(2):
        own = {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}
        for entries in optimizer.state.values():
            entries.update({key: value.clone() for key, value in entries.items()})
        train(model, optimizer, range(k, k + 1))
        for n, p in model.named_parameters():
            assert all(optimizer.state[p][key] is value for key, value in own[n].items())
    second = Optimizer(plain.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    train(plain, second, range(2))
    assert same(numbers(model), numbers(plain))
    assert same(state_of(optimizer), state_of(second))
