"""load_state_dict: nothing is half-loaded, and each mismatch has its words."""

import json
from typing import Any

import pytest
import torch
from checkpoint_states import after_two_steps, make_params
from helpers import clone, refuses, same

import functional_lowbit as fl


def _without(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in saved.items() if k != name}


def _document(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**saved, "schema": json.dumps({**json.loads(saved["schema"]), **changes})}


def _leaf(saved: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    leaves = json.loads(saved["schema"])["leaves"]
    return _document(saved, leaves={**leaves, path: {**leaves[path], **changes}})


MISMATCHES = {
    "no schema": (
        lambda s: _without(s, "schema"),
        "saved has no entry 'schema'; it must come from functional_lowbit.state_dict",
    ),
    "schema of another type": (
        lambda s: {**s, "schema": {"version": 3}},
        "the entry 'schema' must be a string, got dict",
    ),
    "no JSON": (
        lambda s: {**s, "schema": s["schema"][:30]},
        "the entry 'schema' is no JSON: Expecting ':' delimiter: line 1 column 31 (char 30); the file is damaged",
    ),
    "no version": (
        lambda s: {**s, "schema": "[]"},
        "the schema must have a version, got None; the file is damaged",
    ),
    "a newer version": (
        lambda s: _document(s, version=9, library="3.1.0"),
        f"the schema has version 9, written by functional_lowbit 3.1.0; functional_lowbit {fl.__version__} reads "
        "version 3; use the newer library",
    ),
    "no leaves": (
        lambda s: _document(s, leaves=3),
        "the schema must have leaves, got int; the file is damaged",
    ),
    "half a leaf": (
        lambda s: _document(s, leaves={"0.step": {"kind": "tensor", "shape": []}}),
        "the schema's leaf '0.step' must have 'stored'; the file is damaged",
    ),
    "a leaf that is none": (
        lambda s: _document(s, leaves={"0.step": 3}),
        "the schema's leaf '0.step' must be a dict, got 3; the file is damaged",
    ),
    "a kind that is none": (
        lambda s: _leaf(s, "0.step", kind=[]),
        "the schema's leaf '0.step' must have a string as 'kind', got []; the file is damaged",
    ),
    "no format": (
        lambda s: _leaf(s, "0.mu.w", format=None),
        "the schema's leaf '0.mu.w' must have a string as 'format', got None; the file is damaged",
    ),
    "no sign": (
        lambda s: _leaf(s, "0.mu.w", signed="yes"),
        "the schema's leaf '0.mu.w' must have a bool as 'signed', got 'yes'; the file is damaged",
    ),
    "blocks of nothing": (
        lambda s: _leaf(s, "0.mu.w", block_size=0),
        "the schema's leaf '0.mu.w' must have a whole number of at least 1 as 'block_size', got 0; the file is damaged",
    ),
    "a negative size": (
        lambda s: _leaf(s, "0.mu.w", shape=[64, -64]),
        "the schema's leaf '0.mu.w' must have a list of sizes as 'shape', got [64, -64]; the file is damaged",
    ),
    "stored otherwise": (
        lambda s: _leaf(s, "0.mu.w", stored="bits"),
        "the schema's leaf '0.mu.w' must have 'codes' or 'values' as 'stored', got 'bits'; the file is damaged",
    ),
    "parts that are none": (
        lambda s: _leaf(s, "0.mu.w", parts=[".codes"]),
        "the schema's leaf '0.mu.w' must have names of dtypes by endings as 'parts', got ['.codes']; the file is "
        "damaged",
    ),
    "a part without a dtype": (
        lambda s: _leaf(s, "0.mu.w", parts={".codes": None}),
        "the schema's leaf '0.mu.w' must have names of dtypes by endings as 'parts', got {'.codes': None}; the file is "
        "damaged",
    ),
    "an entry less": (
        lambda s: _without(s, "0.mu.w.scales"),
        "saved has no entry '0.mu.w.scales', which its schema lists",
    ),
    "an entry more": (
        lambda s: {**s, "0.mu.w.values": torch.ones(64, 64)},
        "saved has an entry '0.mu.w.values', which its schema does not list",
    ),
    "another dtype": (
        lambda s: {**s, "0.mu.b": s["0.mu.b"].bfloat16()},
        "'0.mu.b' must have dtype torch.float32, got torch.bfloat16",
    ),
    "codes of another dtype": (
        lambda s: {**s, "0.mu.w.codes": s["0.mu.w.codes"].view(torch.uint8)},
        "'0.mu.w.codes' must have dtype torch.int8, got torch.uint8",
    ),
    "truncated": (
        lambda s: {**s, "0.nu.w.codes": s["0.nu.w.codes"][:3]},
        "'0.nu.w.codes' must have shape (64, 64), got (3, 64)",
    ),
    "no tensor": (lambda s: {**s, "0.step": 2}, "'0.step' must be a tensor, got int"),
}


OTHER_STATES = {
    "another format": (
        lambda: fl.adam8bit(0.1, format="dynamic8"),
        "leaf '0.mu.w' was saved with format 'dynamic8', but the state has 'companded8'; "
        "pass convert=True to convert it",
    ),
    "another block size": (
        lambda: fl.adam8bit(0.1, block_size=64),
        "leaf '0.mu.w' was saved with block_size 64, but the state has 256; pass convert=True to convert it",
    ),
    "no format": (
        lambda: fl.adam(0.1),
        "leaf '0.mu.w' was saved with kind 'tensor', but the state has 'quantized'; pass convert=True to convert it",
    ),
    "a field less": (lambda: fl.lion8bit(0.1), "saved has no leaf '0.nu.b', which the state has"),
    "a leaf more": (
        lambda: fl.chain(fl.scale_by_adam(), fl.trace(0.9)),
        "saved has a leaf '1.step', which the state has not",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_spoilt_file(name):
    change, message = MISMATCHES[name]
    state = fl.adam8bit(0.1).init(make_params())
    saved = change(fl.state_dict(after_two_steps(fl.adam8bit(0.1))))
    before = clone((state, [x for x in saved.values() if isinstance(x, torch.Tensor)]))
    refuses(ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(state, saved))
    assert same((state, [x for x in saved.values() if isinstance(x, torch.Tensor)]), before)


@pytest.mark.parametrize("name", OTHER_STATES)
def test_the_file_of_another_state(name):
    make, message = OTHER_STATES[name]
    state = fl.adam8bit(0.1).init(make_params())
    saved = fl.state_dict(after_two_steps(make()))
    before = clone(state)
    refuses(ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(state, saved))
    assert same(state, before)


def test_the_file_of_another_model():
    saved = fl.state_dict(fl.adam(0.1).init({**make_params(), "b": torch.ones(4)}))
    refuses(
        ValueError,
        "load_state_dict: leaf '0.mu.b' was saved with shape [4], but the state has [3]",
        lambda: fl.load_state_dict(fl.adam(0.1).init(make_params()), saved),
    )


def test_two_leaves_of_one_name():
    state = fl.trace(0.9).init({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    refuses(ValueError, "state_dict: two leaves have the path 'trace.a.b'; rename one", lambda: fl.state_dict(state))
    saved = fl.state_dict({"trace": {"a": {"b": torch.ones(1)}}, "step": state.step})
    message = "load_state_dict: two leaves of the state have the path 'trace.a.b'; rename one"
    refuses(ValueError, message, lambda: fl.load_state_dict(state, saved))
    state = {"w.codes": torch.ones(1), "w": fl.quantize(torch.ones(2, 3), "companded8")}
    refuses(ValueError, "state_dict: two leaves have the path 'w.codes'; rename one", lambda: fl.state_dict(state))


def test_a_leaf_that_cannot_be_saved():
    message = "state_dict: leaf 'x' must be a tensor, a bool, a number or a string, got object"
    refuses(TypeError, message, lambda: fl.state_dict({"x": object()}))
