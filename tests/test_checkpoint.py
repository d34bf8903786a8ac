"""state_dict and load_state_dict: saving changes nothing, nothing is half-loaded, each mismatch has its words."""

import io
import json
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, IntEnum
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import clone, leaves, random_like, refuses, run_pure, run_step, same
from torch import nn

import functional_lowbit as fl
from functional_lowbit._core.state.quantized import encode
from functional_lowbit.checkpoint._reading import write_again


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
    document = json.loads(fl.state_dict({**fl.sgd8bit(0.1).init(_params())[0]._asdict(), "n": 3})["schema"])
    assert document == {
        "version": 2,
        "library": fl.__version__,
        "leaves": {
            "n": {"kind": "int", "parts": {"": "int"}},
            "step": {"kind": "tensor", "shape": [], "stored": "values", "parts": {"": "int64"}},
            "trace.b": {"kind": "tensor", "shape": [3], "stored": "values", "parts": {"": "float32"}},
            "trace.w": {
                "kind": "quantized",
                "format": "companded8",
                "signed": True,
                "block_size": 256,
                "shape": [64, 64],
                "stored": "codes",
                "parts": {".codes": "int8", ".scales": "float32"},
            },
        },
    }


def test_the_version_is_a_string_that_packaging_reads():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "functional_lowbit._version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", fl.__version__)


def _as_version_1(state: Any) -> dict[str, Any]:
    """What functional_lowbit wrote before the schema had a library in it."""
    saved = fl.state_dict(state)
    leaves = json.loads(saved["schema"])["leaves"]
    for leaf in leaves.values():
        parts = leaf.pop("parts")
        leaf.pop("stored", None)
        if leaf["kind"] == "tensor":
            leaf["dtype"] = parts[""]
    return {**saved, "schema": json.dumps({"version": 1, "leaves": leaves}, sort_keys=True)}


@pytest.mark.parametrize("format", fl.formats.names())
def test_version_1_is_read(format):
    tx = fl.apply_if_finite(fl.adam8bit(0.1, format=format))
    state = _after_two_steps(tx)
    assert same(fl.load_state_dict(tx.init(_params()), _as_version_1(state)), state)
    saved = _as_version_1({"n": 3, "t": torch.ones(2)})
    assert fl.load_state_dict({"n": 0, "t": torch.zeros(2)}, saved)["n"] == 3


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


