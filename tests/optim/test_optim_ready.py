"""The ready classes: torch's steps by torch's names, in few bits."""

import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refuses, run_pure, run_step, same
from optim_models import EACH, gradients, model_of, named, numbers, optim, ready, state_of, train
from torch import Tensor, nn

import functional_lowbit as fl

# Against torch.optim.

DECAY = {"lr": 0.1, "weight_decay": 0.1}


MOMENTUM = {**DECAY, "momentum": 0.9}


TORCH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AdamW": ("AdamW8bit", "AdamW", {}),
    "AdamW, other numbers": ("AdamW4bit", "AdamW", {**DECAY, "betas": (0.8, 0.95), "eps": 1e-3}),
    "AdamW, uphill": ("AdamWFp8", "AdamW", {**DECAY, "maximize": True}),
    "Adam": ("Adam8bit", "Adam", {}),
    "Adam, L2": ("Adam4bit", "Adam", DECAY),
    "Adam, L2, uphill": ("AdamFp8", "Adam", {**DECAY, "maximize": True}),
    "SGD": ("SGD8bit", "SGD", {}),
    "SGD, L2": ("SGD8bit", "SGD", DECAY),
    "momentum": ("SGD8bit", "SGD", MOMENTUM),
    "momentum, uphill": ("SGD8bit", "SGD", {**MOMENTUM, "maximize": True}),
    "dampening": ("SGD8bit", "SGD", {**MOMENTUM, "dampening": 0.3}),
    "Nesterov": ("SGD8bit", "SGD", {**MOMENTUM, "nesterov": True}),
}


@pytest.mark.parametrize("case", TORCH)
def test_the_steps_of_torch(case):
    """In float32, 20 steps, within rounding.

    A parameter and a step are of the order of 1 (SGD: 20 steps of 0.1 gradient, with momentum ten times that), so each
    step rounds the parameter by 6e-8 of numbers below 16, and the step itself by some 1e-7 of it.
    """
    ours, theirs, options = TORCH[case]
    model, plain = model_of(), model_of()
    optimizer = ready(ours, model.parameters(), format="float32", **options)
    train(model, optimizer, range(20))
    train(plain, getattr(torch.optim, theirs)(plain.parameters(), **options), range(20))
    before = numbers(model_of())
    for n, p in named(model).items():
        assert (p - named(plain)[n]).abs().max() <= 2e-5
        assert (p - before[n]).abs().max() > 1e-3


