"""The schema: what a saved state says of each leaf, so that nobody guesses it from names; and what is refused."""

import json
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_states import after_two_steps, make_params
from helpers import refuses
from torch import Tensor, nn

import functional_lowbit as fl

PARAMS = {"layers.0.weight": torch.ones(64, 64), "nested": {"mu": {"step": torch.ones(3)}}}
NAMES = ("layers.0.weight", "nested.mu.step")


def schema_of(state: Any) -> dict[str, Any]:
    return json.loads(fl.state_dict(state)["schema"])["leaves"]


def roles(state: Any) -> dict[str, tuple[Any, ...]]:
    """Path to (role, field, param), of leaves that have a role."""
    keys = ("role", "field", "param")
    return {path: tuple(leaf.get(key) for key in keys) for path, leaf in schema_of(state).items() if "role" in leaf}


def test_the_schema():
    saved = fl.state_dict({"state": fl.sgd8bit(0.1).init(make_params())[0], "n": 3, "w": torch.ones(2)})
    of_b = {"role": "moment", "field": "trace", "param": "b", "signed": True}
    assert json.loads(saved["schema"]) == {
        "version": 3,
        "library": fl.__version__,
        "leaves": {
            "n": {"kind": "int", "parts": {"": "int"}},
            "w": {"kind": "tensor", "shape": [2], "stored": "values", "parts": {"": "float32"}},
            "state.step": {
                "role": "counter",
                "field": "step",
                "kind": "tensor",
                "shape": [],
                "stored": "values",
                "parts": {"": "int64"},
            },
            "state.trace.b": {**of_b, "kind": "tensor", "shape": [3], "stored": "values", "parts": {"": "float32"}},
            "state.trace.w": {
                **of_b,
                "param": "w",
                "kind": "quantized",
                "format": "companded8",
                "block_size": 256,
                "shape": [64, 64],
                "stored": "codes",
                "parts": {".codes": "int8", ".scales": "float32"},
            },
        },
    }


def _of(role: str, field: str, at: str) -> dict[str, tuple[Any, ...]]:
    return {f"{at}.{name}": (role, field, name) for name in NAMES}


def _adam(at: str) -> dict[str, tuple[Any, ...]]:
    moments = {**_of("moment", "mu", f"{at}mu"), **_of("moment", "nu", f"{at}nu")}
    return {f"{at}step": ("counter", "step", None), **moments}


