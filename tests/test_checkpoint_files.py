"""checkpoint.save and load in one process: what is read is what was written, and no damage goes unnoticed."""

import json
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import clone, random_like, refuses, run_pure, run_step, same
from torch import nn

import functional_lowbit as fl
from functional_lowbit.checkpoint import _folder


def _params() -> dict[str, Any]:
    return random_like({"w": torch.empty(64, 64), "b": torch.empty(3)}, 0)


def _tree(format: str = "companded8", steps: int = 2) -> dict[str, Any]:
    tx = fl.adam8bit(0.1, format=format)
    params, state = run_pure(tx, _params(), [random_like(_params(), t) for t in range(steps)])
    return {"params": params, "state": state, "extra": {"epoch": steps, "name": "a", "loss": 0.5, "done": False}}


def _names(folder: Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir())


@pytest.mark.parametrize("format", fl.formats.names())
def test_what_is_read_is_what_was_written(format: str, tmp_path: Path) -> None:
    tree, fresh = _tree(format), _tree(format, 0)
    before = clone((tree, fresh))
    fl.checkpoint.save(tmp_path / "new" / "one", tree)
    loaded = fl.checkpoint.load(str(tmp_path / "new" / "one"), fresh)
    assert same(loaded, tree)
    assert same((tree, fresh), before)
    assert _names(tmp_path / "new") == ["one"]
    assert _names(tmp_path / "new" / "one") == [".metadata", "__0_0.distcp"]
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
    half = fl.tree.cast(_params(), torch.bfloat16)
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
        tree = _tree(format)
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
    assert _names(tmp_path) == ["a", "last"]


def test_async_save_is_of_the_moment(tmp_path: Path) -> None:
    """Later steps write into the same buffers; the file has what was there when it was asked for."""
    tree = _tree()
    wanted = clone(tree)
    first = fl.checkpoint.async_save(tmp_path / "a", tree)
    second = fl.checkpoint.async_save(tmp_path / "b", tree)
    for x in (tree["params"]["w"], tree["state"][0].mu["w"].codes, tree["state"][0].step):
        x.zero_()
    assert first.result() is None
    assert second.result() is None
    for name in ("a", "b"):
        assert same(fl.checkpoint.load(tmp_path / name, _tree(steps=0)), wanted)
    assert _names(tmp_path) == ["a", "b"]


