"""state_dict and load_state_dict: saving changes nothing, nothing is half-loaded, each mismatch has its words."""

import io
import json
from typing import Any

import pytest
import torch
from helpers import clone, leaves, random_like, refuses, run_pure, run_step, same
from torch import nn

import functional_lowbit as fl


def _params() -> dict[str, Any]:
    return random_like({"w": torch.empty(64, 64), "b": torch.empty(3)}, 0)


def _after_two_steps(tx: fl.GradientTransformation) -> Any:
    return run_pure(tx, _params(), [random_like(_params(), t) for t in (1, 2)])[1]


def test_names():
    tx = fl.apply_if_finite(fl.chain(fl.masked(fl.adam8bit(0.1), {"w": True, "b": False}), fl.trace(0.9)))
    saved = fl.state_dict(tx.init(_params()))
    assert sorted(saved) == sorted(
        [
            "notfinite_count",
            "last_finite",
            "total_notfinite",
            "inner_state.0.inner_state.0.step",
            "inner_state.0.inner_state.0.mu.w.codes",
            "inner_state.0.inner_state.0.mu.w.scales",
            "inner_state.0.inner_state.0.nu.w.codes",
            "inner_state.0.inner_state.0.nu.w.scales",
            "inner_state.1.step",
            "inner_state.1.trace.w",
            "inner_state.1.trace.b",
            "schema",
        ]
    )


def test_the_schema():
    document = json.loads(fl.state_dict(fl.sgd8bit(0.1).init(_params()))["schema"])
    assert document == {
        "version": 1,
        "leaves": {
            "0.step": {"kind": "tensor", "dtype": "int64", "shape": []},
            "0.trace.b": {"kind": "tensor", "dtype": "float32", "shape": [3]},
            "0.trace.w": {
                "kind": "quantized",
                "format": "companded8",
                "signed": True,
                "block_size": 256,
                "shape": [64, 64],
            },
        },
    }


@pytest.mark.parametrize("format", fl.formats.names())
def test_saving_is_inert_and_complete(format):
    """Case 8: looking at a state before the first step, or with gradients present, changes nothing."""
    torch.manual_seed(0)
    model = nn.Linear(70, 70)
    model.bias.requires_grad_(False)
    params = dict(model.named_parameters())
    tx = fl.adamw8bit(0.1, format=format)
    state = tx.init(params)
    model(torch.ones(2, 70)).sum().backward()
    before = clone((state, params, model.weight.grad))
    saved = fl.state_dict(state)
    assert same((state, params, model.weight.grad), before)
    assert sum(x.numel() for x in saved.values() if isinstance(x, torch.Tensor)) == sum(
        x.numel() for x in leaves(state)
    )
    assert all(x is y for x, y in zip(leaves(fl.load_state_dict(state, saved)), leaves(state), strict=True))


