"""`convert`: what it writes loads strictly, has the bits of a conversion in the library, and is whole or not there."""

import json
import os
import resource
from collections import OrderedDict

import pytest
import torch
from cli_files import bitsandbytes_like, command, optimizer_of, params, state_of, stepped, torch_adamw, torch_file
from helpers import same
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import functional_lowbit as fl
from functional_lowbit.cli._rewritten import replaced
from functional_lowbit.cli._same import first_difference


def converted(capsys, *argv):
    ran = command(capsys, "convert", "--json", *argv)
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def fresh(format):
    tx = fl.adamw(1e-3) if format == "float32" else fl.adamw8bit(1e-3, format=format)
    return fl.chain(fl.clip_by_global_norm(1.0), tx).init(params())


@pytest.mark.parametrize("after", fl.formats.names())
@pytest.mark.parametrize("before", ["companded8", "dynamic4", "float32"])
def test_every_format_loads_without_being_asked_to_convert(capsys, tmp_path, before, after):
    state = state_of(before) if before != "float32" else stepped(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw(1e-3)))
    saved = torch_file(tmp_path / "a.pt", state)
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", after)
    written = torch.load(tmp_path / "b.pt", weights_only=True)
    loaded = fl.load_state_dict(fresh(after), written["optimizer"])
    assert same(loaded, fl.load_state_dict(fresh(after), saved["optimizer"], convert=True))
    assert same(written["params"], saved["params"])
    assert written["step"] == 3
    exact = before == after or after == "float32"
    assert (document["states"][0]["largest_relative_error"] == 0) == exact
    assert document["verified"]


def test_the_error_is_that_of_the_worst_leaf(capsys, tmp_path):
    state = state_of()
    torch_file(tmp_path / "a.pt", state)
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")["states"][0]
    loaded = fl.load_state_dict(fresh("root4"), torch.load(tmp_path / "b.pt")["optimizer"])
    errors = {}
    for field in ("mu", "nu"):
        old, new = (getattr(s[1][0], field)["w"].dequantize().double() for s in (state, loaded))
        errors[f"1.0.{field}.w"] = float((new - old).norm() / old.norm())
    found = {x["path"]: x["relative_error"] for x in document["leaves"] if x["relative_error"]}
    assert found == pytest.approx(errors, rel=1e-12)  # sums of float64 in another order
    assert document["worst_leaf"] == max(errors, key=lambda path: errors[path])


def test_a_folder(capsys, tmp_path):
    tree = {"params": params(), "state": state_of(), "epoch": 3}
    fl.checkpoint.save(tmp_path / "a", tree)
    assert converted(capsys, tmp_path / "a", tmp_path / "b", "--to", "dynamic8")["kind"] == "checkpoint folder"
    like = {**tree, "state": fresh("dynamic8"), "epoch": 0}
    loaded = fl.checkpoint.load(tmp_path / "b", like)
    assert same(loaded, fl.checkpoint.load(tmp_path / "a", like, convert=True))
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_safetensors_file(capsys, tmp_path):
    state = state_of()
    fl.checkpoint.save_safetensors(state, tmp_path / "a.safetensors")
    converted(capsys, tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--to", "e4m3")
    loaded = fl.checkpoint.load_safetensors(fresh("e4m3"), tmp_path / "b.safetensors")
    assert same(loaded, fl.load_state_dict(fresh("e4m3"), fl.state_dict(state), convert=True))
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_an_optimizer_of_ours(capsys, tmp_path):
    model = torch.nn.Linear(128, 64)
    saved = {"optim": optimizer_of(model, fl.adamw8bit(1e-3)).state_dict(), "epoch": 1}
    torch.save(saved, tmp_path / "a.pt")
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    wanted = fl.optim.Optimizer(model.named_parameters(), fl.adamw4bit(1e-3), backend="eager")
    wanted.load_state_dict(saved["optim"], convert=True)
    strict = fl.optim.Optimizer(model.named_parameters(), fl.adamw4bit(1e-3), backend="eager")
    strict.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True)["optim"])
    assert same(strict.state_dict()["state"], wanted.state_dict()["state"])


