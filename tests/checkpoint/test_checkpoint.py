"""state_dict and load_state_dict: saving changes nothing, and what is loaded is what was saved."""

import io
import json
import re
import tomllib
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_states import after_two_steps, make_params
from helpers import clone, leaves, random_like, run_step, same
from torch import nn

import functional_lowbit as fl


def test_names():
    tx = fl.apply_if_finite(fl.chain(fl.masked(fl.adam8bit(0.1), {"w": True, "b": False}), fl.trace(0.9)))
    saved = fl.state_dict(tx.init(make_params()))
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


def test_the_version_is_a_string_that_packaging_reads():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "functional_lowbit._core.version.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", fl.__version__)


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
    grads = [random_like(make_params(), t) for t in range(6)]
    step = fl.compile(tx, backend="eager")
    wanted = run_step(step, make_params(), grads, tx.init(make_params()))
    params, state = run_step(step, make_params(), grads[:3], tx.init(make_params()))
    file = io.BytesIO()
    torch.save({"params": params, "state": fl.state_dict(state)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    params, state = loaded["params"], fl.load_state_dict(tx.init(make_params()), loaded["state"])
    assert same(run_step(fl.compile(tx, backend="eager"), params, grads[3:], state), wanted)


def test_loading_does_not_cast_to_the_params_dtype():
    saved = fl.state_dict(after_two_steps(fl.adam(0.1)))
    half = fl.tree.cast(make_params(), torch.bfloat16)
    loaded = fl.load_state_dict(fl.adam(0.1).init(half), saved)
    assert loaded[0].mu["w"].dtype == torch.float32
    assert torch.equal(loaded[0].mu["w"], saved["0.mu.w"])


def test_numbers_and_strings_in_a_users_state():
    state = {"step": 3, "rate": 0.5, "on": True, "name": "a", "none": None, "t": torch.ones(2)}
    loaded = fl.load_state_dict({**state, "step": 0, "t": torch.zeros(2)}, fl.state_dict(state))
    assert loaded == {**state, "t": loaded["t"]}
    assert torch.equal(loaded["t"], torch.ones(2))


class Phase(IntEnum):
    warm_up = 1
    decay = 2


class Mode(str, Enum):  # noqa: UP042 -- a StrEnum has another str()
    train = "training"


SUBCLASSES = [
    (np.float64(0.1), 0.1),
    (np.str_("a"), "a"),
    (Phase.decay, 2),
    (Mode.train, "training"),
    (type("Count", (int,), {})(2**70), 2**70),
    (float("inf"), float("inf")),
]


@pytest.mark.parametrize(("was", "wanted"), SUBCLASSES, ids=lambda x: type(x).__name__)
def test_numbers_and_strings_of_subclasses(was, wanted, tmp_path):
    """They are saved as what they stand for, and are read into a tree that has them or has that."""
    saved = fl.state_dict({"n": was})
    assert type(saved["n"]) is type(wanted)
    fl.checkpoint.save(tmp_path / "a", {"n": was})
    fl.checkpoint.save_safetensors({"n": was}, tmp_path / "b")
    for own in (was, wanted, type(wanted)()):
        for loaded in (
            fl.load_state_dict({"n": own}, saved),
            fl.load_state_dict({"n": own}, {**saved, "n": was}),
            fl.checkpoint.load(tmp_path / "a", {"n": own}),
            fl.checkpoint.load_safetensors({"n": own}, tmp_path / "b"),
        ):
            assert type(loaded["n"]) is type(wanted)
            assert loaded["n"] == wanted


def test_a_step_beyond_2_to_the_24():
    """Counted exactly, and corrected for in float64; float32 has no odd numbers there."""
    b1, b2, first = 0.9, 1 - 2.0**-24, 2**24 + 1
    tx = fl.scale_by_adam(b1=b1, b2=b2, eps=0.0)
    params = {"w": torch.zeros(2)}
    state = tx.init(params)._replace(step=torch.tensor(first))
    g = {"w": torch.tensor([1.0, -2.0])}
    for k in (1, 2, 3):
        state = fl.load_state_dict(tx.init(params), fl.state_dict(state))
        mu, nu = state.mu["w"].double(), state.nu["w"].double()
        updates, state = tx.update(g, state, params)
        assert state.step.dtype == torch.int64
        assert int(state.step) == first + k
        mu, nu = b1 * mu + (1 - b1) * g["w"].double(), b2 * nu + (1 - b2) * g["w"].double() ** 2
        wanted = (mu / (1 - b1 ** (first + k))) / (nu / (1 - b2 ** (first + k))).sqrt()
        # A dozen roundings of float32: 12 * 2**-24. A step off by one would show in `state.step` above.
        assert torch.allclose(updates["w"].double(), wanted, rtol=1e-6, atol=0)


def test_case_9_no_dtype_follows_the_default_or_the_params():
    tx = fl.adamw8bit(0.1)
    wanted = {
        "0.step": torch.int64,
        "0.mu.b": torch.float32,
        "0.nu.b": torch.float32,
        "0.mu.w.codes": torch.int8,
        "0.mu.w.scales": torch.float32,
        "0.nu.w.codes": torch.uint8,
        "0.nu.w.scales": torch.float32,
    }
    saved = fl.state_dict(after_two_steps(tx))
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = fl.load_state_dict(tx.init(fl.tree.cast(make_params(), torch.bfloat16)), saved)
        found = fl.state_dict(loaded)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: x.dtype for name, x in found.items() if name != "schema"} == wanted
    assert {
        name + ending: getattr(torch, dtype)
        for name, leaf in json.loads(found["schema"])["leaves"].items()
        for ending, dtype in leaf["parts"].items()
    } == wanted
