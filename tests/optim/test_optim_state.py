"""The state of fl.optim.Optimizer: complete from the start, saved, loaded and copied bit for bit."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import averaged, clone, delayed, run_pure, same
from optim_models import gradients, model_of, named, numbers, state_of, train
from tiers import slow_unless
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


def case_8() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "frozen": nn.Linear(5, 5), "unused": nn.Linear(5, 5)})
    model["frozen"].requires_grad_(False)
    return model


def case_8_loss(model: Any) -> Tensor:
    return model["used"](model["frozen"](torch.ones(2, 5))).square().sum()


def through(**options: bool) -> Callable[[Any, Any], Any]:
    """A look by way of torch.distributed.checkpoint, with these options."""
    return lambda model, optimizer: get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "sharded": through(),
    "flattened": through(flatten_optimizer_state_dict=True),
    "on the CPU": through(cpu_offload=True),
    "whole": through(full_state_dict=True),
}


@slow_unless(lambda name: name in list(LOOKS)[:2])
@pytest.mark.parametrize("name", LOOKS)
def test_case_8_looking_changes_nothing(name):
    """Before the first step, with gradients present, and after each step."""
    look = LOOKS[name]
    model = case_8()
    optimizer = Optimizer(model.named_parameters(), fl.adamw(0.1), backend="eager")
    look(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        case_8_loss(model).backward()
        look(model, optimizer)
        optimizer.step()
        look(model, optimizer)

    plain = case_8()
    tx = fl.adamw(0.1)
    params = named(plain)
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    for _ in range(3):
        plain.zero_grad()
        case_8_loss(plain).backward()
        params, state = step({n: p.grad for n, p in params.items()}, state, params)
    assert same(numbers(model), numbers(plain))
    assert not same(numbers(model), numbers(case_8()))
    for n, p in named(model).items():
        assert same(optimizer.state[p]["0.mu"], state[0].mu[n])
        assert same(optimizer.state[p]["0.nu"], state[0].nu[n])
        assert same(optimizer.state[p]["0.step"], torch.tensor(3))


def test_case_8_files_are_complete_before_the_first_step():
    model = case_8()
    optimizer = Optimizer(model.named_parameters(), fl.adamw(0.1))
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == set(named(model))
    assert all(set(x) == {"0.mu", "0.nu", "0.step", "schema"} for x in saved["state"].values())
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert {f"state.{n}.{key}" for n in named(model) for key in ("0.mu", "0.nu", "0.step", "schema")} <= set(flat)


def test_state_holds_the_tensors_that_are_stepped():
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    own = optimizer.state[model[0].weight]
    assert list(own) == ["0.mu.codes", "0.mu.scales", "0.nu.codes", "0.nu.scales", "0.step", "schema"]
    assert own["0.step"] is optimizer.state[model[2].bias]["0.step"]
    before = dict(own)
    train(model, optimizer, range(2))
    assert all(own[key] is before[key] for key in before)
    assert own["0.step"].item() == 2
    assert own["0.mu.codes"].any()
    assert all(optimizer.state_dict()["state"][0][key] is own[key] for key in own if key != "schema")


@pytest.mark.parametrize("names", [True, False])
def test_the_bits_of_the_plain_run(names):
    """One tree for all groups: the clip is by the norm of all gradients."""
    tx = fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(0.1, weight_decay=0.1))
    model, plain = model_of(), model_of()
    groups: list[Any] = [
        {"params": list(m.named_parameters(str(i)) if names else m.parameters())} for i, m in enumerate(model)
    ]
    optimizer = Optimizer(groups, tx, backend="eager")
    train(model, optimizer, range(3))
    params, state = run_pure(tx, numbers(plain), gradients(plain, range(3)))
    assert same(numbers(model), params)
    assert same(optimizer.state[model[1].weight]["1.0.mu.codes"], state[1][0].mu["1.weight"].codes)


SAVES: dict[str, Callable[[Any, Any, Any], None]] = {
    "load_state_dict": lambda model, optimizer, saved: optimizer.load_state_dict(saved),
    **{
        name: lambda model, optimizer, saved, options=options: set_optimizer_state_dict(
            model, optimizer, saved, options=StateDictOptions(**options)
        )
        for name, options in {
            "sharded": {},
            "flattened": {"flatten_optimizer_state_dict": True},
            "on the CPU": {"cpu_offload": True},
            "whole": {"full_state_dict": True},
        }.items()
    },
}

LOOKS["load_state_dict"] = LOOKS["state_dict"]


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("format", ["companded8", "dynamic4", "e4m3", "bfloat16", "float32"])
def test_a_resumed_run_goes_on_bit_for_bit(format, way):
    """bfloat16 parameters: torch's own loading would cast scales and moments to their dtype."""

    def fresh(seed: int) -> tuple[nn.Module, Any]:
        model = model_of(seed, torch.bfloat16)
        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01, format=format))
        return model, Optimizer(model.named_parameters(), tx, backend="eager")

    model, optimizer = fresh(0)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": LOOKS[way](model, optimizer)}, file)
    train(model, optimizer, range(3, 5))

    other, resumed = fresh(1)
    rests = [x for p in other.parameters() for x in resumed.state[p].values()]
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other.load_state_dict(loaded["model"])
    SAVES[way](other, resumed, loaded["optimizer"])
    assert all(
        x is y
        for x, y in zip(rests, [x for p in other.parameters() for x in resumed.state[p].values()], strict=True)
        if x.dtype != torch.uint8 or x.ndim != 1
    )
    train(other, resumed, range(3, 5))
    assert same(numbers(other), numbers(model))
    assert same(state_of(resumed), state_of(optimizer))