@pytest.mark.parametrize("format", fl.formats.names())
def test_version_1_took_all_dimensions_but_the_first_as_one(format):
    """Leaves of three and more dimensions: the same numbers, if the blocks are others now rounded once more."""
    for shape in ((4, 5, 192), (2, 3, 4, 256), (19, 8, 6, 5), (0, 3, 4)):
        for signed in (True, False):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            x = x if signed else x.square()
            if fl.formats.get(format).scaled:
                x = x.reshape(shape[0], prod(shape[1:]))
            flat = fl.quantize(x, format, signed=signed)
            saved = _as_version_1({"m": flat})
            saved["schema"] = saved["schema"].replace(str(list(flat.shape)), str(list(shape)))
            own = fl.quantize(torch.zeros(shape), format, signed=signed)
            loaded = fl.load_state_dict({"m": own}, saved)["m"]
            numbers = flat.dequantize().reshape(shape)
            assert loaded.layout == own.layout
            assert loaded.codes.shape == own.codes.shape
            if loaded.nbytes == flat.nbytes:
                assert torch.equal(loaded.codes.flatten(), flat.codes.flatten())
                assert torch.equal(loaded.dequantize(), numbers)
            else:
                assert (loaded.dequantize() - numbers).norm() < 0.15 * numbers.norm()


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
        lambda s: {**s, "schema": {"version": 2}},
        "the entry 'schema' must be a string, got dict",
    ),
    "no JSON": (
        lambda s: {**s, "schema": s["schema"][:30]},
        "the entry 'schema' is no JSON: Expecting value: line 1 column 31 (char 30); the file is damaged",
    ),
    "no version": (
        lambda s: {**s, "schema": "[]"},
        "the schema must have a version, got None; the file is damaged",
    ),
    "a newer version": (
        lambda s: _document(s, version=9, library="3.1.0"),
        f"the schema has version 9, written by functional_lowbit 3.1.0; functional_lowbit {fl.__version__} reads "
        "versions 1 to 2; use the newer library",
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
    saved = fl.state_dict({"trace": {"a": {"b": torch.ones(1)}}, "step": state.step})
    message = "load_state_dict: two leaves of the state have the path 'trace.a.b'; rename one"
    refuses(ValueError, message, lambda: fl.load_state_dict(state, saved))
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


@pytest.mark.parametrize(("kind", "was", "wanted"), [("float64", np.float64(0.1), 0.1), ("str_", np.str_("a"), "a")])
def test_numbers_of_numpy_were_written_under_their_own_names(kind, was, wanted):
    schema = json.dumps({"version": 2, "library": "0.1.0", "leaves": {"n": {"kind": kind, "parts": {"": kind}}}})
    loaded = fl.load_state_dict({"n": type(wanted)()}, {"n": was, "schema": schema})["n"]
    assert type(loaded) is type(wanted)
    assert loaded == wanted


NEVER_CONVERTED = {
    "shape": (
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        {"m": fl.quantize(torch.ones(8, 17), "companded8")},
        "leaf 'm' was saved with shape [8, 16], but the state has [8, 17]",
    ),
    "sign": (
        {"m": fl.quantize(torch.ones(8, 16), "companded8", signed=False)},
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        "leaf 'm' was saved with signed False, but the state has True",
    ),
    "dtype": (
        {"m": torch.ones(3)},
        {"m": torch.ones(3, dtype=torch.bfloat16)},
        "leaf 'm' was saved with dtype 'float32', but the state has 'bfloat16'",
    ),
    "few bits and another dtype": (
        {"m": torch.ones(8, 16, dtype=torch.float64)},
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        "leaf 'm' was saved with kind 'tensor', but the state has 'quantized'",
    ),
    "number": ({"m": 3}, {"m": True}, "leaf 'm' was saved with kind 'int', but the state has 'bool'"),
    "number and tensor": (
        {"m": 3},
        {"m": torch.tensor(3)},
        "leaf 'm' was saved with kind 'int', but the state has 'tensor'",
    ),
}


@pytest.mark.parametrize("name", NEVER_CONVERTED)
def test_what_is_never_converted(name):
    was, has, message = NEVER_CONVERTED[name]
    refuses(
        ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(has, fl.state_dict(was), convert=True)
    )


def test_an_unknown_format():
    mine = fl.formats.get("root4")._replace(name="mine")
    saved = fl.state_dict({"m": fl.quantize(torch.ones(8, 16), mine)})
    assert fl.load_state_dict({"m": fl.quantize(torch.zeros(8, 16), mine)}, saved)["m"].format is mine
    message = "load_state_dict: leaf 'm' was saved with the format 'mine', which formats.names() lacks"
    refuses(ValueError, message, lambda: fl.load_state_dict({"m": torch.ones(8, 16)}, saved, convert=True))


KEPT = [*fl.formats.names(), "root4 in blocks of 32", "plain"]


def _moment(kept: str, signed: bool, shape: tuple[int, ...], seed: int) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = x if signed else x.square()
    if kept == "plain":
        return x
    name, *words = kept.split()
    return fl.quantize(x, name, signed=signed, block_size=int(words[-1]) if words else None)


@pytest.mark.parametrize("has", KEPT)
@pytest.mark.parametrize("was", KEPT)
def test_conversion_reads_and_writes_each_leaf(was, has):
    """What is loaded is what `quantize` makes of the numbers that the saved leaf stands for."""
    for signed in (True, False):
        for shape in ((33, 70), (1000,), (0, 4), (3, 4, 50)):
            old, own = _moment(was, signed, shape, 0), _moment(has, signed, shape, 1)
            before = clone((old, own))
            saved = fl.state_dict({"m": old, "step": torch.tensor(3)})
            new = fl.load_state_dict({"m": own, "step": torch.tensor(0)}, saved, convert=True)["m"]
            assert same((old, own), before)
            if was == has:
                assert same(new, old)
                continue
            numbers = old if was == "plain" else old.dequantize()
            wanted = (
                numbers
                if has == "plain"
                else fl.quantize(numbers, own.format, signed=signed, block_size=own.block_size)
            )
            if has == "plain":
                assert torch.equal(new, wanted)
            else:
                assert new.layout == own.layout
                assert torch.equal(new.dequantize(), wanted.dequantize()) or not new.format.codec(signed).idempotent


@pytest.mark.parametrize("name", ["dynamic8", "dynamic4"])
def test_numbers_that_were_read_are_written_with_their_codes(name):
    """Also where the map has no -1: blocks whose largest number is negative keep codes and numbers, bit for bit."""
    layout = fl.quantize(torch.empty(0, 256), name, block_size=64).layout._replace(shape=(1000, 256))
    x = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 1000)[:, None]
    x[1, :] = 0
    x[2, 3:] = 0
    x[3, 5] = float("nan")
    x[4, 5] = -float("inf")
    old = encode(x, layout)
    new = write_again(old.dequantize(), layout)
    assert torch.equal(new.codes, old.codes)
    assert torch.equal(new.dequantize(), old.dequantize())
    assert (new.scales - old.scales).count_nonzero() <= 2  # where other numbers of the block do not tell the scale
    assert not torch.equal(encode(old.dequantize(), layout).codes, old.codes)  # which is why


