"""checkpoint.save and load in one process: what is read is what was written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_states import make_params, make_tree, names_in
from helpers import clone, random_like, refuses, run_step, same
from torch import nn

import functional_lowbit as fl
from functional_lowbit.checkpoint import _folder


@pytest.mark.parametrize("format", fl.formats.names())
def test_what_is_read_is_what_was_written(format: str, tmp_path: Path) -> None:
    tree, fresh = make_tree(format), make_tree(format, 0)
    before = clone((tree, fresh))
    fl.checkpoint.save(tmp_path / "new" / "one", tree)
    loaded = fl.checkpoint.load(str(tmp_path / "new" / "one"), fresh)
    assert same(loaded, tree)
    assert same((tree, fresh), before)
    assert names_in(tmp_path / "new") == ["one"]
    assert names_in(tmp_path / "new" / "one") == [".metadata", "__0_0.distcp"]
    loaded["params"]["w"].zero_()  # nothing is shared with the tree
    assert same((tree, fresh), before)


def test_parameters_of_a_module(tmp_path: Path) -> None:
    """Case 8: gradients present, a frozen and a never used parameter; all of them are in the file and in the state."""

    def fresh(seed: int) -> tuple[nn.ModuleDict, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(5, 5), "unused": nn.Linear(70, 70), "frozen": nn.Linear(70, 70)})
        model["frozen"].requires_grad_(False)
        return model, tx.init(dict(model.named_parameters()))

    def train(model: nn.ModuleDict, state: Any, steps: int) -> Any:
        params = dict(model.named_parameters())
        for _ in range(steps):
            model.zero_grad()
            model["a"](torch.ones(2, 5)).square().sum().backward()
            _, state = step({n: p.grad for n, p in params.items()}, state, params)
        return state

    tx = fl.adamw8bit(0.1)
    step = fl.compile(tx, backend="eager")
    model, state = fresh(0)
    names = list(dict(model.named_parameters()))
    fl.checkpoint.save(tmp_path / "before", {"params": dict(model.named_parameters()), "state": state})
    state = train(model, state, 2)
    fl.checkpoint.save(tmp_path / "a", {"params": dict(model.named_parameters()), "state": state})
    state = train(model, state, 2)

    other, other_state = fresh(9)
    loaded = fl.checkpoint.load(tmp_path / "a", {"params": dict(other.named_parameters()), "state": other_state})
    assert list(loaded["params"]) == names
    assert sorted(loaded["state"][0].mu) == sorted(names)
    other.load_state_dict(loaded["params"])
    assert not other["frozen"].weight.requires_grad
    other_state = train(other, loaded["state"], 2)
    assert same(other_state, state)
    assert same(other.state_dict(), model.state_dict())

    plain, plain_state = fresh(0)
    assert same(train(plain, plain_state, 4), state)  # looking at the state took no step


def test_an_optimizer_of_torch_kind(tmp_path: Path) -> None:
    """What `state_dict` of a module and of `fl.optim` return is a tree like any other."""

    def fresh(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(70, 70)
        return model, fl.optim.Optimizer(model.named_parameters(), fl.adamw8bit(1e-2))

    def train(model: nn.Module, optimizer: Any) -> Any:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 70)).square().sum().backward()
            optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = fresh(0)
    fl.checkpoint.save(tmp_path / "a", train(model, optimizer))
    other, other_optimizer = fresh(9)
    tree = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    loaded = fl.checkpoint.load(tmp_path / "a", tree)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    assert same(train(other, other_optimizer), train(model, optimizer))


def test_stochastic_rounding_goes_on_bit_equal(tmp_path: Path) -> None:
    """bf16 params and a keyed rounding: noise depends on key, step, path and element, so a resumed run repeats it."""
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3))
    half = fl.tree.cast(make_params(), torch.bfloat16)
    grads = [random_like(half, t) for t in range(6)]
    take = fl.compile(tx, backend="eager", rounding="stochastic", key=7)
    params, state = run_step(take, clone(half), grads[:3], tx.init(half))
    fl.checkpoint.save(tmp_path / "a", {"params": params, "state": state})
    wanted = clone(run_step(take, params, grads[3:], state))
    loaded = fl.checkpoint.load(tmp_path / "a", {"params": half, "state": tx.init(half)})
    again = fl.compile(tx, backend="eager", rounding="stochastic", key=7)
    assert same(run_step(again, loaded["params"], grads[3:], loaded["state"]), wanted)
    other = fl.compile(tx, backend="eager", rounding="stochastic", key=8)
    loaded = fl.checkpoint.load(tmp_path / "a", {"params": half, "state": tx.init(half)})
    assert not same(run_step(other, loaded["params"], grads[3:], loaded["state"]), wanted)


def test_into_a_tree_without_memory(tmp_path: Path) -> None:
    """A model and a state on the meta device say what is wanted; what is loaded is real."""
    for format in ("companded8", "bfloat16"):
        tree = make_tree(format)
        fl.checkpoint.save(tmp_path / "a", tree)
        params = {name: torch.empty_like(x, device="meta") for name, x in tree["params"].items()}
        state = fl.adam8bit(0.1, format=format).init(params)
        assert state[0].mu["w"].codes.is_meta
        assert same(fl.checkpoint.load(tmp_path / "a", {**tree, "params": params, "state": state}), tree)
        other = fl.adam4bit(0.1).init(params)
        loaded = fl.checkpoint.load(tmp_path / "a", {**tree, "params": params, "state": other}, convert=True)
        real = fl.adam4bit(0.1).init(tree["params"])
        assert same(loaded["state"], fl.load_state_dict(real, fl.state_dict(tree["state"]), convert=True))
        assert same(fl.load_state_dict(state, fl.state_dict(tree["state"])), tree["state"])


def test_behind_a_link(tmp_path: Path) -> None:
    fl.checkpoint.save(tmp_path / "a", {"n": 1})
    (tmp_path / "last").symlink_to("a")
    fl.checkpoint.save(tmp_path / "last", {"n": 2})
    assert fl.checkpoint.load(tmp_path / "last", {"n": 0}) == fl.checkpoint.load(tmp_path / "a", {"n": 0}) == {"n": 2}
    assert names_in(tmp_path) == ["a", "last"]


def test_folders_of_others(tmp_path: Path) -> None:
    """Names that look like a save's, and folders of a save's names with something else in them."""
    path = tmp_path / "a"
    mine = [tmp_path / name / "notes" for name in ("a.previous", "a.partial", "a.checkpoint-previous", ".a")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("mine")
    for _ in range(2):
        fl.checkpoint.save(path, {"n": 1})
    assert [file.read_text() for file in mine] == ["mine"] * 4
    for folder in (_folder.partial(path), _folder.previous(path)):
        folder.mkdir()
        (folder / "notes").write_text("mine")
        message = f"checkpoint.save: '{folder}' must be what a save left, or nothing; move it away"
        refuses(ValueError, message, lambda: fl.checkpoint.save(path, {"n": 2}))
        assert (folder / "notes").read_text() == "mine"
        folder.rename(tmp_path / f"moved{folder.name}")
        assert fl.checkpoint.load(path, {"n": 0}) == {"n": 1}


def test_stock_dcp_reads_the_tensors(tmp_path: Path) -> None:
    """The names in the file are those that torch gives to nested dicts."""
    tree = make_tree()
    fl.checkpoint.save(tmp_path / "a", tree)
    target = {"params": {"w": torch.zeros(64, 64)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=str(tmp_path / "a"))
    assert torch.equal(target["params"]["w"], tree["params"]["w"])


def test_another_format_is_converted_on_request(tmp_path: Path) -> None:
    tree = make_tree()
    fl.checkpoint.save(tmp_path / "a", tree)
    for has in ("root4", "dynamic8", "bfloat16", "companded8"):
        other = {**make_tree(has, 0), "state": fl.adam8bit(0.1, format=has, block_size=32).init(make_params())}
        if has != "companded8":
            message = (
                f"checkpoint.load: leaf 'state.0.mu.w' was saved with format 'companded8', but the state has {has!r}; "
                "pass convert=True to convert it"
            )
            refuses(ValueError, message, lambda other=other: fl.checkpoint.load(tmp_path / "a", other))
        loaded = fl.checkpoint.load(tmp_path / "a", other, convert=True)
        wanted = fl.load_state_dict(other["state"], fl.state_dict(tree["state"]), convert=True)
        assert same(loaded["state"], wanted)
        assert same(loaded["params"], tree["params"])
    plain = {**make_tree(steps=0), "state": fl.adam(0.1).init(make_params())}
    loaded = fl.checkpoint.load(tmp_path / "a", plain, convert=True)
    assert torch.equal(loaded["state"][0].nu["w"], tree["state"][0].nu["w"].dequantize())
    fl.checkpoint.save(tmp_path / "b", loaded)
    back = fl.checkpoint.load(tmp_path / "b", make_tree(steps=0), convert=True)
    assert same(back["state"], tree["state"])  # float32 holds all that 8 bits did


OTHER_TREES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a leaf more here": (
        lambda t: {**t, "extra": {**t["extra"], "x": 1}},
        "saved has no leaf 'extra.x', which the state has",
    ),
    "a leaf more there": (
        lambda t: {**t, "params": {"w": t["params"]["w"]}},
        "saved has a leaf 'params.b', which the state has not",
    ),
    "another shape": (
        lambda t: {**t, "params": {**t["params"], "b": torch.ones(4)}},
        "leaf 'params.b' was saved with shape [3], but the state has [4]",
    ),
    "another dtype": (
        lambda t: {**t, "params": {**t["params"], "b": torch.ones(3).bfloat16()}},
        "leaf 'params.b' was saved with dtype 'float32', but the state has 'bfloat16'",
    ),
    "another kind": (
        lambda t: {**t, "extra": {**t["extra"], "epoch": torch.tensor(1)}},
        "leaf 'extra.epoch' was saved with kind 'int', but the state has 'tensor'",
    ),
}


@pytest.mark.parametrize("name", OTHER_TREES)
def test_another_tree(name: str, tmp_path: Path) -> None:
    change, message = OTHER_TREES[name]
    fl.checkpoint.save(tmp_path / "a", make_tree())
    fresh = change(make_tree(steps=0))
    before = clone(fresh)
    refuses(ValueError, f"checkpoint.load: {message}", lambda: fl.checkpoint.load(tmp_path / "a", fresh, convert=True))
    assert same(fresh, before)


def _stock(folder: Path, saved: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(saved, checkpoint_id=str(folder))


def test_files_that_checkpoint_save_did_not_write(tmp_path: Path) -> None:
    """Metadata is compared, so that torch casts no dtype and cuts no shape on the way in."""
    folder, state = tmp_path / "a", make_tree()["state"]
    saved = fl.state_dict(state)
    fresh = fl.adam8bit(0.1).init(make_params())
    for changes, message in (
        ({"0.mu.b": torch.ones(3).bfloat16()}, "'0.mu.b' must have dtype torch.float32, got torch.bfloat16"),
        ({"0.nu.w.codes": torch.ones(3, 64).byte()}, "'0.nu.w.codes' must have shape (64, 64), got (3, 64)"),
        ({"0.nu.w.scales": "a"}, "'0.nu.w.scales' must be a tensor, got object"),
        ({"more": torch.ones(3)}, "saved has an entry 'more', which its schema does not list"),
        ({"schema": "{"}, "the entry 'schema' is no JSON: Expecting property name enclosed in double quotes: line 1 "
         "column 2 (char 1); the file is damaged"),
        ({"schema": json.dumps({"version": 4, "library": "4.0.0"})},
         f"the schema has version 4, written by functional_lowbit 4.0.0; functional_lowbit {fl.__version__} reads "
         "version 3; use the newer library"),
    ):  # fmt: skip
        _stock(folder / message[:20], {**saved, **changes})
        refuses(ValueError, f"checkpoint.load: {message}", lambda m=message: fl.checkpoint.load(folder / m[:20], fresh))
    _stock(folder / "less", {k: v for k, v in saved.items() if k != "0.mu.w.scales"})
    message = "checkpoint.load: saved has no entry '0.mu.w.scales', which its schema lists"
    refuses(ValueError, message, lambda: fl.checkpoint.load(folder / "less", fresh))
    _stock(folder / "other", {"w": torch.ones(2)})
    message = f"checkpoint.load: '{folder / 'other'}' has no entry 'schema'; it must come from checkpoint.save"
    refuses(ValueError, message, lambda: fl.checkpoint.load(folder / "other", fresh))
    _stock(folder / "flat", saved)
    assert same(fl.checkpoint.load(folder / "flat", fresh), state)