@pytest.mark.parametrize("format", fl.formats.names())
def test_a_loaded_state_continues_bit_equal_in_a_compiled_step(format):
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01, format=format))
    grads = [random_like(_params(), t) for t in range(6)]
    step = fl.compile(tx, backend="eager")
    wanted = run_step(step, _params(), grads, tx.init(_params()))
    params, state = run_step(step, _params(), grads[:3], tx.init(_params()))
    file = io.BytesIO()
    torch.save({"params": params, "state": fl.state_dict(state)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    params, state = loaded["params"], fl.load_state_dict(tx.init(_params()), loaded["state"])
    assert same(run_step(fl.compile(tx, backend="eager"), params, grads[3:], state), wanted)


def test_loading_does_not_cast_to_the_params_dtype():
    saved = fl.state_dict(_after_two_steps(fl.adam(0.1)))
    half = fl.tree.cast(_params(), torch.bfloat16)
    loaded = fl.load_state_dict(fl.adam(0.1).init(half), saved)
    assert loaded[0].mu["w"].dtype == torch.float32
    assert torch.equal(loaded[0].mu["w"], saved["0.mu.w"])


def _without(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in saved.items() if k != name}


MISMATCHES = {
    "no schema": (
        lambda s: _without(s, "schema"),
        "saved has no entry 'schema'; it must come from functional_lowbit.state_dict",
    ),
    "another version": (
        lambda s: {**s, "schema": json.dumps({"version": 9})},
        "the schema's version must be 1, got 9",
    ),
    "an entry less": (lambda s: _without(s, "0.mu.w.scales"), "saved has no entry '0.mu.w.scales'"),
    "another dtype": (
        lambda s: {**s, "0.mu.b": s["0.mu.b"].bfloat16()},
        "'0.mu.b' must have dtype torch.float32, got torch.bfloat16",
    ),
    "another shape": (
        lambda s: {**s, "0.nu.w.codes": s["0.nu.w.codes"][:3]},
        "'0.nu.w.codes' must have shape (64, 64), got (3, 64)",
    ),
    "no tensor": (lambda s: {**s, "0.step": 2}, "'0.step' must be a tensor, got int"),
}
OTHER_STATES = {
    "another format": (
        lambda: fl.adam8bit(0.1, format="dynamic8"),
        "leaf '0.mu.w' was saved with format 'dynamic8', but the state has 'companded8'",
    ),
    "another block size": (
        lambda: fl.adam8bit(0.1, block_size=64),
        "leaf '0.mu.w' was saved with block_size 64, but the state has 256",
    ),
    "no format": (lambda: fl.adam(0.1), "leaf '0.mu.w' was saved with kind 'tensor', but the state has 'quantized'"),
    "a field less": (lambda: fl.lion8bit(0.1), "saved has no leaf '0.nu.b', which the state has"),
    "a leaf more": (
        lambda: fl.chain(fl.scale_by_adam(), fl.trace(0.9)),
        "saved has a leaf '1.step', which the state has not",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_spoilt_file(name):
    change, message = MISMATCHES[name]
    state = fl.adam8bit(0.1).init(_params())
    saved = change(fl.state_dict(_after_two_steps(fl.adam8bit(0.1))))
    before = clone((state, [x for x in saved.values() if isinstance(x, torch.Tensor)]))
    refuses(ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(state, saved))
    assert same((state, [x for x in saved.values() if isinstance(x, torch.Tensor)]), before)


@pytest.mark.parametrize("name", OTHER_STATES)
def test_the_file_of_another_state(name):
    make, message = OTHER_STATES[name]
    state = fl.adam8bit(0.1).init(_params())
    saved = fl.state_dict(_after_two_steps(make()))
    before = clone(state)
    refuses(ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(state, saved))
    assert same(state, before)


def test_the_file_of_another_model():
    saved = fl.state_dict(fl.adam(0.1).init({**_params(), "b": torch.ones(4)}))
    refuses(
        ValueError,
        "load_state_dict: leaf '0.mu.b' was saved with shape [4], but the state has [3]",
        lambda: fl.load_state_dict(fl.adam(0.1).init(_params()), saved),
    )


def test_two_leaves_of_one_name():
    state = fl.trace(0.9).init({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    refuses(ValueError, "state_dict: two leaves have the path 'trace.a.b'; rename one", lambda: fl.state_dict(state))
    state = {"w.codes": torch.ones(1), "w": fl.quantize(torch.ones(2, 3), "companded8")}
    refuses(ValueError, "state_dict: two leaves have the path 'w.codes'; rename one", lambda: fl.state_dict(state))


def test_a_leaf_that_cannot_be_saved():
    message = "state_dict: leaf 'x' must be a tensor, a bool, a number or a string, got object"
    refuses(TypeError, message, lambda: fl.state_dict({"x": object()}))


def test_numbers_and_strings_in_a_users_state():
    state = {"step": 3, "rate": 0.5, "on": True, "name": "a", "none": None, "t": torch.ones(2)}
    loaded = fl.load_state_dict({**state, "step": 0, "t": torch.zeros(2)}, fl.state_dict(state))
    assert loaded == {**state, "t": loaded["t"]}
    assert torch.equal(loaded["t"], torch.ones(2))