def test_lion_by_hand():
    """Chen et al., Program 1, in float64; a sign is not rounded, and a momentum near 0 would be needed to turn one."""
    model = model_of()
    optimizer = ready("Lion8bit", model.parameters(), format="float32", lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    grads = gradients(model, range(20))
    expected = {n: p.double() for n, p in numbers(model).items()}
    m = {n: torch.zeros_like(p) for n, p in expected.items()}
    train(model, optimizer, range(20))
    for g in grads:
        for n, p in expected.items():
            update = torch.sign(0.8 * m[n] + 0.2 * g[n]) + 0.1 * p
            expected[n], m[n] = p - 0.01 * update, 0.9 * m[n] + 0.1 * g[n]
    for n, p in named(model).items():
        assert (p - expected[n]).abs().max() <= 2e-6


@EACH
def test_torchs_defaults(name):
    """Where torch has the class; Lion's are bitsandbytes'."""
    p = nn.Parameter(torch.zeros(2))
    group = ready(name, [p]).param_groups[0]
    if name == "Lion8bit":
        assert {k: group[k] for k in ("lr", "betas", "weight_decay")} == {
            "lr": 1e-4,
            "betas": (0.9, 0.99),
            "weight_decay": 0.0,
        }
        return
    theirs = getattr(torch.optim, name.rstrip("48bitFp"))([p]).param_groups[0]
    compared = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize"} & set(theirs)
    assert len(compared) >= 5
    assert {k: group[k] for k in compared} == {k: theirs[k] for k in compared}


# What rests.

RECIPES: dict[str, fl.GradientTransformation] = {
    "AdamW8bit": fl.adamw8bit(0.1, weight_decay=1e-2),
    "AdamW4bit": fl.adamw4bit(0.1, weight_decay=1e-2),
    "AdamWFp8": fl.adamwfp8(0.1, weight_decay=1e-2),
    "Adam8bit": fl.adam8bit(0.1),
    "Adam4bit": fl.adam4bit(0.1),
    "AdamFp8": fl.adamfp8(0.1),
    "Lion8bit": fl.lion8bit(0.1, weight_decay=0.0),
    "SGD8bit": fl.sgd8bit(0.1, 0.9),
}


@EACH
def test_the_bits_of_the_recipe(name):
    """The numbers of the functional run, and bfloat16 parameters; a state of few bits."""
    model, plain = model_of(0, torch.bfloat16), numbers(model_of(0, torch.bfloat16))
    options = {"momentum": 0.9} if name == "SGD8bit" else {}
    optimizer = ready(name, model.named_parameters(), lr=0.1, **options)
    train(model, optimizer, range(3))
    step = fl.compile(RECIPES[name], backend="eager")
    params, _ = run_step(step, plain, gradients(model, range(3)), RECIPES[name].init(plain))
    assert same(numbers(model), params)
    own = optimizer.state[model[0].weight]
    assert any(key.endswith(".codes") for key in own)
    assert not any(key.endswith(".codes") for key in optimizer.state[model[0].bias])  # 70 elements


@EACH
def test_a_saved_state_goes_on(name):
    """Also by pickle. The formats are the class's own, and not read from the file."""
    model = model_of()
    options = {"momentum": 0.9} if name == "SGD8bit" else {}
    optimizer = ready(name, model.named_parameters(), **options)
    train(model, optimizer, range(2))
    other = model_of()
    other.load_state_dict(model.state_dict())
    second = ready(name, other.named_parameters(), **options)
    second.load_state_dict(state_of(optimizer))
    assert same(state_of(pickle.loads(pickle.dumps(optimizer))), state_of(optimizer))
    for m, o in ((model, optimizer), (other, second)):
        train(m, o, range(2, 4))
    assert same(numbers(other), numbers(model))
    assert same(state_of(second), state_of(optimizer))
    assert str(optimizer).startswith(f"{name} (\nParameter Group 0\n")


def test_a_momentum_cannot_appear():
    """There is no buffer for it. torch makes one then."""
    model = model_of()
    optimizer = ready("SGD8bit", model.parameters())
    train(model, optimizer, range(1))
    before = numbers(model)
    optimizer.param_groups[0]["momentum"] = 0.9
    refuses(
        ValueError,
        "Optimizer.step: group 0: the transformation that the function makes must not change its structure with its "
        "hyperparameters, but Chain had 2 parts and has 3; make another one for that",
        optimizer.step,
    )
    assert same(numbers(model), before)
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()


# Groups with formats of their own.


def mixed(model: Any, **options: Any) -> Any:
    groups: list[Any] = [
        {"params": list(model[0].named_parameters("0")), "format": "dynamic4", "lr": 0.1},
        {"params": list(model[1].named_parameters("1")), "format": "float32", "weight_decay": 0},
        {"params": list(model[2].named_parameters("2")), "min_8bit_size": 64, "block_size": 32, "maximize": True},
    ]
    return optim.AdamW8bit(groups, 0.2, backend="eager", **options)


def test_each_group_has_its_own_format():
    model = model_of()
    optimizer = mixed(model)
    before, grads = numbers(model), gradients(model, range(3))
    train(model, optimizer, range(3))
    up = fl.chain(fl.scale(-1.0), fl.adamw(0.2, weight_decay=1e-2))
    for part, tx in (
        ("0", fl.adamw8bit(0.1, weight_decay=1e-2, format="dynamic4")),
        ("1", fl.adamw(0.2, weight_decay=0.0)),
        ("2", fl.low_bit(up, "companded8", block_size=32, min_size=64)),
    ):
        own = {n: p for n, p in before.items() if n[0] == part}
        wanted, _ = run_pure(tx, own, [{n: g[n] for n in own} for g in grads])
        assert same({n: numbers(model)[n] for n in own}, wanted)
    assert optimizer.state[model[0].weight]["0.mu.codes"].dtype == torch.uint8
    assert "0.mu" in optimizer.state[model[1].weight]
    assert optimizer.state[model[2].weight]["1.nu.scales"].shape == (3, 2)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(64, 64)))], "format": "e5m2"})
    assert [group["format"] for group in optimizer.param_groups] == ["dynamic4", "float32", "companded8", "e5m2"]