def test_async_save_fails_in_its_future(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    failed = fl.checkpoint.async_save(tmp_path / "file" / "x", _tree())
    with pytest.raises(OSError, match=r"^checkpoint.async_save: cannot write at '.*/file/x': \[Errno 20\] ") as caught:
        failed.result()
    assert [(x.name, x.levelname, x.getMessage()) for x in caplog.records] == [
        ("functional_lowbit.checkpoint", "WARNING", str(caught.value))  # which also tells who asks no future
    ]
    refuses(
        TypeError,
        "state_dict: leaf 'x' must be a tensor, a bool, a number or a string, got object",
        lambda: fl.checkpoint.async_save(tmp_path / "a", {"x": object()}),
    )


def test_one_path_is_not_written_twice_at_once(tmp_path: Path) -> None:
    big = {"w": torch.ones(4_000_000)}  # takes longer to write than to ask again
    running = fl.checkpoint.async_save(tmp_path / "a", big)
    for call, speaker in ((fl.checkpoint.save, "save"), (fl.checkpoint.async_save, "async_save")):
        message = (
            f"checkpoint.{speaker}: '{tmp_path / 'a'}' is being written by another save; wait for its result first"
        )
        refuses(ValueError, message, lambda call=call: call(tmp_path / "a", big))
    running.result()
    saving = threading.Thread(target=fl.checkpoint.save, args=(tmp_path / "a", big))
    saving.start()
    while tmp_path / "a" not in fl.checkpoint._running:
        assert saving.is_alive()
    message = f"checkpoint.save: '{tmp_path}/a' is being written by another save; wait for its result first"
    refuses(ValueError, message, lambda: fl.checkpoint.save(tmp_path / "a", big))
    saving.join()
    fl.checkpoint.save(tmp_path / "a", big)


WRITER = """
import sys, torch, functional_lowbit as fl
fl.checkpoint.save(sys.argv[1], {"w": torch.ones(4_000_000)})
"""


def test_one_path_is_not_written_by_two_processes(tmp_path: Path) -> None:
    """One is stopped while it writes; a killed one keeps nobody out (`test_killed_at_any_moment`)."""
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        while not _folder.partial(path).exists() or not any(_folder.partial(path).iterdir()):
            assert writer.poll() is None
        writer.send_signal(signal.SIGSTOP)
        try:
            message = f"checkpoint.save: '{path}' is being written by another process; one at a time may do so"
            refuses(ValueError, message, lambda: fl.checkpoint.save(path, {"w": torch.zeros(2)}))
        finally:
            writer.send_signal(signal.SIGCONT)
        assert writer.wait(60) == 0
    assert fl.checkpoint.load(path, {"w": torch.zeros(4_000_000)})["w"].eq(1).all()
    fl.checkpoint.save(path, {"w": torch.zeros(2)})
    assert _names(tmp_path) == ["a"]


FORKED = """
import os, sys, torch, functional_lowbit as fl
torch.set_num_threads(1)
one, two = ({"w": torch.full((1_000_000,), float(n))} for n in (1, 2))
saving = fl.checkpoint.async_save(sys.argv[1] + "/a", one)
child = os.fork()
if child == 0:
    fl.checkpoint.async_save(sys.argv[1] + "/b", two).result()
    os._exit(0)
saving.result()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for name in "ab":
    print(fl.checkpoint.load(sys.argv[1] + "/" + name, one)["w"].unique().item())
"""


def test_a_forked_child_writes_by_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(tmp_path)],
        check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1.0", "2.0"]


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
    tree = _tree()
    fl.checkpoint.save(tmp_path / "a", tree)
    target = {"params": {"w": torch.zeros(64, 64)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=str(tmp_path / "a"))
    assert torch.equal(target["params"]["w"], tree["params"]["w"])


def test_another_format_is_converted_on_request(tmp_path: Path) -> None:
    tree = _tree()
    fl.checkpoint.save(tmp_path / "a", tree)
    for has in ("root4", "dynamic8", "bfloat16", "companded8"):
        other = {**_tree(has, 0), "state": fl.adam8bit(0.1, format=has, block_size=32).init(_params())}
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
    plain = {**_tree(steps=0), "state": fl.adam(0.1).init(_params())}
    loaded = fl.checkpoint.load(tmp_path / "a", plain, convert=True)
    assert torch.equal(loaded["state"][0].nu["w"], tree["state"][0].nu["w"].dequantize())
    fl.checkpoint.save(tmp_path / "b", loaded)
    back = fl.checkpoint.load(tmp_path / "b", _tree(steps=0), convert=True)
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
    fl.checkpoint.save(tmp_path / "a", _tree())
    fresh = change(_tree(steps=0))
    before = clone(fresh)
    refuses(ValueError, f"checkpoint.load: {message}", lambda: fl.checkpoint.load(tmp_path / "a", fresh, convert=True))
    assert same(fresh, before)


def _stock(folder: Path, saved: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(saved, checkpoint_id=str(folder))


def test_files_that_checkpoint_save_did_not_write(tmp_path: Path) -> None:
    """Metadata is compared, so that torch casts no dtype and cuts no shape on the way in."""
    folder, state = tmp_path / "a", _tree()["state"]
    saved = fl.state_dict(state)
    fresh = fl.adam8bit(0.1).init(_params())
    for changes, message in (
        ({"0.mu.b": torch.ones(3).bfloat16()}, "'0.mu.b' must have dtype torch.float32, got torch.bfloat16"),
        ({"0.nu.w.codes": torch.ones(3, 64).byte()}, "'0.nu.w.codes' must have shape (64, 64), got (3, 64)"),
        ({"0.nu.w.scales": "a"}, "'0.nu.w.scales' must be a tensor, got object"),
        ({"more": torch.ones(3)}, "saved has an entry 'more', which its schema does not list"),
        ({"schema": "{"}, "the entry 'schema' is no JSON: Expecting property name enclosed in double quotes: line 1 "
         "column 2 (char 1); the file is damaged"),
        ({"schema": json.dumps({"version": 3, "library": "4.0.0"})},
         f"the schema has version 3, written by functional_lowbit 4.0.0; functional_lowbit {fl.__version__} reads "
         "versions 1 to 2; use the newer library"),
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


# Damage.


def _cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def test_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    message = f"checkpoint.load: there is no checkpoint at '{path}'"
    refuses(FileNotFoundError, message, lambda: fl.checkpoint.load(path, _tree(steps=0)))


def test_damaged_files(tmp_path: Path) -> None:
    path, fresh = tmp_path / "a", _tree(steps=0)
    data, metadata = path / "__0_0.distcp", path / ".metadata"
    fl.checkpoint.save(path, _tree())
    whole = data.stat().st_size
    before = clone(fresh)

    _cut(data, whole - 1)
    message = f"checkpoint.load: the file '{data}' is truncated: it has {whole - 1} bytes of {whole}"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, fresh))
    data.unlink()
    refuses(
        ValueError,
        f"checkpoint.load: the file '{data}' of the checkpoint is missing",
        lambda: fl.checkpoint.load(path, fresh),
    )
    data.write_bytes(b"\0" * whole)
    with pytest.raises(ValueError, match=rf"^checkpoint.load: cannot read '{path}', a file is damaged: "):
        fl.checkpoint.load(path, fresh)
    _cut(metadata, metadata.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"^checkpoint.load: cannot read '{metadata}', the file is damaged: "):
        fl.checkpoint.load(path, fresh)
    metadata.unlink()
    message = f"checkpoint.load: '{path}' is no complete checkpoint: it has no .metadata, which is written last"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, fresh))
    message = f"checkpoint.save: '{path}' must be a checkpoint or nothing yet; move away what is there"
    refuses(ValueError, message, lambda: fl.checkpoint.save(path, fresh))  # nor is anything overwritten
    assert same(fresh, before)


