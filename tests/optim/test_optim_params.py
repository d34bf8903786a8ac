"""The parameters of fl.optim.Optimizer: wrong ones, moved ones, and groups that were changed by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import clone, refuses, same
from optim_models import NUMBERS, adamw8bit, function_of, model_of, named, numbers, state_of, train
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


# Other parameters before the first step.


def test_parameters_replaced_before_the_first_step():
    """As Accelerate does when it shards a model, position by position. The state is made anew, for them."""
    for look in (lambda o: None, lambda o: o.load_state_dict(o.state_dict()), lambda o: copy.deepcopy(o)):
        model, other = model_of(), model_of(1, torch.bfloat16)
        groups: list[Any] = [{"params": list(m.named_parameters(str(i)))} for i, m in enumerate(model)]
        optimizer = fl.optim.AdamW8bit(groups, lr=0.1, backend="eager")
        look(optimizer)
        for group, m in zip(optimizer.param_groups, other, strict=True):
            group["params"] = list(m.parameters())
        look(optimizer)
        train(other, optimizer, range(2))
        fresh = model_of(1, torch.bfloat16)
        plain = fl.optim.AdamW8bit(fresh.named_parameters(), lr=0.1, backend="eager")
        train(fresh, plain, range(2))
        assert same(numbers(other), numbers(fresh))
        assert set(optimizer.state) == set(other.parameters())
        for n, p in named(other).items():
            own = named(fresh)[n]
            assert same(clone(optimizer.state[p]), clone(plain.state[own]))
        optimizer.param_groups[0]["params"][0] = model[0].weight
        refuses(
            ValueError,
            "Optimizer.step: parameter '0.weight' was replaced in group 0, or taken out of it; make a new optimizer",
            optimizer.step,
        )


def test_what_is_loaded_is_not_given_up():
    """A state that was loaded belongs to the parameters that it was loaded for."""
    model, other = model_of(), model_of(1)
    source = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, source, range(1))
    optimizer = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    optimizer.load_state_dict(state_of(source))
    optimizer.param_groups[0]["params"] = list(other.parameters())
    refuses(
        ValueError,
        "Optimizer.step: parameter '0' was replaced in group 0, or taken out of it; make a new optimizer",
        optimizer.step,
    )


@pytest.mark.parametrize("way", ["other shapes", "one less", "integers", "meta"])
def test_parameters_replaced_by_others(way):
    """By such that are not those parameters: refused, and the old state is kept."""
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    before, own = state_of(optimizer), list(model.parameters())
    group = optimizer.param_groups[0]
    group["params"] = {
        "other shapes": lambda: [nn.Parameter(torch.ones(3)) for _ in own],
        "one less": lambda: [nn.Parameter(p.detach()) for p in own[1:]],
        "integers": lambda: [torch.ones(p.shape, dtype=torch.int64) for p in own],
        "meta": lambda: [nn.Parameter(p.detach().to("meta")) for p in own],
    }[way]()
    message = "Optimizer.step: parameter '0' was replaced in group 0, or taken out of it; make a new optimizer"
    if way == "integers":
        message = (
            "scale_by_adam.init: params['0'] must be float16, bfloat16, float32 or float64, got torch.int64; leave it "
            "out of the tree or mask it with fl.masked"
        )
    refuses(TypeError if way == "integers" else ValueError, message, optimizer.step)
    group["params"] = own
    assert same(state_of(optimizer), before)
    train(model, optimizer, range(1))


# Parameters that are the model's no longer.


def backward(model: Any) -> None:
    model(torch.ones(2, 64)).square().sum().backward()


def test_a_model_with_new_parameters_is_noticed_at_the_first_step():
    """load_state_dict(assign=True) leaves no mark on the old ones, as fully_shard does not."""
    model = model_of()
    optimizer = fl.optim.AdamW8bit(model.named_parameters(), backend="eager")
    model.load_state_dict(model_of(1).state_dict(), assign=True)
    backward(model)
    for _ in range(2):
        refuses(
            ValueError,
            "Optimizer.step: parameter '0.weight' has no gradient and is in no module, but a module has another one of "
            "its shape (70, 64), with a gradient; the model got new parameters after the optimizer was made (by "
            "fully_shard, parallelize_module, load_state_dict(assign=True)), so make the optimizer afterwards",
            optimizer.step,
        )


def test_parameters_of_another_optimizer_are_no_counterparts():
    """A tensor that no module ever held, not used at this step, beside a model of that shape with its own optimizer."""
    free, other = nn.Parameter(torch.ones(70, 64)), model_of()
    optimizer, its_own = fl.optim.AdamW8bit([free], backend="eager"), torch.optim.SGD(other.parameters())
    backward(other)
    optimizer.step()
    assert torch.equal(free, torch.ones(70, 64))
    del its_own


def test_steps_without_gradients_that_are_right():
    """Of a model that was not used yet, of unused and frozen parameters, and of tensors that are in no module."""
    used, unused = model_of(), model_of(1)
    backward(used)
    free = [nn.Parameter(p.detach().clone()) for p in used.parameters()]
    more = [*free, nn.Parameter(torch.ones(7, 7))]  # of a shape that no module has
    for params in (
        list(unused.parameters()),
        [*used[0].parameters(), *unused[1].parameters()],
        [*used.parameters(), *free],  # the gradients of these shapes are the optimizer's own
        more,
    ):
        before = clone(params)
        optimizer = fl.optim.AdamW8bit(params, backend="eager")
        optimizer.step()
        for p, old in zip(params, before, strict=True):
            assert same(p.detach(), old) == (p.grad is None)
