"""fl.optim.Optimizer: complete from the start, the plain run's bits, and torch's own helpers leave it whole."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import averaged, clone, delayed, random_like, refuses, run_pure, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer
NUMBERS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def adamw8bit(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> fl.GradientTransformation:
    """torch's names, for the form with defaults."""
    return fl.adamw8bit(lr, *betas, eps, weight_decay=weight_decay)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Stored leaves and small ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 64), nn.Linear(64, 3)).to(dtype)


def named(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, plain and copied."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module, seeds: range) -> list[dict[str, Tensor]]:
    return [random_like(numbers(model), seed) for seed in seeds]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for grads in gradients(model, seeds):
        for n, p in model.named_parameters():
            p.grad = grads[n]
        optimizer.step()


def state_of(optimizer: Any) -> Any:
    return clone(optimizer.state_dict())


# Case 8.


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


# State, names, files.


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


# What is refused.


def eight_bits(**options: Any) -> Any:
    model = model_of()
    return Optimizer(model.named_parameters(), fl.adamw8bit(0.1, **options), backend="eager")


def refused(change: Callable[[Any], Any]) -> str:
    """The text with which a changed file is refused. Nothing is written."""
    source, optimizer = eight_bits(), eight_bits()
    params = source.param_groups[0]["params"]
    for p in params:
        p.grad = torch.ones_like(p)
    source.step()
    saved = change(state_of(source))
    before = state_of(optimizer)
    with pytest.raises(ValueError, match=r"^Optimizer\.load_state_dict: ") as caught:
        optimizer.load_state_dict(saved)
    assert same(state_of(optimizer), before)
    return str(caught.value)


def put(i: int, key: str, value: Any) -> Callable[[Any], Any]:
    def change(saved: Any) -> Any:
        saved["state"][i][key] = value(saved["state"][i][key]) if callable(value) else value
        return saved

    return change


def drop(*keys: Any) -> Callable[[Any], Any]:
    def change(saved: Any) -> Any:
        inner = saved["state"]
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return saved

    return change


LOAD = "Optimizer.load_state_dict: "
FILES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no state": (
        drop(2),
        "state_dict has no state of '1.weight'; save it with the optimizer that has this parameter",
    ),
    "no schema": (
        drop(0, "schema"),
        "the state of '0.weight' has no entry 'schema'; it must come from a functional_lowbit.optim.Optimizer",
    ),
    "another schema": (
        put(0, "schema", "{}"),
        "the state of '0.weight' has an entry 'schema' that must be uint8 of one dimension, got str",
    ),
    "a schema of floats": (
        put(0, "schema", torch.ones(3)),
        "the state of '0.weight' has an entry 'schema' that must be uint8 of one dimension, got torch.float32 of shape "
        "(3,)",
    ),
    "two counts": (
        put(3, "0.step", torch.tensor(7)),
        "'0.step' is 1 for '0.weight' and 7 for '1.bias', but one step updates both; load into an optimizer with the "
        "groups of the saved one",
    ),
    "no entry state": (
        lambda saved: {"param_groups": saved["param_groups"]},
        "state_dict has no entry 'state'; it must come from Optimizer.state_dict",
    ),
    "no groups": (
        lambda saved: {"state": saved["state"]},
        "state_dict has no entry 'param_groups'; it must come from Optimizer.state_dict",
    ),
    "a group without params": (
        lambda saved: {**saved, "param_groups": [{}]},
        "group 0 of state_dict has no entry 'params'; it must come from Optimizer.state_dict",
    ),
    "a state that is none": (
        lambda saved: {**saved, "state": None},
        "entry 'state' of state_dict must be a dict, got NoneType; it must come from Optimizer.state_dict",
    ),
    "groups that are none": (
        lambda saved: {**saved, "param_groups": None},
        "entry 'param_groups' of state_dict must be a list, got NoneType; it must come from Optimizer.state_dict",
    ),
    "a group that is none": (
        lambda saved: {**saved, "param_groups": [1]},
        "group 0 of state_dict must be a dict, got int; it must come from Optimizer.state_dict",
    ),
    "a number that nothing reads": (
        lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.1}]},
        "group 0 has 'lr', which a transformation does not read; give a function tx(**hyperparameters) and defaults",
    ),
    "an unknown parameter": (
        lambda saved: {**saved, "state": {**saved["state"], 9: saved["state"][0]}},
        "state_dict has state of 9, which is in no group",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_spoilt_file(name):
    change, message = FILES[name]
    assert refused(change) == LOAD + message


PARTS: dict[str, Callable[[Any], Any]] = {
    "an entry less": drop(2, "0.mu.codes"),
    "another dtype": put(2, "0.mu.scales", lambda x: x.bfloat16()),
    "another shape": put(2, "0.nu.codes", lambda x: x[:3]),
    "no tensor": put(2, "0.step", {}),
    "the schema of another format": put(
        2, "schema", lambda _: eight_bits(format="dynamic8").state_dict()["state"][2]["schema"]
    ),
    "the schema of other blocks": put(
        2, "schema", lambda _: eight_bits(block_size=35).state_dict()["state"][2]["schema"]
    ),
    "the schema of another parameter": put(2, "schema", lambda _: eight_bits().state_dict()["state"][4]["schema"]),
    "a damaged schema": put(2, "schema", lambda x: x[:40]),
    "no text": put(2, "schema", torch.full((3,), 255, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_spoilt_part_is_refused_in_the_words_of_load_state_dict(name):
    """With the parameter's name in front; the words have their own tests."""
    change = PARTS[name]
    source = eight_bits()
    entries = change(state_of(source))["state"][2]
    p = source.param_groups[0]["params"][2]
    own = {
        "0.mu": fl.quantize(torch.zeros_like(p), "companded8"),
        "0.nu": fl.quantize(torch.zeros_like(p), "companded8", signed=False),
        "0.step": torch.tensor(1),
    }
    with pytest.raises(ValueError, match=r".") as caught:
        fl.load_state_dict(own, {**entries, "schema": bytes(entries["schema"].tolist()).decode(errors="replace")})
    words = str(caught.value).removeprefix("load_state_dict: ")
    assert words
    assert refused(change) == f"{LOAD}the state of '1.weight': {words}"


def test_torchs_own_file():
    model = model_of()
    foreign = torch.optim.AdamW(model.named_parameters())
    train(model, foreign, range(1))
    optimizer = Optimizer(model.named_parameters(), fl.adamw(0.1), backend="eager")
    refuses(
        ValueError,
        LOAD + "the state of '0.weight' has no entry 'schema'; it must come from a functional_lowbit.optim.Optimizer",
        lambda: optimizer.load_state_dict(foreign.state_dict()),
    )
    refuses(
        ValueError,
        "loaded state dict has a different number of parameter groups",
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    )


def test_no_dict():
    message = LOAD + "state_dict must be a dict, got list"
    refuses(TypeError, message, lambda: eight_bits().load_state_dict([]))


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
            "tx(**hyperparameters) must return a GradientTransformation, got int",
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
    optimizer.state[model[1].weight]["0.nu.codes"] = optimizer.state[model[1].weight]["0.nu.codes"].clone()
    before = numbers(model)
    message = (
        "Optimizer.step: {} in the state of {} was replaced; use load_state_dict, which writes into the optimizer's "
        "own tensors"
    )
    refuses(ValueError, message.format("'0.nu.codes'", "'1.weight'"), optimizer.step)
    optimizer.state.clear()
    refuses(ValueError, message.format("'0.mu.codes'", "'0.weight'"), optimizer.step)
    assert same(numbers(model), before)


# Hyperparameters in the groups.


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


def test_the_steps_of_torchs_adamw():
    """The default hyperparameters, float32, as torch.optim.AdamW rounds."""
    model, plain = model_of(), model_of()
    optimizer = Optimizer(
        model.parameters(),
        lambda lr, betas, eps, weight_decay: fl.adamw(lr, *betas, eps, weight_decay=weight_decay),
        NUMBERS,
        backend="eager",
    )
    train(model, optimizer, range(5))
    train(plain, torch.optim.AdamW(plain.parameters(), **NUMBERS), range(5))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() <= 5 * 1e-6  # a step of 0.1 is off by units in the last place of numbers below 4


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


def test_a_default_that_is_a_tensor():
    """The function is given the group's tensor, whose methods it may need."""
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


# The rest of torch.optim's behaviour.


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


def test_closure_hooks_and_no_gradients():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw(1e-4), backend="eager")
    before = numbers(model), state_of(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert optimizer.step() is None  # no gradients: nothing happens, as in torch
    assert same((numbers(model), state_of(optimizer)), before)

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0]
    assert calls == ["before", "after", *["before", "closure", "after"] * 2]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_hooks_of_state_dicts_see_what_is_saved():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved["state"][0].update(mine=1) or saved)
    assert optimizer.state_dict()["state"][0].pop("mine") == 1
    assert "mine" not in optimizer.state[model[0].weight]
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["state"][0].pop("mine") and None)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[:-1] == [set(optimizer.state[model[0].weight])] * 3
    assert seen[-1] == "loaded"


def test_grad_scaler():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.sgd(0.5), backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = numbers(model)
    scaler.scale(model[2].bias.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(model[2].bias.detach(), before["2.bias"] - 0.5)
    scaler.scale(model[2].bias.sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert same(model[2].bias.detach(), before["2.bias"] - 0.5)


def function_of(lr: Any) -> fl.GradientTransformation:
    return fl.adamw8bit(lr)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("form", ["tx", "function"])
def test_a_copy_goes_on_by_itself(copied, form):
    tx, defaults = (fl.adamw8bit(0.1), None) if form == "tx" else (function_of, {"lr": 0.1})
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), tx, defaults, backend="eager")
    train(model, optimizer, range(2))
    other, second = copied((model, optimizer))
    if defaults:
        for o in (optimizer, second):
            o.param_groups[0]["lr"] = 0.2
    train(other, second, range(2, 4))
    assert not same(numbers(other), numbers(model))
    train(model, optimizer, range(2, 4))
    assert same(numbers(other), numbers(model))
    assert same(state_of(second), state_of(optimizer))


class AdamW8bit(Optimizer):
    """A ready class, as a user would write it: torch's names and defaults."""

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: Any = 1e-8, weight_decay: Any = 1e-2
    ):
        super().__init__(
            params, adamw8bit, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, backend="eager"
        )


