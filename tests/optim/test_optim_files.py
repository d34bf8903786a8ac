"""What fl.optim.Optimizer refuses to load: spoilt files, other parameters, other names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import clone, refuses, same
from optim_models import function_of, model_of, named, state_of, train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


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
        "the state of '0.weight' has no entry 'schema'; it must come from a functional_lowbit.optim.Optimizer, and "
        "another library's must be converted, by fl.convert",
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
        LOAD
        + "the state of '0.weight' has no entry 'schema'; it must come from a functional_lowbit.optim.Optimizer, and "
        "another library's must be converted, by fl.convert",
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