def test_a_part_that_no_rank_wrote(tmp_path: Path) -> None:
    """The files are as long as the metadata say, but these say nothing of the second half of a tensor."""
    path = tmp_path / "a"
    fl.checkpoint.save(path, _tree())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    part = metadata.state_dict_metadata["params.w"].chunks[0]
    part.sizes = torch.Size([32, 64])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    message = f"checkpoint.load: the entry 'params.w' of '{path}' is not whole; a rank did not write its part"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, _tree(steps=0)))


def test_spoilt_metadata(tmp_path: Path) -> None:
    """They unpickle, but what comes of it lacks something or has another type."""
    path, file = tmp_path / "a", tmp_path / "a" / ".metadata"
    fl.checkpoint.save(path, _tree())
    whole = file.read_bytes()
    message = rf"^checkpoint.load: cannot read '{file}', the file is damaged: "
    for was, has in (
        (b"properties", b"propertiet"),
        (b"state_dict_metadata", b"state_dict_metadatb"),
        (b"relative_path", b"relative_pati"),
        (b"float32", b"strided"),
        (b"chunks", b"chunkt"),
    ):
        assert was in whole
        file.write_bytes(whole.replace(was, has))
        with pytest.raises(ValueError, match=message):
            fl.checkpoint.load(path, _tree(steps=0))


def test_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves between the look at a checkpoint and the reading of its numbers: no mixture of two is loaded."""
    path, read, waiting = tmp_path / "a", fl.checkpoint._read, []

    def later(speaker: str, folder: Path, metadata: Any, wanted: dict[str, Any]) -> Any:
        if "w" in wanted and waiting:
            fl.checkpoint.save(path, waiting.pop(0))
        return read(speaker, folder, metadata, wanted)

    monkeypatch.setattr(fl.checkpoint, "_read", later)
    one, two, three = ({"w": torch.full((9,), float(n)), "n": n} for n in (1, 2, 3))
    fl.checkpoint.save(path, one)
    waiting[:] = [two]
    assert same(fl.checkpoint.load(path, {"w": torch.zeros(9), "n": 0}), two)
    waiting[:] = [three, one]
    message = (
        f"checkpoint.load: '{path}' was replaced while it was read, twice, or is another one on another rank; load it "
        "when nothing is saved there, from a disk that all ranks see"
    )
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, {"w": torch.zeros(9), "n": 0}))
    assert not waiting


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    """The disk as it is then: the old one renamed, the new one not yet."""
    path, old, new = tmp_path / "a", _tree(), _tree(steps=3)
    fl.checkpoint.save(path, new)
    path.rename(_folder.partial(path))
    fl.checkpoint.save(path, old)
    _folder.partial(path).mkdir(exist_ok=True)
    path.rename(_folder.previous(path))
    assert same(fl.checkpoint.load(path, _tree(steps=0)), old)
    path.mkdir()  # as many a program does before it looks for a checkpoint
    assert same(fl.checkpoint.load(path, _tree(steps=0)), old)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\] File too large; what was saved there before is untouched"):
            fl.checkpoint.save(path, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(fl.checkpoint.load(path, _tree(steps=0)), old)
    fl.checkpoint.save(path, new)
    assert same(fl.checkpoint.load(path, _tree(steps=0)), new)
    assert _names(tmp_path) == ["a"]


KILLER = """
import os, signal, sys, time, torch, functional_lowbit as fl
torch.set_num_threads(1)
for k in range(20):
    path = f"{sys.argv[1]}/{k}/a"
    saved, say = os.pipe()
    saver = os.fork()
    if saver == 0:
        fl.checkpoint.save(path, {"w": torch.zeros(100)})
        os.write(say, b".")
        while True:
            fl.checkpoint.save(path, {"w": torch.ones(100)})
            fl.checkpoint.save(path, {"w": torch.zeros(100)})
    assert os.read(saved, 1) == b"."
    time.sleep(0.0013 * k)
    os.kill(saver, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]) == -signal.SIGKILL
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """One that saves without a pause is killed; each time there is a whole checkpoint, and the next save tidies up."""
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True, timeout=120)
    left = set()
    for k in range(20):
        path = tmp_path / str(k) / "a"
        left |= set(_names(path.parent))
        loaded = fl.checkpoint.load(path, {"w": torch.full((100,), 7.0)})["w"]
        assert loaded.eq(loaded[0]).all()
        assert loaded[0] in (0, 1)
        fl.checkpoint.save(path, {"w": torch.full((100,), 2.0)})
        assert fl.checkpoint.load(path, {"w": loaded})["w"].eq(2).all()
        assert _names(path.parent) == ["a"]
    assert ".a.checkpoint-partial" in left  # some were killed while they wrote