def test_where_is_for_all_groups_together():
    """A group in which it matches nothing rests in float32; one's own must match."""
    model = model_of()

    def is_weight(path: str, leaf: Tensor) -> bool | str:
        return "dynamic8" if path == "1.weight" else leaf.ndim > 1

    groups: list[Any] = [
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim > 1]},
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = ready("AdamW8bit", groups, where=is_weight)
    assert "0.mu.codes" in optimizer.state[model[2].weight]  # 192 elements
    assert optimizer.state[model[1].weight]["0.nu.codes"].dtype == torch.uint8
    assert "0.mu" in optimizer.state[model[1].bias]
    saved = state_of(optimizer)
    assert [group["where"] for group in saved["param_groups"]] == [None, None]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["where"] is is_weight
    refuses(
        ValueError,
        "AdamW8bit: where matched no leaf; it is called as where(path, leaf), path like 'a.0.weight'",
        lambda: ready("AdamW8bit", model.parameters(), where=lambda path, leaf: False),
    )
    groups[1]["where"] = is_weight
    refuses(
        ValueError,
        "low_bit: where matched no leaf; it is called as where(path, leaf), path like 'a.0.weight'",
        lambda: ready("AdamW8bit", groups),
    )


# Numbers.


@pytest.mark.parametrize("name", ["AdamW8bit", "SGD8bit"])
def test_numbers_change_without_compiling(name):
    """As tensors and as floats: native kernels, which are made once; the bits of a run with these numbers."""
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD8bit" else {}
    model, plain = model_of(), model_of()
    optimizer = getattr(optim, name)(model.parameters(), lr=torch.tensor(0.1), backend="native", **options)
    second = ready(name, plain.parameters(), lr=0.125, **options)
    graphs = None
    for k in range(4):
        optimizer.param_groups[0]["lr"].fill_(0.5**k)
        second.param_groups[0]["lr"] = 0.5**k
        for o, number in ((optimizer, torch.tensor), (second, float)):
            group = o.param_groups[0]
            group["weight_decay"] = number(0.25 * k)
            if "betas" in group:
                group["betas"] = (number(0.5 + 0.125 * k), number(0.75))
                group["eps"] = number(2.0 ** -(20 + k))
            else:
                group["momentum"] = number(0.5 + 0.125 * k)
        train(model, optimizer, range(k, k + 1))
        train(plain, second, range(k, k + 1))
        graphs = optimizer.graphs if graphs is None else graphs
        assert optimizer.graphs == graphs > 0
        assert same(numbers(model), numbers(plain))