def test_a_state_of_torch(capsys, tmp_path):
    model = torch.nn.Linear(128, 64)
    saved = torch_adamw(model).state_dict()
    torch.save({"optimizer": saved, "model": model.state_dict()}, tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "companded8", "--from", "torch")
    assert document["states"][0]["how_to_load"] == (
        "load it into a state of fl.adamw8bit(..., format='companded8'), or with fl.convert.from_saved into any other"
    )
    own = {"0": model.weight.detach(), "1": model.bias.detach()}
    loaded = fl.load_state_dict(fl.adamw8bit(1e-3).init(own), torch.load(tmp_path / "b.pt")["optimizer"])
    assert same(loaded, fl.convert.from_torch(saved, fl.adamw8bit(1e-3).init(own), own))


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "sgd8bit"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "adamw8bit"),
    ],
)
def test_the_kind_of_a_foreign_optimizer_is_found(capsys, tmp_path, make, recipe):
    model = torch.nn.Linear(128, 64)
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    assert f"fl.{recipe}(" in document["states"][0]["how_to_load"]
    own = {"0": model.weight.detach(), "1": model.bias.detach()}
    tx = getattr(fl, recipe)(1e-3, format="root4")
    fl.load_state_dict(tx.init(own), torch.load(tmp_path / "b.pt"))


def test_a_state_of_bitsandbytes(capsys, tmp_path):
    saved = bitsandbytes_like()
    saved["param_groups"][0]["betas"] = (0.9, 0.999)
    torch.save(saved, tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "float32", "--min-size", "0")
    assert document["states"][0]["from"] == "bitsandbytes"
    mu = torch.load(tmp_path / "b.pt")["0.mu.0"]
    assert (float(mu.min()), float(mu.max())) == (-4.0, 4.0)


def test_back_to_torch_by_names(capsys, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    own = dict(model.named_parameters())
    grads = {name: torch.randn_like(p) for name, p in own.items()}
    _, state = fl.adamw8bit(1e-3).update(grads, fl.adamw8bit(1e-3).init(own), own)
    torch.save({"optimizer": fl.state_dict(state)}, tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    assert "set_optimizer_state_dict" in document["states"][0]["how_to_load"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_optimizer_state_dict(model, optimizer, torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"])
    for name, p in own.items():
        mu = state[0].mu[name]
        mu = mu if isinstance(mu, torch.Tensor) else mu.dequantize()
        assert torch.equal(optimizer.state[p]["exp_avg"], mu)
        assert optimizer.state[p]["step"] == 1


def test_bitsandbytes_to_torch(capsys, tmp_path):
    saved = bitsandbytes_like()
    saved["param_groups"][0] |= {"lr": 0.5, "betas": (0.9, 0.99)}
    torch.save(saved, tmp_path / "a.pt")
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    p = torch.nn.Parameter(torch.zeros(512))
    optimizer = torch.optim.AdamW([p])
    optimizer.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True))
    assert (optimizer.param_groups[0]["lr"], optimizer.state[p]["step"]) == (0.5, 7)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], torch.tensor([1.0, 0.5]).repeat_interleave(256))
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_lion_has_no_place_in_torch(capsys, tmp_path):
    torch.save({"optimizer": fl.state_dict(stepped(fl.lion8bit(1e-3)))}, tmp_path / "a.pt")
    refused(
        capsys,
        2,
        "torch.optim has no optimizer that keeps a first moment alone, as Lion does; convert to a format",
        *(tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch"),
    )


def test_back_to_torch_from_an_optimizer_keeps_the_order(capsys, tmp_path):
    model = torch.nn.Linear(128, 64)
    ours = optimizer_of(model, fl.adamw8bit(1e-3))
    torch.save(ours.state_dict(), tmp_path / "a.pt")
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    optimizer = torch.optim.AdamW(model.named_parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True))
    assert optimizer.state[model.bias]["exp_avg"].shape == (64,)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], torch.full((64, 128), 0.1))