def test_a_ready_class():
    model = model_of()
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    params, _ = run_pure(fl.adamw8bit(0.1, weight_decay=1e-2), numbers(model_of()), gradients(model, range(2)))
    assert same(numbers(model), params)
    assert str(optimizer).startswith("AdamW8bit (\nParameter Group 0\n    betas: (0.9, 0.999)\n    eps: 1e-08\n")
    assert same(state_of(pickle.loads(pickle.dumps(optimizer))), state_of(optimizer))


def test_two_optimizers_of_one_model():
    """Each takes its own part of what the helpers save together, flattened or not."""
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        pairs = []
        for steps in (2, 1):
            model = model_of()
            pair = (
                AdamW8bit(model[0].parameters()),
                Optimizer(model[1].parameters(), fl.sgd8bit(0.1), backend="eager"),
            )
            for part, optimizer in zip(model, pair, strict=False):
                train(part, optimizer, range(steps))
            pairs.append((model, pair))
        (model, pair), (other, others) = pairs
        set_optimizer_state_dict(other, others, get_optimizer_state_dict(model, pair, options=options), options=options)
        for a, b in zip(pair, others, strict=True):
            assert same(state_of(a), state_of(b))


BY_NAME = (
    "use set_optimizer_state_dict, which goes by name, or delete 'param_names' from the groups of state_dict to load "
    "by position"
)


