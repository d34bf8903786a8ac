"""`inspect`: what it says of each kind of checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_files import (
    bitsandbytes_like,
    command,
    inspected,
    leaves,
    optimizer_of,
    params,
    state_of,
    torch_adamw,
    torch_file,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import functional_lowbit as fl

MEASURED = ("min", "max", "abs_max", "zeros", "nan", "inf")


def measured(x):
    """What `inspect` should say of these numbers."""
    return dict(
        zip(MEASURED, (float(x.min()), float(x.max()), float(x.abs().max()), int((x == 0).sum()), 0, 0), strict=True)
    )


@pytest.mark.parametrize("format", fl.formats.names())
def test_the_numbers_of_every_format_are_those_that_dequantize_gives(capsys, tmp_path, format):
    state = state_of(format)
    torch_file(tmp_path / "x.pt", state)
    document = inspected(capsys, tmp_path / "x.pt")
    assert (document["kind"], document["broken"], document["damaged"]) == ("file of torch.save", 0, [])
    assert (document["states"][0]["where"], document["states"][0]["library"]) == ("optimizer", "functional-lowbit")
    found, mu, nu = leaves(document), state[1][0].mu, state[1][0].nu
    assert sorted(found) == ["1.0.mu.b", "1.0.mu.w", "1.0.nu.b", "1.0.nu.w", "1.0.step"]
    for name, tree in (("mu", mu), ("nu", nu)):
        w = tree["w"].dequantize() if format != "float32" else tree["w"]
        assert {key: found[f"1.0.{name}.w"][key] for key in MEASURED} == measured(w)
        assert {key: found[f"1.0.{name}.b"][key] for key in MEASURED} == measured(tree["b"])
        assert found[f"1.0.{name}.w"]["format"] == format
        assert found[f"1.0.{name}.w"]["shape"] == [64, 128]
    report = fl.describe(state)
    assert {path: leaf["bytes"] for path, leaf in found.items()} == {row.path: row.bytes for row in report.rows}


def test_padding_is_not_counted(capsys, tmp_path):
    state = fl.quantize(torch.ones(31, 257), "companded8")  # rows of 129 + 128, padded to 258
    torch.save({"optimizer": fl.state_dict({"m": state})}, tmp_path / "x.pt")
    leaf = leaves(inspected(capsys, tmp_path / "x.pt"))["m"]
    assert (leaf["numbers"], leaf["zeros"], leaf["min"]) == (31 * 257, 0, 1.0)


def test_folders_safetensors_and_files_say_the_same(capsys, tmp_path):
    state = state_of()
    torch.save(fl.state_dict(state), tmp_path / "x.pt")
    fl.checkpoint.save(tmp_path / "folder", state)
    fl.checkpoint.save_safetensors(state, tmp_path / "x.safetensors")
    documents = [inspected(capsys, tmp_path / name) for name in ("x.pt", "folder", "x.safetensors")]
    assert [d["kind"] for d in documents] == ["file of torch.save", "checkpoint folder", "safetensors file"]
    first, *others = (d["states"] for d in documents)
    assert all(other == first for other in others)


def test_a_whole_training_in_a_folder(capsys, tmp_path):
    tree = {"params": params(), "state": state_of(), "epoch": 3, "name": "x"}
    fl.checkpoint.save(tmp_path / "folder", tree)
    found = leaves(inspected(capsys, tmp_path / "folder"))
    assert found["epoch"]["format"] == "int"
    assert found["name"]["format"] == "str"
    assert {key: found["params.w"][key] for key in MEASURED} == measured(params()["w"])
    assert found["state.1.0.mu.w"]["format"] == "companded8"


def dcp_folder(path):
    """What a training without fl.checkpoint saves: nested dicts, which torch flattens."""
    model = torch.nn.Linear(64, 64)
    ours, theirs = optimizer_of(model, fl.adamw8bit(1e-3)), torch_adamw(model)
    tree = {
        "ours": get_optimizer_state_dict(model, ours),
        "theirs": get_optimizer_state_dict(model, theirs),
        "train": {"state": fl.state_dict(state_of()), "epoch": 1},
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled, unavailable or uninitialized"):
        dcp.save(tree, checkpoint_id=path)


def test_a_folder_of_torch_distributed_checkpoint(capsys, tmp_path):
    dcp_folder(tmp_path / "x")
    document = inspected(capsys, tmp_path / "x")
    assert [(s["where"], s["library"], s["count"]) for s in document["states"]] == [
        ("ours", "functional-lowbit", 6),
        ("theirs", "torch", 6),
        ("train.state", "functional-lowbit", 5),
    ]
    assert leaves(document)["weight.0.mu"]["format"] == "companded8"
    assert leaves(document, 1)["weight.exp_avg"]["shape"] == [64, 64]
    assert command(capsys, "convert", tmp_path / "x", tmp_path / "y", "--to", "root4") == (
        2,
        "",
        f"functional-lowbit convert: the state at 'ours' of {str(tmp_path / 'x')!r} was not saved by "
        "fl.checkpoint.save; load it with torch.distributed.checkpoint, and convert it with fl.convert.from_saved\n",
    )


def test_the_leaves_of_an_optimizer_are_named_after_its_parameters(capsys, tmp_path):
    optimizer = optimizer_of(torch.nn.Linear(64, 64), fl.adamw8bit(1e-3))
    torch.save({"optim": optimizer.state_dict()}, tmp_path / "x.pt")
    document = inspected(capsys, tmp_path / "x.pt")
    assert document["states"][0]["made_by"] == "fl.optim.Optimizer"
    assert list(leaves(document)) == [f"{p}.0.{field}" for p in ("weight", "bias") for field in ("mu", "nu", "step")]
    assert leaves(document)["weight.0.mu"]["format"] == "companded8"


def test_an_optimizer_of_ours_inside_a_tree(capsys, tmp_path):
    optimizer = optimizer_of(torch.nn.Linear(64, 64), fl.adamw8bit(1e-3))
    fl.checkpoint.save(tmp_path / "x", {"optim": optimizer.state_dict(), "epoch": 3})
    document = inspected(capsys, tmp_path / "x")
    assert document["states"][0]["made_by"].endswith("with fl.optim.Optimizer inside")
    assert leaves(document)["optim.state.0.0.mu"]["format"] == "companded8"
    assert leaves(document)["optim.state.0.0.mu"]["max"] == pytest.approx(0.1)
    assert leaves(document)["epoch"]["format"] == "int"
    assert command(capsys, "convert", tmp_path / "x", tmp_path / "y", "--to", "root4") == (
        2,
        "",
        "functional-lowbit convert: the state is that of an fl.optim optimizer inside a tree of fl.checkpoint; load it "
        "into one of the other format, with optimizer.load_state_dict(..., convert=True)\n",
    )


def test_the_state_of_torch(capsys, tmp_path):
    optimizer = torch_adamw(torch.nn.Linear(8, 8))
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    document = inspected(capsys, tmp_path / "x.pt")
    assert document["states"][0]["library"] == "torch"
    found = leaves(document)
    exact = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert {key: found["0.exp_avg"][key] for key in MEASURED} == measured(exact["exp_avg"])
    assert found["0.step"]["max"] == 2.0


def test_the_state_of_bitsandbytes(capsys, tmp_path):
    saved = bitsandbytes_like()
    torch.save(saved, tmp_path / "x.pt")
    document = inspected(capsys, tmp_path / "x.pt")
    assert document["states"][0]["library"] == "bitsandbytes"
    found = leaves(document)
    assert sorted(found) == ["0.state1", "0.state2", "0.step"]
    assert found["0.state1"]["block_size"] == 256
    assert (found["0.state1"]["min"], found["0.state1"]["max"]) == (-4.0, 4.0)  # the second block's scale is 4
    assert (found["0.state2"]["min"], found["0.state2"]["max"]) == (0.5, 1.0)


def test_what_else_is_in_the_file(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of())
    beside = inspected(capsys, tmp_path / "x.pt")["beside"]
    assert beside == [
        {"name": "step", "tensors": 0, "bytes": 0},
        {"name": "params", "tensors": 2, "bytes": 4 * (64 * 128 + 64)},
    ]


def test_the_table(capsys, tmp_path):
    torch.save(fl.state_dict({"m": torch.tensor([0.0, 2.0, -4.0, 0.5])}), tmp_path / "x.pt")
    ran = command(capsys, "inspect", tmp_path / "x.pt")
    assert (ran.status, ran.err) == (0, "")
    heading = f"fl.state_dict of version {fl.__version__} (functional-lowbit), 1 leaf, 16 bytes"
    size = (tmp_path / "x.pt").stat().st_size / 1000
    assert ran.out.splitlines() == [
        f"{tmp_path / 'x.pt'}: file of torch.save, {size:.2f} kB",
        "",
        heading,
        "path  format   shape  block  bytes  min  max  abs max  zeros  NaN  Inf",
        "m     float32  (4,)             16   -4    2        4  25.0%",
        "largest magnitude: 4, in m",
        "",
        "nothing is broken",
    ]