def test_loading_copies():
    """Two optimizers never write into one buffer."""
    model, other = model_of(), model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    second = Optimizer(other.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, optimizer, range(1))
    second.load_state_dict(optimizer.state_dict())
    wanted = state_of(optimizer)
    train(other, second, range(2))
    assert same(state_of(optimizer), wanted)


@pytest.mark.parametrize("format", ["dynamic4", "float32"])
def test_another_format_is_converted_on_request(format):
    """To what fl.load_state_dict makes of it; without convert it is refused (below)."""
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, optimizer, range(2))
    tx = fl.adamw8bit(0.1, format=format)
    other = Optimizer(model.named_parameters(), tx, backend="eager")
    other.load_state_dict(optimizer.state_dict(), convert=True)
    _, state = run_pure(fl.adamw8bit(0.1), numbers(model_of()), gradients(model, range(2)))
    wanted = fl.load_state_dict(tx.init(named(model)), fl.state_dict(state), convert=True)
    for n, p in named(model).items():
        for key in ("0.mu", "0.nu"):
            leaf = getattr(wanted[0], key[2:])[n]
            own = other.state[p]
            if isinstance(leaf, fl.QuantizedTensor):
                assert same((own[f"{key}.codes"], own[f"{key}.scales"]), (leaf.codes, leaf.scales))
            else:
                assert same(own[key], leaf)
    train(model, other, range(1))


def test_a_frozen_parameter_keeps_its_state():
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    train(model, optimizer, range(2))
    model[0].weight.requires_grad_(False)
    before = numbers(model), clone(optimizer.state[model[0].weight])
    train(model, optimizer, range(2, 3))  # with a .grad left on the frozen one
    assert same(model[0].weight.detach(), before[0]["0.weight"])
    for key, value in before[1].items():
        assert same(optimizer.state[model[0].weight][key], torch.tensor(3) if key == "0.step" else value)
    assert not same(model[1].weight.detach(), before[0]["1.weight"])

    saved = state_of(optimizer)
    other = model_of()
    second = Optimizer(other.named_parameters(), fl.adamw8bit(0.1), backend="eager")
    second.load_state_dict(saved)
    assert same(state_of(second), saved)
    # torch hands on no state of a frozen parameter; what the optimizer has stays, and the counters are the others'.
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        third = Optimizer(model.named_parameters(), fl.adamw8bit(0.1), backend="eager")
        loaded = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, third, loaded, options=options)
        assert same(clone(third.state[model[1].weight]), clone(optimizer.state[model[1].weight]))
        assert third.state[model[0].weight]["0.step"].item() == 3
        assert not third.state[model[0].weight]["0.mu.codes"].any()


class Counted(NamedTuple):
    """A state with a number, and a tensor that belongs to no parameter."""

    calls: int
    last: Tensor


def counted() -> fl.GradientTransformation:
    return fl.GradientTransformation(
        lambda params: Counted(0, torch.zeros(2)),
        lambda updates, state, params=None: (updates, Counted(state.calls + 1, state.last + 1)),
    )