HALF = fl.tree.cast(PARAMS, torch.bfloat16)
STATES = {
    "moments": (lambda: fl.adam8bit(1e-3).init(PARAMS), _adam("0.")),
    "statistics": (
        lambda: fl.scale_by_factored_rms().init(PARAMS),
        {
            "step": ("counter", "step", None),
            **{k: v for field in ("v", "v_row", "v_col") for k, v in _of("statistic", field, field).items()},
        },
    ),
    "masters": (
        lambda: fl.master_weights(fl.adam(1e-3)).init(HALF),
        {**_of("master", "error", "error"), **_adam("inner_state.0.")},
    ),
    "records": (
        lambda: fl.record_quantization_error(fl.scale_by_lion()).init(PARAMS),
        {
            **_of("record", "looks", "looks"),
            **{
                path: said
                for field in ("last", "mean", "largest")
                for of in ("mu", "update")
                for path, said in _of("record", field, f"{field}.{of}").items()
            },
            **_of("moment", "mu", "inner_state.mu"),
            "inner_state.step": ("counter", "step", None),
            "step": ("counter", "step", None),
            "last_step": ("number", "last_step", None),
        },
    ),
    "numbers": (
        lambda: fl.multi_steps(fl.apply_if_finite(fl.inject_hyperparams(lambda mu: fl.scale(mu))(0.1)), 2).init(PARAMS),
        {
            "mini_step": ("number", "mini_step", None),
            "gradient_step": ("counter", "gradient_step", None),
            **_of("moment", "acc_grads", "acc_grads"),
            **{
                f"inner_opt_state.{field}": ("number", field, None)
                for field in ("notfinite_count", "last_finite", "total_notfinite")
            },
            "inner_opt_state.inner_state.step": ("counter", "step", None),
            "inner_opt_state.inner_state.hyperparams.mu": ("number", "hyperparams", None),
        },
    ),
    "labels": (
        lambda: fl.partition({"mu": fl.trace(0.9), "nu": fl.identity()}, lambda path, p: "mu").init(PARAMS),
        {
            "inner_states.mu.inner_state.step": ("counter", "step", None),
            **_of("moment", "trace", "inner_states.mu.inner_state.trace"),
        },
    ),
    "what is no state": (lambda: {"mu": PARAMS, "step": torch.tensor(1), "extra": [3, "a"]}, {}),
    "one tensor": (
        lambda: fl.scale_by_lion().init(torch.ones(2)),
        {"step": ("counter", "step", None), "mu": ("moment", "mu", "")},
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_roles(name):
    """Parameters may have dots in their names, and names of fields."""
    make, wanted = STATES[name]
    state = make()
    assert roles(state) == wanted
    around = {"model": PARAMS, "opt": state}
    assert roles(around) == {f"opt.{path}": said for path, said in wanted.items()}
    fl.load_state_dict(state, fl.state_dict(state))


class Own(NamedTuple):
    """A user's: `calls` is declared as nothing."""

    step: int
    calls: Tensor
    mean: fl.NonNegative


def test_a_users_state():
    leaves = schema_of(Own(3, torch.ones(()), {"a.b": torch.ones(2)}))
    assert leaves["step"] == {"role": "counter", "field": "step", "kind": "int", "parts": {"": "int"}}
    assert "role" not in leaves["calls"]
    assert {key: leaves["mean.a.b"][key] for key in ("role", "field", "param", "signed")} == {
        "role": "moment",
        "field": "mean",
        "param": "a.b",
        "signed": False,
    }


def test_the_entries_of_one_parameter():
    """They are the state of a tree that is this parameter: what all share has the same words."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = fl.optim.AdamW8bit(model.named_parameters(), backend="eager")
    for p in model.parameters():
        raw = optimizer.state[p]["schema"]
        wanted = schema_of(fl.adamw8bit(1e-3).init(p.detach()))
        assert json.loads(bytes(raw.tolist()))["leaves"] == wanted
    assert wanted["0.nu"]["param"] == ""


@pytest.mark.parametrize("version", [1, 2])
def test_versions_that_were_never_released(version, tmp_path):
    saved = fl.state_dict(after_two_steps(fl.adam(0.1)))
    saved["schema"] = json.dumps({**json.loads(saved["schema"]), "version": version})
    text = (
        f"the schema has version {version}, from before the first release of functional_lowbit; functional_lowbit "
        f"{fl.__version__} reads version 3 alone; resume with the revision that wrote the file"
    )
    state = fl.adam(0.1).init(make_params())
    refuses(ValueError, f"load_state_dict: {text}", lambda: fl.load_state_dict(state, saved))
    refuses(ValueError, f"from_saved: {text}", lambda: fl.convert.from_saved(saved, state))
    optimizer = fl.optim.Optimizer([torch.ones(2)], fl.adam(0.1), backend="eager")
    saved = optimizer.state_dict()
    written = bytes(saved["state"][0]["schema"].tolist()).replace(b'"version": 3', f'"version": {version}'.encode())
    saved["state"][0]["schema"] = torch.tensor(list(written), dtype=torch.uint8)
    refuses(
        ValueError, f"Optimizer.load_state_dict: the state of '0': {text}", lambda: optimizer.load_state_dict(saved)
    )


def _changed(path: str, **changes: Any) -> dict[str, Any]:
    saved = fl.state_dict(after_two_steps(fl.adam8bit(0.1)))
    document = json.loads(saved["schema"])
    leaf = {**document["leaves"][path], **changes}
    document["leaves"][path] = {key: value for key, value in leaf.items() if value is not None}
    return {**saved, "schema": json.dumps(document)}


DAMAGED = {
    "a role that is none": (
        ("0.mu.b", {"role": ["moment"]}),
        "must have one of 'moment', 'statistic', 'master', 'record', 'counter', 'number' as 'role', got ['moment']",
    ),
    "no field": (("0.step", {"field": None}), "must have 'field'"),
    "a field that is none": (("0.step", {"field": 3}), "must have a string as 'field', got 3"),
    "no parameter": (("0.mu.w", {"param": None}), "must have 'param'"),
    "a parameter that is none": (("0.mu.w", {"param": {}}), "must have a string as 'param', got {}"),
    "no sign": (("0.mu.b", {"signed": None}), "must have 'signed'"),
    "a sign that is none": (("0.mu.b", {"signed": 1}), "must have a bool as 'signed', got 1"),
    "another parameter": (
        ("0.mu.w", {"param": "b"}),
        "must have the path of its field and parameter, got field 'mu' of parameter 'b'",
    ),
    "a part of a parameter": (
        ("0.mu.w", {"param": ""}),
        "must have the path of its field and parameter, got field 'mu' of parameter ''",
    ),
    "another field": (
        ("0.mu.w", {"field": "nu"}),
        "must have the path of its field and parameter, got field 'nu' of parameter 'w'",
    ),
    "another counter": (("0.step", {"field": "tep"}), "must have the path of its field and parameter, got field 'tep'"),
    "a number as a moment": (
        ("0.mu.b", {"kind": "int", "parts": {"": "int"}}),
        "must be a tensor to be a moment, got int",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_role(name):
    (path, changes), text = DAMAGED[name]
    saved = _changed(path, **changes)
    state = fl.adam8bit(0.1).init(make_params())
    text = f"the schema's leaf {path!r} {text}; the file is damaged"
    refuses(ValueError, f"load_state_dict: {text}", lambda: fl.load_state_dict(state, saved))
    refuses(ValueError, f"from_saved: {text}", lambda: fl.convert.from_saved(saved, state))


def test_a_leaf_of_another_field():
    """The names of the file fit, and what they are names of does not."""
    saved = _changed("0.mu.w", field="mu", param="w")
    document = json.loads(saved["schema"])
    document["leaves"]["0.mu.w"].update(role="record", field="0", param="mu.w")
    saved["schema"] = json.dumps(document)
    text = "load_state_dict: leaf '0.mu.w' was saved with field '0', but the state has 'mu'"
    refuses(ValueError, text, lambda: fl.load_state_dict(fl.adam8bit(0.1).init(make_params()), saved))


def test_a_number_of_thousands_of_digits_is_no_json():
    saved = {"schema": f'{{"version": {"9" * 5000}}}'}
    with pytest.raises(ValueError, match=r"^load_state_dict: the entry 'schema' is no JSON"):
        fl.load_state_dict({}, saved)