def test_to_torch_and_back_is_exact(capsys, tmp_path):
    saved = torch_file(tmp_path / "a.pt", state_of())
    converted(capsys, tmp_path / "a.pt", tmp_path / "torch.pt", "--to", "torch")
    converted(capsys, tmp_path / "torch.pt", tmp_path / "c.pt", "--to", "companded8")
    loaded = fl.load_state_dict(fl.adamw8bit(1e-3).init(params()), torch.load(tmp_path / "c.pt")["optimizer"])
    wanted = fl.load_state_dict(fresh("companded8"), saved["optimizer"])
    assert same(loaded[0], wanted[1][0])


def test_a_folder_to_torch_is_a_file(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "a", {"params": params(), "state": state_of()})
    assert converted(capsys, tmp_path / "a", tmp_path / "b.pt", "--to", "torch")["kind"] == "file of torch.save"
    assert sorted(torch.load(tmp_path / "b.pt")["state"]) == ["b", "w"]


def test_block_and_minimal_sizes(capsys, tmp_path):
    torch_file(tmp_path / "a.pt", state_of())
    converted(
        capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "companded8", "--block-size", "64", "--min-size", "8"
    )
    tx = fl.low_bit(fl.adamw(1e-3), block_size=64, min_size=8)
    loaded = fl.load_state_dict(
        fl.chain(fl.clip_by_global_norm(1.0), tx).init(params()), torch.load(tmp_path / "b.pt")["optimizer"]
    )
    assert loaded[1][0].mu["b"].block_size == 64


def test_only_moments_are_converted(capsys, tmp_path):
    """Parameters have names of moments, and stay as they are."""
    tree = {"params": {"mu": {"weight": torch.ones(64, 128)}, "trace": torch.ones(64, 128)}, "state": state_of()}
    fl.checkpoint.save(tmp_path / "a", tree)
    converted(capsys, tmp_path / "a", tmp_path / "b", "--to", "root4")
    loaded = fl.checkpoint.load(tmp_path / "b", {**tree, "state": fresh("root4")})
    assert same(loaded["params"], tree["params"])


def test_the_text(capsys, tmp_path):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch_file(source, state_of())
    ran = command(capsys, "convert", source, target, "--to", "bfloat16")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{source} -> {target}: file of torch.save"
    assert lines[1] == "optimizer: functional_lowbit -> bfloat16, 2 of 5 leaves changed, 17.4 kB -> 33.3 kB"
    assert lines[2].startswith("largest relative error: 0.1")  # rounding to 8 bits of mantissa: 0.17% of the norm
    assert lines[2].endswith("% of the leaf's norm, in 1.0.nu.w")
    assert lines[3:] == [
        "load it as before, into a state of this format",
        "written, read again and compared: every bit is right",
    ]


def refused(capsys, status, text, *argv):
    assert command(capsys, "convert", *argv) == (status, "", f"functional-lowbit convert: {text}\n")


def test_nothing_is_overwritten_unless_forced(capsys, tmp_path):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch_file(source, state_of())
    target.write_text("precious")
    refused(capsys, 2, f"{str(target)!r} is there already; --force replaces it", source, target, "--to", "root4")
    assert target.read_text() == "precious"
    converted(capsys, source, target, "--to", "root4", "--force")
    assert "optimizer" in torch.load(target)
    refused(
        capsys, 2, f"{str(source)!r} is what is converted; write to another path", source, source, "--to", "root4",
        "--force",
    )  # fmt: skip