def test_read_only(tmp_path: Path) -> None:
    tree = _tree()
    before = clone(tree)
    for place in ("/proc", "/sys"):  # not even root makes folders there
        with pytest.raises(OSError, match=rf"^checkpoint.save: cannot write at '{place}/a': \[Errno \d+\] "):
            fl.checkpoint.save(f"{place}/a", tree)
    name = "x" * 300
    for call, what in ((fl.checkpoint.save, "save: cannot write at"), (fl.checkpoint.load, "load: cannot read")):
        with pytest.raises(OSError, match=rf"^checkpoint.{what} '{tmp_path}/{name}': \[Errno 36\] File name too long"):
            call(tmp_path / name, tree)
    assert same(tree, before)


FORBIDDEN = """
import os, shutil, tempfile, torch, functional_lowbit as fl
folder, tree = tempfile.mkdtemp(), {"w": torch.ones(2)}  # where others may go too
try:
    fl.checkpoint.save(folder + "/a", tree)
    if os.getuid() == 0:  # root may write anywhere
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    for mode, call in ((0o500, fl.checkpoint.save), (0, fl.checkpoint.load)):
        os.chmod(folder, mode)
        try:
            call(folder + "/a", tree)
        except OSError as error:
            print(str(error).replace(folder, ""))
    os.chmod(folder, 0o700)
    print(os.listdir(folder))
finally:
    os.seteuid(os.getuid())
    shutil.rmtree(folder)
"""


def test_a_folder_without_permission() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "checkpoint.save: cannot write at '/a': [Errno 13] Permission denied: '/.a.checkpoint-partial'",
        "checkpoint.load: cannot read '/a': [Errno 13] Permission denied: '/a/.metadata'",
        "['a']",
    ]


FULL = """
import os, sys, torch, functional_lowbit as fl
path = sys.argv[1] + "/a"
fl.checkpoint.save(path, {"w": torch.zeros(100)})
big = {"w": torch.ones(1 << 18)}
for call in (fl.checkpoint.save, lambda *args: fl.checkpoint.async_save(*args).result()):
    try:
        call(path, big)
    except OSError as error:
        print(error)
print(os.listdir(sys.argv[1]), fl.checkpoint.load(path, {"w": torch.ones(100)})["w"].abs().max().item())
print(big["w"].min().item())
"""


def test_a_full_disk(tmp_path: Path, small_disk: Callable[..., str]) -> None:
    lines = small_disk(tmp_path, FULL).splitlines()
    for line, speaker in zip(lines[:2], ("save", "async_save"), strict=True):
        assert line == (
            f"checkpoint.{speaker}: could not write '{tmp_path}/a': [Errno 28] No space left on device; "
            "what was saved there before is untouched"
        )
    assert lines[2:] == ["['a'] 0.0", "1.0"]