def test_states_of_a_users_own():
    """New tensors at each step, a number, a tensor for all: what rests is shown, saved and loaded."""

    def fresh() -> tuple[Any, Any]:
        model = model_of()
        tx = fl.chain(delayed(), fl.low_bit(averaged()), counted(), fl.scale(-0.1))
        return model, Optimizer(model.named_parameters(), tx, backend="eager")

    model, optimizer = fresh()
    train(model, optimizer, range(3))
    own = optimizer.state[model[0].weight]
    assert set(own) == {"0.last", "0.before", "1.mean.codes", "1.mean.scales", "2.calls", "2.last", "schema"}
    assert own["2.calls"] == 3
    assert same(own["0.last"], gradients(model, range(2, 3))[0]["0.weight"])
    saved = state_of(optimizer)
    train(model, optimizer, range(3, 5))
    other, resumed = fresh()
    train(other, resumed, range(3))
    resumed.load_state_dict(saved)
    train(other, resumed, range(3, 5))
    assert same(numbers(other), numbers(model))
    assert same(state_of(resumed), state_of(optimizer))


def test_a_state_that_is_the_tree_itself():
    tx = fl.GradientTransformation(
        lambda params: fl.tree.zeros_like(params), lambda updates, state, params=None: (updates, updates)
    )
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.chain(tx, fl.scale(0.1)))
    assert set(optimizer.state[model[0].bias]) == {"0", "schema"}
    optimizer = Optimizer(model.named_parameters(), tx)
    assert set(optimizer.state[model[0].bias]) == {"state", "schema"}
    optimizer.load_state_dict(state_of(optimizer))


def test_two_optimizers_of_one_model():
    """Each takes its own part of what the helpers save together, flattened or not."""
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        pairs = []
        for steps in (2, 1):
            model = model_of()
            pair = (
                fl.optim.AdamW8bit(model[0].parameters(), backend="eager"),
                Optimizer(model[1].parameters(), fl.sgd8bit(0.1), backend="eager"),
            )
            for part, optimizer in zip(model, pair, strict=False):
                train(part, optimizer, range(steps))
            pairs.append((model, pair))
        (model, pair), (other, others) = pairs
        set_optimizer_state_dict(other, others, get_optimizer_state_dict(model, pair, options=options), options=options)
        for a, b in zip(pair, others, strict=True):
            assert same(state_of(a), state_of(b))


@pytest.mark.parametrize("way", SAVES)
def test_groups_in_formats_of_their_own_go_on(way):
    """A format for each moment, one that a group chose, a predicate, float32; and a group that was added later."""

    def fresh(seed: int) -> tuple[nn.Module, Any]:
        model = model_of(seed)
        first, second, third = (list(m.named_parameters(str(i))) for i, m in enumerate(model))
        groups: list[Any] = [
            {"params": first, "format": {"mu": "dynamic4", "nu": "bfloat16"}, "lr": 0.5},
            {"params": second, "format": fl.formats.e5m2, "where": lambda name, p: p.ndim > 1},
        ]
        optimizer = fl.optim.AdamW8bit(groups, lr=0.01, backend="eager")
        optimizer.add_param_group({"params": third, "format": "float32"})
        return model, optimizer

    model, optimizer = fresh(0)
    train(model, optimizer, range(2))
    optimizer.param_groups[2]["lr"] = 0.25
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": LOOKS[way](model, optimizer)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    train(model, optimizer, range(2, 4))
    other, resumed = fresh(1)
    other.load_state_dict(loaded["model"])
    SAVES[way](other, resumed, loaded["optimizer"])
    assert resumed.param_groups[2]["lr"] == 0.25
    assert callable(resumed.param_groups[1]["where"])
    train(other, resumed, range(2, 4))
    assert same(numbers(other), numbers(model))
    assert same(state_of(resumed), state_of(optimizer))


def test_a_file_in_another_format_is_converted():
    """The class's own formats stay, whatever the file's groups say."""
    model = model_of()
    optimizer = fl.optim.AdamW8bit(model.parameters(), backend="eager")
    train(model, optimizer, range(2))
    other = fl.optim.AdamW4bit(model.parameters(), min_size=64, backend="eager")
    other.load_state_dict(optimizer.state_dict(), convert=True)
    assert other.param_groups[0]["format"] == "root4"
    assert other.param_groups[0]["min_size"] == 64
    own, old = other.state[model[0].weight], optimizer.state[model[0].weight]
    assert own["0.mu.codes"].shape == (70, 32)
    assert same(own["0.step"], old["0.step"])
    train(model, other, range(2, 3))