def test_a_conversion_trains_on():
    """From 8 bits into 4, and from float32 into 8: a step of the converted state is near to that of the old one."""
    params = _params()
    for was, has, bound in (
        (fl.adam8bit, fl.adam4bit, 0.3),
        (fl.adam, fl.adam8bit, 0.02),
        (fl.adam8bit, fl.adam, 1e-6),
    ):
        state = _after_two_steps(was(0.1))
        new = fl.load_state_dict(has(0.1).init(params), fl.state_dict(state), convert=True)
        g = random_like(params, 5)
        old_u, new_u = was(0.1).update(g, state, params)[0]["w"], has(0.1).update(g, new, params)[0]["w"]
        assert (new_u - old_u).norm() <= bound * old_u.norm()
        assert new[0].step == 2


def test_safetensors(tmp_path):
    tx = fl.apply_if_finite(fl.chain(fl.masked(fl.adam8bit(0.1), {"w": True, "b": False}), fl.trace(0.9)))
    for format in fl.formats.names():
        state = {"opt": _after_two_steps(tx), "m": fl.quantize(torch.randn(5, 70), format), "n": 3, "name": "a"}
        file = tmp_path / f"{format}.safetensors"
        fl.checkpoint.save_safetensors(state, file)
        fresh = {**state, "opt": tx.init(_params()), "n": 0, "name": ""}
        assert same(fl.checkpoint.load_safetensors(fresh, file), state)
    with safetensors.safe_open(file, "pt") as opened:  # what others see
        assert "opt.inner_state.0.inner_state.0.mu.w.codes" in opened.keys()  # noqa: SIM118
        assert json.loads(opened.metadata()["schema"])["library"] == fl.__version__
    assert sorted(x.suffix for x in tmp_path.iterdir()) == [".safetensors"] * len(fl.formats.names())


def test_safetensors_convert_and_refuse(tmp_path):
    file = tmp_path / "a.safetensors"
    state = _after_two_steps(fl.adam8bit(0.1))
    fl.checkpoint.save_safetensors(state, file)
    other = fl.adam4bit(0.1).init(_params())
    speaker = "checkpoint.load_safetensors"
    refuses(
        ValueError,
        f"{speaker}: leaf '0.mu.w' was saved with format 'companded8', but the state has 'root4'; "
        "pass convert=True to convert it",
        lambda: fl.checkpoint.load_safetensors(other, file),
    )
    converted = fl.checkpoint.load_safetensors(other, file, convert=True)
    assert same(converted, fl.load_state_dict(other, fl.state_dict(state), convert=True))
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=rf"^{speaker}: cannot read '{file}', the file is damaged: .*"):
        fl.checkpoint.load_safetensors(state, file)
    safetensors.torch.save_file({"w": torch.ones(2)}, file)
    message = f"{speaker}: '{file}' has no metadata 'schema'; it must come from checkpoint.save_safetensors"
    refuses(ValueError, message, lambda: fl.checkpoint.load_safetensors(state, file))
    missing = tmp_path / "none"
    message = f"{speaker}: there is no file '{missing}'"
    refuses(FileNotFoundError, message, lambda: fl.checkpoint.load_safetensors(state, missing))
    with pytest.raises(OSError, match=r"^checkpoint.save_safetensors: could not write '/proc/a': "):
        fl.checkpoint.save_safetensors(state, "/proc/a")


def test_several_write_one_safetensors_file(tmp_path):
    """Whoever comes last has the file, whole; none is in another's way."""
    file = tmp_path / "a.safetensors"
    states = [{"w": torch.full((100_000,), float(n))} for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: fl.checkpoint.save_safetensors(states[k % 4], file), range(40)))
    loaded = fl.checkpoint.load_safetensors(states[0], file)["w"]
    assert loaded.eq(loaded[0]).all()
    assert [x.name for x in tmp_path.iterdir()] == ["a.safetensors"]


def test_without_safetensors():
    """In a process that cannot import it."""
    script = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import functional_lowbit as fl\n"
        "try:\n    fl.checkpoint.save_safetensors({}, 'x')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "checkpoint.save_safetensors: needs the package safetensors; pip install 'functional-lowbit[safetensors]'\n"
    )


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
    saved = fl.state_dict(_after_two_steps(tx))
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = fl.load_state_dict(tx.init(fl.tree.cast(_params(), torch.bfloat16)), saved)
        found = fl.state_dict(loaded)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: x.dtype for name, x in found.items() if name != "schema"} == wanted
    assert {
        name + ending: getattr(torch, dtype)
        for name, leaf in json.loads(found["schema"])["leaves"].items()
        for ending, dtype in leaf["parts"].items()
    } == wanted