@pytest.mark.parametrize("left_out", ["", "lr", "betas", "eps", "weight_decay"])
def test_numbers_that_change_are_read_as_torch_reads_them(left_out):
    """Tensors in the groups of ours, floats in torch's; one that is left out makes another training."""
    ours, theirs = model_of(), model_of()
    optimizer = ready("AdamW8bit", ours.parameters(), format="float32", weight_decay=0.1)
    plain = torch.optim.AdamW(theirs.parameters(), weight_decay=0.1)
    for k in range(4):
        values = {"lr": 0.125 / (k + 1), "betas": (0.5 + 0.125 * k, 0.75), "eps": 0.25 * k, "weight_decay": 0.5 * k}
        plain.param_groups[0].update(values)
        tensors = {n: tuple(map(torch.tensor, v)) if n == "betas" else torch.tensor(v) for n, v in values.items()}
        optimizer.param_groups[0].update({n: v for n, v in tensors.items() if n != left_out})
        train(ours, optimizer, range(k, k + 1))
        train(theirs, plain, range(k, k + 1))
    error = max((p - named(theirs)[n]).abs().max() for n, p in named(ours).items())
    assert error > 1e-3 if left_out else error <= 2e-6  # 4 steps of 0.1, of parameters below 2, rounded to 1.2e-7


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "lr": ("AdamW8bit", {"lr": -1.0}, "adamw: lr must be at least 0, got -1.0"),
    "lr, a tensor": ("SGD8bit", {"lr": torch.tensor(-1.0)}, "sgd: lr must be at least 0, got -1.0"),
    "betas": ("Lion8bit", {"betas": (0.9, 1.0)}, "scale_by_lion: b2 must be in [0, 1), got 1.0"),
    "eps": ("Adam8bit", {"eps": -1e-8}, "scale_by_adam: eps must be at least 0, got -1e-08"),
    "decay": ("Adam4bit", {"weight_decay": -1}, "add_decayed_weights: weight_decay must be at least 0, got -1.0"),
    "momentum": ("SGD8bit", {"momentum": -0.5}, "sgd: momentum must be at least 0, got -0.5"),
    "Nesterov": (
        "SGD8bit",
        {"nesterov": True},
        "sgd: nesterov=True needs momentum > 0 and dampening = 0, got 0.0 and 0.0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers(case):
    name, options, message = WRONG[case]
    p = nn.Parameter(torch.zeros(2))
    refuses(ValueError, f"Optimizer: group 0: {message}", lambda: ready(name, [p], **options))


def test_nesterov_is_no_number():
    text = "Optimizer: group 0: sgd: nesterov must be a bool, got 'yes'"
    refuses(TypeError, text, lambda: ready("SGD8bit", [nn.Parameter(torch.zeros(2))], nesterov="yes"))


def test_numbers_of_numpy_and_whole_ones():
    """They are numbers as any others, and may change."""
    model, plain = model_of(), model_of()
    optimizer = ready("AdamW8bit", model.parameters(), lr=np.float32(0.5), betas=[0, 0.5], weight_decay=0)
    optimizer.param_groups[0].update(lr=np.float64(0.25), weight_decay=1, betas=(0.5, 0))
    second = ready("AdamW8bit", plain.parameters(), lr=0.25, betas=(0.5, 0.0), weight_decay=1.0)
    train(model, optimizer, range(1))
    train(plain, second, range(1))
    assert same(numbers(model), numbers(plain))


# What is shown.


@EACH
def test_signatures(name):
    """Every argument with the class's own default, as the object has it; a subclass shows its own."""
    signature = inspect.signature(getattr(optim, name))
    own = ready(name, [nn.Parameter(torch.zeros(2))])
    parameters = signature.parameters
    assert list(parameters)[:2] == ["params", "lr"]
    for key in ("format", "block_size", "min_size", "where", "maximize", "lr", "weight_decay"):
        assert parameters[key].default == own.param_groups[0][key]
    for key in ("format", "amsgrad", "bf16_stochastic_round", "is_paged"):
        assert parameters[key].kind is inspect.Parameter.KEYWORD_ONLY
    assert inspect.getdoc(getattr(optim, name))

    class Mine(getattr(optim, name)):
        def __init__(self, params: Any, rate: float):
            super().__init__(params, lr=rate)

    assert list(inspect.signature(Mine).parameters) == ["params", "rate"]
