"""`convert`: what it refuses; and what it writes is whole or not there."""

import os
import resource
from collections import OrderedDict

import pytest
import torch
from cli_files import command, converted, fresh, params, refused, state_of, torch_file

import functional_lowbit as fl
from functional_lowbit.cli._rewritten import first_difference, replaced


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


def test_a_state_without_moments(capsys, tmp_path):
    torch.save(fl.state_dict(fl.sgd(0.1).init(params())), tmp_path / "a.pt")
    text = "the state has no moments, so there is nothing to convert; make a new optimizer of torch.optim"
    refused(capsys, 2, text, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")


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