@pytest.mark.parametrize("form", ["tx", "function"])
def test_parameters_in_another_order(form):
    """Of one shape, so that nothing else would tell. The helpers go by name."""

    def fresh(turned: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        pairs = list(model.named_parameters())
        tx, defaults = (fl.adamw8bit(0.1), None) if form == "tx" else (function_of, {"lr": 0.1})
        return model, Optimizer(pairs[::-1] if turned else pairs, tx, defaults, backend="eager")

    model, optimizer = fresh(False)
    train(model, optimizer, range(2))
    other, turned = fresh(True)
    before = state_of(turned)
    refuses(
        ValueError,
        f"{LOAD}parameter 0 of group 0 is '1.bias', but '0.weight' in state_dict; {BY_NAME}",
        lambda: turned.load_state_dict(optimizer.state_dict()),
    )
    assert same(state_of(turned), before)
    for options in (
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ):
        other, turned = fresh(True)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(other, turned, saved, options=options)
        assert turned.param_groups[0]["param_names"][0] == "1.bias"
        for n, p in model.named_parameters():
            assert same(clone(turned.state[named(other)[n]]), clone(optimizer.state[p]))


def test_names_stay_those_of_the_optimizer():
    """They are the paths that tx sees: where, masks, noise."""
    model = model_of()
    optimizer = Optimizer(model.named_parameters(), fl.adamw8bit(0.1))
    other = Optimizer(model.named_parameters("other"), fl.adamw8bit(0.1))
    unnamed = Optimizer(model.parameters(), fl.adamw8bit(0.1))
    unnamed.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    refuses(
        ValueError,
        f"{LOAD}parameter 0 of group 0 is 'other.0.weight', but '0.weight' in state_dict; {BY_NAME}",
        lambda: other.load_state_dict(saved),
    )
    del saved["param_groups"][0]["param_names"]
    other.load_state_dict(saved)
    assert other.param_groups[0]["param_names"][0] == "other.0.weight"
    assert "param_names" not in unnamed.param_groups[0]


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


def test_rounding_goes_to_compile():
    model, plain = model_of(0, torch.bfloat16), model_of(0, torch.bfloat16)
    tx = fl.sgd(1e-3, momentum=0.9)
    optimizer = Optimizer(model.named_parameters(), tx, rounding="stochastic", key=7, backend="eager")
    train(model, optimizer, range(2))
    params = named(plain)
    state, step = tx.init(params), fl.compile(tx, rounding="stochastic", key=7, backend="eager")
    for grads in gradients(plain, range(2)):
        params, state = step(grads, state, params)
    assert same(numbers(model), numbers(plain))
