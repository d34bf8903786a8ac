"""The state of groups: in a dict, in files, in a torch optimizer."""

from pathlib import Path

import pytest
from groups import by_path, make_grads, make_params, recipes, transforms
from helpers import clone, run_pure, same
from torch import nn

import functional_lowbit as fl

STATES = {
    "partition": lambda: fl.partition(transforms(), by_path),
    "partition in few bits": lambda: fl.low_bit(fl.partition(recipes(), by_path), "root4"),
    "named_chain": lambda: fl.named_chain(("clip", fl.clip(1.0)), ("adam", fl.scale_by_adam()), ("lr", fl.scale(-0.1))),
}


@pytest.mark.parametrize("name", STATES)
def test_state_through_a_dict_and_through_files(name, tmp_path: Path):
    tx, params = STATES[name](), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    params, state = run_pure(tx, params, grads[:1])
    saved = clone(fl.state_dict(state))
    fl.checkpoint.save(tmp_path / "saved", state)
    for loaded in (fl.load_state_dict(tx.init(params), saved), fl.checkpoint.load(tmp_path / "saved", tx.init(params))):
        assert same(loaded, state)
        assert same(run_pure(tx, params, grads[1:], loaded), wanted)


def test_a_named_state():
    tx = STATES["named_chain"]()
    state = tx.init(make_params())
    assert list(state) == ["clip", "adam", "lr"]
    assert state["adam"].step == 0
    assert [row.path for row in fl.describe(state).rows][:2] == ["adam.step", "adam.mu.embed"]
    assert fl.named_chain().init(make_params()) == {}


@pytest.mark.parametrize("labels", ["of their own", "the parameters' names", "names, crossed"])
def test_as_a_torch_optimizer(labels):
    model = nn.Linear(64, 65)
    names = {"of their own": "ab", "the parameters' names": ("weight", "bias"), "names, crossed": ("bias", "weight")}
    matrix, vector = names[labels]
    tx = fl.partition(
        {matrix: fl.adamw8bit(1e-2), vector: fl.sgd(0.1, 0.9)},
        lambda path, leaf: matrix if path == "weight" else vector,
    )
    params = clone(dict(model.named_parameters()))
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    for g in grads[:2]:
        model.weight.grad, model.bias.grad = g["weight"], g["bias"]
        optimizer.step()
    path = "inner_states.{}.inner_state.0.{}".format
    shared = {path(matrix, "step"), path(vector, "step"), "schema"}
    own = {path(matrix, f"{m}.{part}") for m in ("mu", "nu") for part in ("codes", "scales")}
    assert set(optimizer.state[model.weight]) == own | shared
    assert set(optimizer.state[model.bias]) == {path(vector, "trace")} | shared
    again = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    again.load_state_dict(optimizer.state_dict())
    model.weight.grad, model.bias.grad = grads[2]["weight"], grads[2]["bias"]
    again.step()
    assert same(dict(model.named_parameters()), wanted[0])


def _scaled(weight, bias):
    return fl.chain(fl.trace(weight), fl.scale(-bias))


@pytest.mark.parametrize(
    ("tx", "own", "shared"),
    [
        (fl.named_chain(("bias", fl.clip(1.0)), ("weight", fl.adam(0.1))), {"weight.0.mu", "weight.0.nu"}, "weight.0"),
        (
            fl.inject_hyperparams(_scaled)(weight=0.5, bias=0.1),
            {"inner_state.0.trace"},
            "hyperparams.weight hyperparams.bias inner_state.0",
        ),
    ],
    ids=["named_chain", "inject_hyperparams"],
)
def test_names_of_parts_and_hyperparameters_may_be_those_of_parameters(tx, own, shared):
    model = nn.Linear(4, 5)
    optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    for p in model.parameters():
        found = set(optimizer.state[p])
        assert {k for k in found if optimizer.state[p][k].shape == p.shape and k != "schema"} == own
        assert {k.removesuffix(".step") for k in found - own - {"schema", "step"}} == set(shared.split())