def test_a_folder_is_replaced_as_a_whole(capsys, tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    for path in (source, target):
        fl.checkpoint.save(path, state_of())
    converted(capsys, source, target, "--to", "root4", "--force")
    fl.checkpoint.load(target, fresh("root4"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("precious")
    refused(capsys, 2, f"{str(other)!r} is no checkpoint; move it away", source, other, "--to", "root4", "--force")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "other"]
    assert (other / "file").read_text() == "precious"


def test_places_that_cannot_be_written(capsys, tmp_path):
    source = tmp_path / "a.pt"
    torch_file(source, state_of())
    nowhere = tmp_path / "no" / "b.pt"
    refused(capsys, 2, f"there is no folder {str(nowhere.parent)!r} to write into", source, nowhere, "--to", "root4")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(
        capsys, 2, f"{str(folder)!r} is a folder, and what is written is a file; move it away", source, folder, "--to",
        "root4", "--force",
    )  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "folder"]


@pytest.mark.parametrize("name", ["x.pt", "folder", "x.safetensors"])
def test_a_full_disk_leaves_what_was_there(capsys, tmp_path, name):
    source, target = tmp_path / "source" / name, tmp_path / "target" / name
    state = state_of()
    for path in (source, target):
        path.parent.mkdir()
        if name == "folder":
            fl.checkpoint.save(path, state)
        elif name == "x.pt":
            torch_file(path, state)
        else:
            fl.checkpoint.save_safetensors(state, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        ran = command(capsys, "convert", source, target, "--to", "float32", "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"functional-lowbit convert: cannot write {str(target)!r}: ")
    assert "File too large" in ran.err  # what the system says
    assert ran.err.count("\n") == 1
    assert os.listdir(target.parent) == [name]
    assert command(capsys, "inspect", target).status == 0


def test_states_that_cannot_be_converted(capsys, tmp_path):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    at = repr(str(source))
    refused(capsys, 2, f"there is no {at}", source, target, "--to", "root4")
    torch.save({"w": torch.ones(2)}, source)
    refused(capsys, 2, f"{at} holds no optimizer state; see functional-lowbit inspect", source, target, "--to", "root4")
    torch_file(source, state_of())
    refused(
        capsys, 2, f"--from torchao: the state in {at} is from functional_lowbit", source, target, "--to", "root4",
        "--from", "torchao",
    )  # fmt: skip
    saved = torch.load(source)
    del saved["optimizer"]["1.0.mu.w.codes"]
    torch.save(saved, source)
    refused(
        capsys,
        1,
        "'1.0.mu.w': the entry '1.0.mu.w.codes' is missing; see functional-lowbit inspect",
        source,
        target,
        "--to",
        "root4",
    )
    saved["optimizer"]["stray"] = torch.ones(1)
    torch.save(saved, source)
    text = "'stray': the schema lists no such entry; see functional-lowbit inspect"
    refused(capsys, 1, text, source, target, "--to", "root4")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adadelta(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), source)
    ran = command(capsys, "convert", source, target, "--to", "root4")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.pt"]


class Seven(int):
    """A number that is 7 when it is read again."""

    def __reduce__(self):
        return int, (7,)


class Three:
    def __reduce__(self):
        return Seven, (3,)


def test_what_is_not_read_as_it_was_meant_is_not_put_there(capsys, tmp_path):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch_file(source, state_of(), epoch=Three())
    text = f"'epoch' was not written as it should be, so nothing was put at {str(target)!r}; try again"
    refused(capsys, 1, text, source, target, "--to", "root4", "--unsafe")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_tree_with_another_node():
    tree = {"a.b": {"c": [1, {"d": 2}]}, "a": {"b": 3}}
    assert replaced(tree, ("a.b", "c", 1, "d"), 4) == {"a.b": {"c": [1, {"d": 4}]}, "a": {"b": 3}}
    assert replaced(tree, (), 5) == 5
    assert tree["a.b"]["c"][1] == {"d": 2}
    ordered = replaced(OrderedDict(b=1, a=2), ("b",), 3)
    assert (type(ordered), list(ordered.items())) == (OrderedDict, [("b", 3), ("a", 2)])


def test_places_with_the_same_words(capsys, tmp_path):
    state = fl.state_dict(state_of())
    torch.save({"a.b": {"c": state}, "a": {"b": {"c": state}}, 0: state, "0": {"x": state}}, tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    assert len(document["states"]) == 4
    tree = torch.load(tmp_path / "b.pt")
    for found in (tree["a.b"]["c"], tree["a"]["b"]["c"], tree[0], tree["0"]["x"]):
        fl.load_state_dict(fresh("root4"), found)


BROKEN = {
    "1.0.mu.w.scales": (float("nan"), "'1.0.mu.w': 1 of 64 scales is NaN"),
    "1.0.nu.b": (-1.0, "'1.0.nu.b': 1 of 64 numbers is below 0, and never should be"),
}


@pytest.mark.parametrize("to", ["root4", "float32", "torch"])
def test_what_is_broken_is_not_made_whole(capsys, tmp_path, to):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    for name, (value, text) in BROKEN.items():
        saved = fl.state_dict(state_of())
        saved[name].view(-1)[0] = value
        torch.save(saved, source)
        refused(capsys, 1, f"{text}; see functional-lowbit inspect", source, target, "--to", to)
    saved = fl.state_dict(state_of())
    saved["1.0.mu.w.codes"] = saved["1.0.mu.w.codes"][:-1]
    torch.save(saved, source)
    text = "'1.0.mu.w': the entry '1.0.mu.w.codes' must have shape (64, 128), has (63, 128)"
    refused(capsys, 1, f"{text}; see functional-lowbit inspect", source, target, "--to", to)
    torch_file(source, state_of())
    stored = bytearray(source.read_bytes())
    stored[20_000] ^= 4  # inside the parameters
    source.write_bytes(stored)
    text = "the bytes of 'a/data/0' are not those that were written (their checksum says)"
    refused(capsys, 1, f"{text}; see functional-lowbit inspect", source, target, "--to", to)
    assert os.listdir(tmp_path) == ["a.pt"]
    converted(capsys, source, target, "--to", to, "--no-checksums")


def test_a_parameter_that_never_had_a_gradient_has_no_state_in_torch_either(capsys, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for p in model[1].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(torch.load(tmp_path / "b.pt"))
    old, new = optimizer.state_dict(), again.state_dict()
    assert new["param_groups"] == old["param_groups"]
    assert sorted(new["state"]) == [2, 3]
    for key in (2, 3):
        assert same(new["state"][key], old["state"][key])


def test_a_state_without_moments(capsys, tmp_path):
    torch.save(fl.state_dict(fl.sgd(0.1).init(params())), tmp_path / "a.pt")
    text = "the state has no moments, so there is nothing to convert; make a new optimizer of torch.optim"
    refused(capsys, 2, text, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")


def test_what_else_a_file_may_hold_is_copied(capsys, tmp_path):
    beside = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(2, device="meta"), "nan": float("nan")}
    torch_file(tmp_path / "a.pt", state_of(), **beside)
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["meta"].is_meta
    assert first_difference({"x": torch.eye(3).to_sparse()}, {"x": torch.eye(3)}) == "x"
    assert first_difference({"x": torch.eye(3).to_sparse()}, {"x": (2 * torch.eye(3)).to_sparse()}) == "x"


def test_a_device_is_not_replaced(capsys, tmp_path):
    source = tmp_path / "a.pt"
    torch_file(source, state_of())
    os.mkfifo(tmp_path / "pipe")
    text = f"{str(tmp_path / 'pipe')!r} is a pipe or a device; write to a file"
    refused(capsys, 2, text, source, tmp_path / "pipe", "--to", "root4", "--force")
    assert (tmp_path / "pipe").is_fifo()
    target = tmp_path / "b.safetensors"
    text = f"what is written is a file of torch.save, which must not be called {str(target)!r}"
    refused(capsys, 2, text, source, target, "--to", "root4")


def test_differences_are_found():
    a = {"x": [torch.zeros(2), 1.0], "y": "z", "nan": float("nan")}
    assert first_difference(a, {"x": [torch.zeros(2), 1.0], "y": "z", "nan": float("nan")}) is None
    assert first_difference(a, {"x": [-torch.zeros(2), 1.0], "y": "z", "nan": float("nan")}) == "x.0"  # other bits
    assert first_difference(a, {**a, "y": "w"}) == "y"
    assert first_difference(a, {"x": a["x"]}) == ""
    assert first_difference({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.bfloat16)}) == "x"
