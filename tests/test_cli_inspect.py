"""`inspect`: what it says of each kind of checkpoint, and every way in which one can be broken."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_files import bitsandbytes_like, command, optimizer_of, params, state_of, stepped, torch_adamw, torch_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import functional_lowbit as fl
from functional_lowbit.cli._leaves import never_written

MEASURED = ("min", "max", "abs_max", "zeros", "nan", "inf")


def inspected(capsys, path, *more, status=0):
    ran = command(capsys, "inspect", "--json", path, *more)
    assert (ran.status, ran.err) == (status, "")
    return json.loads(ran.out)


def leaves(document, state=0):
    return {leaf["path"]: leaf for leaf in document["states"][state]["leaves"]}


def problems(document):
    """Path to what is wrong with it."""
    state = document["states"][0]
    found = {x["path"]: [x["problem"]] for x in state["problems"]}
    return found | {leaf["path"]: leaf["problems"] for leaf in state["leaves"] if leaf["problems"]}


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


def broken_pt(tmp_path, change, tx=None):
    """A checkpoint in which an entry was changed."""
    saved = fl.state_dict(stepped(tx or fl.adamw8bit(1e-3)))
    change(saved)
    torch.save(saved, tmp_path / "broken.pt")
    return tmp_path / "broken.pt"


def poison(name, value, at=0):
    def change(saved):
        saved[name].view(-1)[at] = value

    return change


def swap(name, value):
    return lambda saved: saved.update({name: value})


CHANGES = {
    "a scale of NaN": (
        poison("0.mu.w.scales", float("nan")),
        {"0.mu.w": ["1 of 64 scales is NaN", "128 of 8,192 numbers are NaN"]},
    ),
    "a scale of Inf": (
        poison("0.nu.w.scales", float("inf")),
        {"0.nu.w": ["1 of 64 scales is Inf", "128 of 8,192 numbers are Inf"]},
    ),
    "a negative scale": (poison("0.mu.w.scales", -1.0, 5), {"0.mu.w": ["1 of 64 scales is below 0"]}),
    "a scale of 0": (poison("0.nu.w.scales", 0.0, 5), {"0.nu.w": ["1 of 64 scales is 0"]}),
    "a code of NaN": (poison("0.mu.w.codes", -128), {"0.mu.w": ["1 of 8,192 numbers is NaN"]}),
    "NaN in float32": (poison("0.mu.b", float("nan")), {"0.mu.b": ["1 of 64 numbers is NaN"]}),
    "Inf in float32": (poison("0.mu.b", float("-inf")), {"0.mu.b": ["1 of 64 numbers is Inf"]}),
    "a second moment below 0": (
        poison("0.nu.b", -1.0),
        {"0.nu.b": ["1 of 64 numbers is below 0, and never should be"]},
    ),
    "a counter below 0": (
        swap("0.step", torch.tensor(-1)),
        {"0.step": ["1 of 1 numbers is below 0, and never should be"]},
    ),
    "codes of another dtype": (
        swap("0.mu.w.codes", torch.zeros(64, 128)),
        {"0.mu.w": ["the entry '0.mu.w.codes' must be int8, is float32"]},
    ),
    "codes of another shape": (
        swap("0.mu.w.codes", torch.zeros(64, 5, dtype=torch.int8)),
        {"0.mu.w": ["the entry '0.mu.w.codes' must have shape (64, 128), has (64, 5)"]},
    ),
    "float32 of another shape": (
        swap("0.mu.b", torch.zeros(5)),
        {"0.mu.b": ["the entry '0.mu.b' must have shape (64,), has (5,)"]},
    ),
    "a number for a tensor": (swap("0.mu.b", 3), {"0.mu.b": ["the entry '0.mu.b' must be a tensor, is a int"]}),
    "a missing part": (
        lambda saved: saved.pop("0.nu.w.scales"),
        {"0.nu.w": ["the entry '0.nu.w.scales' is missing"]},
    ),
    "a stray entry": (swap("stray", torch.ones(2)), {"stray": ["the schema lists no such entry"]}),
    "an unknown format": (
        lambda saved: saved.update(schema=saved["schema"].replace('"companded8"', '"compressed9"')),
        {
            path: [f"the format 'compressed9' is none that version {fl.__version__} has"]
            for path in ("0.mu.w", "0.nu.w")
        },
    ),
    "a schema that does not agree with itself": (
        lambda saved: saved.update(schema=saved["schema"].replace('"stored": "codes"', '"stored": "values"')),
        {
            "schema": [
                "the schema's leaf '0.mu.w' must have the parts ['.values'], got ['.codes', '.scales']; the file is "
                "damaged"
            ]
        },
    ),
    "a shape beyond torch": (
        lambda saved: saved.update(schema=saved["schema"].replace("[64, 128]", "[10000000000, 10000000000]")),
        {
            "schema": [
                "the schema's leaf '0.mu.w' must have a list of sizes as 'shape', got [10000000000, 10000000000]; the "
                "file is damaged"
            ]
        },
    ),
    "a version that is a bool": (
        lambda saved: saved.update(schema=saved["schema"].replace('"version": 2', '"version": true')),
        {"schema": ["the schema must have a version, got True; the file is damaged"]},
    ),
    "no numbers": (
        swap("0.mu.b", torch.empty(64, device="meta")),
        {"0.mu.b": ["the entry '0.mu.b' must be a plain tensor, is a tensor without numbers (of the meta device)"]},
    ),
    "a sparse tensor": (
        swap("0.mu.w.scales", torch.ones(64, 1).to_sparse()),
        {"0.mu.w": ["the entry '0.mu.w.scales' must be a plain tensor, is a tensor of the layout sparse_coo"]},
    ),
    "JSON that is too deep": (swap("schema", "[" * 100_000), None),
    "no JSON": (swap("schema", "{"), None),
    "no schema's version": (
        swap("schema", "{}"),
        {"schema": ["the schema must have a version, got None; the file is damaged"]},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_broken_is_named_and_is_status_1(capsys, tmp_path, name):
    change, wanted = CHANGES[name]
    document = inspected(capsys, broken_pt(tmp_path, change), status=1)
    if wanted is None:
        wanted = problems(document)
        assert wanted["schema"][0].startswith("the entry 'schema' is no JSON: ")
    assert problems(document) == wanted
    assert document["broken"] == len(wanted)
    ran = command(capsys, "inspect", "--broken", tmp_path / "broken.pt")
    assert ran.status == 1
    lines = [f"  {path}: {'; '.join(texts)}" for path, texts in wanted.items()]
    assert ran.out.endswith("\nbroken:\n" + "\n".join(lines) + "\n")


def test_only_the_broken_ones(capsys, tmp_path):
    path = broken_pt(tmp_path, poison("0.mu.b", float("nan")))
    assert list(leaves(inspected(capsys, path, "--broken", status=1))) == ["0.mu.b"]


def test_codes_that_a_format_never_writes(capsys, tmp_path):
    for format, signed, count in (("e4m3", False, 128), ("e5m2", False, 131), ("e5m2", True, 6)):
        never = never_written(fl.formats.get(format), signed)
        assert never is not None
        assert int(never.sum()) == count, (format, signed)
    state = fl.quantize(torch.ones(4, 256), "e4m3", signed=False)
    state.codes[0, :2] = 200
    torch.save({"optimizer": fl.state_dict({"m": state})}, tmp_path / "x.pt")
    assert problems(inspected(capsys, tmp_path / "x.pt", status=1)) == {
        "m": ["2 of 1,024 codes are none that e4m3 writes", "2 of 1,024 numbers are NaN"]
    }


@pytest.mark.parametrize("format", fl.formats.names())
@pytest.mark.parametrize("signed", [True, False])
def test_no_format_writes_what_it_never_writes(format, signed):
    never = never_written(fl.formats.get(format), signed)
    if never is None:
        return
    source = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=source) * 10.0 ** torch.randint(-30, 30, (64, 1), generator=source)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    codes = fl.quantize(x if signed else x.abs(), format, signed=signed).codes.view(torch.uint8)
    assert not bool(never[codes.int()].any())


def test_a_negative_moment_of_torch(capsys, tmp_path):
    saved = torch_adamw(torch.nn.Linear(8, 8)).state_dict()
    saved["state"][1]["exp_avg_sq"][2] = -1.0
    torch.save(saved, tmp_path / "x.pt")
    assert problems(inspected(capsys, tmp_path / "x.pt", status=1)) == {
        "1.exp_avg_sq": ["1 of 8 numbers is below 0, and never should be"]
    }


def test_a_sparse_momentum_of_torch(capsys, tmp_path):
    """SGD keeps the gradient of an embedding as it is."""
    state = {0: {"momentum_buffer": torch.tensor([[0.0, -3.0], [2.0, 0.0]]).to_sparse()}}
    beside = {"mask": torch.eye(3).to_sparse()}
    torch.save({"state": state, "param_groups": [{"params": [0]}], **beside}, tmp_path / "x.pt")
    (leaf,) = leaves(inspected(capsys, tmp_path / "x.pt")).values()
    assert (leaf["format"], leaf["shape"], leaf["bytes"]) == ("float32, sparse", [2, 2], 2 * 2 * 8 + 2 * 4)
    assert (leaf["min"], leaf["max"]) == (-3.0, 2.0)


def test_a_number_of_torch_beyond_float(capsys, tmp_path):
    torch.save({"state": {0: {"step": 10**400}}, "param_groups": [{"params": [0]}]}, tmp_path / "x.pt")
    assert problems(inspected(capsys, tmp_path / "x.pt", status=1)) == {"0.step": ["1 of 1 numbers is Inf"]}


def test_two_moments_of_bitsandbytes_in_one(capsys, tmp_path):
    """As AdEMAMix8bit of bitsandbytes 0.50 keeps them."""
    qmap = torch.linspace(-1, 1, 256)
    state = {
        "state1": torch.stack([torch.full((512,), 255), torch.zeros(512)]).to(torch.uint8),
        "qmap1": qmap,
        "absmax1": torch.tensor([[2.0, 4.0], [3.0, 1.0]]),
    }
    torch.save({"state": {0: state}, "param_groups": [{"params": [0]}]}, tmp_path / "x.pt")
    leaf = leaves(inspected(capsys, tmp_path / "x.pt"))["0.state1"]
    assert (leaf["block_size"], leaf["min"], leaf["max"]) == (256, -3.0, 4.0)


def test_scales_of_bitsandbytes(capsys, tmp_path):
    saved = bitsandbytes_like()
    nested = saved["state"][0]["__bnb_optimizer_quant_state__"]
    nested["absmax1"][1] = float("nan")
    nested["absmax2"] = torch.ones(7)
    torch.save(saved, tmp_path / "x.pt")
    assert problems(inspected(capsys, tmp_path / "x.pt", status=1)) == {
        "0.state1": ["1 of 2 scales is NaN", "256 of 512 numbers are NaN"],
        "0.state2": ["7 scales for 512 codes fit no block size that the library has"],
    }


def test_a_parameter_named_nu_may_be_negative(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", {"params": {"nu": -torch.ones(3), "trace": -torch.ones(3)}, "state": state_of()})
    assert inspected(capsys, tmp_path / "x")["broken"] == 0


def flipped(path, at):
    stored = bytearray(path.read_bytes())
    stored[at] ^= 4
    path.write_bytes(stored)


def test_flipped_bits_in_a_file_are_noticed(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of())
    flipped(tmp_path / "x.pt", 20_000)  # inside the parameters
    document = inspected(capsys, tmp_path / "x.pt", status=1)
    assert document["damaged"] == ["the bytes of 'x/data/0' are not those that were written (their checksum says)"]
    assert inspected(capsys, tmp_path / "x.pt", "--no-checksums")["broken"] == 0


def test_flipped_bits_in_a_folder_are_noticed(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (file,) = (tmp_path / "x").glob("*.distcp")
    places = dcp.FileSystemReader(tmp_path / "x").read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == "1.0.mu.w.codes")
    flipped(file, place.offset + place.length // 2)
    document = inspected(capsys, tmp_path / "x", status=1)
    assert document["damaged"] == [
        "the bytes of '1.0.mu.w.codes' are not those that were written (their checksum says)"
    ]


def test_a_damaged_directory_of_a_file_is_noticed(capsys, tmp_path):
    """Where torch reads more than Python's zipfile, and where neither reads it."""
    torch_file(tmp_path / "x.pt", state_of())
    stored = (tmp_path / "x.pt").read_bytes()
    end = stored.rindex(b"PK\x06\x07")  # of the directory: 4 bytes that name it, and 4 that number the disk
    (tmp_path / "x.pt").write_bytes(stored[: end + 4] + b"\x01" + stored[end + 5 :])
    (text,) = inspected(capsys, tmp_path / "x.pt", status=1)["damaged"]
    assert text.startswith(f"the directory of {str(tmp_path / 'x.pt')!r} is not as it was written: ")
    flags = stored.index(b"PK\x01\x02") + 8  # of the first record; the lowest one says that it is encrypted
    (tmp_path / "x.pt").write_bytes(stored[:flags] + bytes([stored[flags] | 1]) + stored[flags + 1 :])
    ran = command(capsys, "inspect", tmp_path / "x.pt")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"functional-lowbit inspect: cannot read {str(tmp_path / 'x.pt')!r} as a file of torch")


def test_files_that_cannot_be_read_at_all(capsys, tmp_path):
    def refused(path, status, text):
        assert command(capsys, "inspect", path) == (status, "", f"functional-lowbit inspect: {text}\n")

    whole = tmp_path / "whole.pt"
    torch_file(whole, state_of())
    for name, stored in (
        ("short.pt", whole.read_bytes()[:9_000]),
        ("empty.pt", b""),
        ("text.md", b"# Checkpoints\n"),
        ("old.pt", b"\x80\x02K"),
        ("short.safetensors", b"\xff\x01"),
        ("head.safetensors", (900).to_bytes(8, "little") + b"{}"),
        ("bad.safetensors", (2).to_bytes(8, "little") + b"{]"),
    ):
        (tmp_path / name).write_bytes(stored)

    def at(name):
        return repr(str(tmp_path / name))

    for name, status, text in (
        ("short.pt", 1, "is truncated: it begins as a file of torch.save, and has no end"),
        ("empty.pt", 1, "is empty"),
        ("text.md", 2, "is no file of torch.save, no safetensors file and no checkpoint folder"),
        ("short.safetensors", 1, "is truncated: its header alone needs 519 bytes of 2"),
        ("head.safetensors", 1, "is truncated: its header alone needs 908 bytes of 10"),
    ):
        refused(tmp_path / name, status, f"{at(name)} {text}")
    # What follows is json's and torch's.
    ran = command(capsys, "inspect", tmp_path / "bad.safetensors")
    text = f"functional-lowbit inspect: cannot read {at('bad.safetensors')}, its header is damaged: "
    assert (ran.status, ran.err.startswith(text)) == (1, True)
    ran = command(capsys, "inspect", tmp_path / "old.pt")
    text = f"functional-lowbit inspect: cannot read {at('old.pt')} as a file of torch.save: "
    assert (ran.status, ran.err.startswith(text)) == (1, True)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    refused(
        tmp_path / "model.pt",
        2,
        f"{str(tmp_path / 'model.pt')!r} holds no optimizer state: neither an entry 'schema' (fl.state_dict), nor "
        "'state' beside 'param_groups' (torch.optim)",
    )


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("F6_E3M2", "has 'w' of the dtype 'F6_E3M2', which torch does not have"),
        ("F32", "has 3 bytes for 'w' of shape (4,) and torch.float32"),
    ],
)
def test_a_safetensors_header_that_does_not_fit(capsys, tmp_path, dtype, text):
    file = tmp_path / "x.safetensors"
    header = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    assert command(capsys, "inspect", file) == (1, "", f"functional-lowbit inspect: {str(file)!r} {text}\n")


def test_an_entry_of_a_folder_that_cannot_be_read(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (file,) = (tmp_path / "x").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    ran = command(capsys, "inspect", tmp_path / "x")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("functional-lowbit inspect: cannot read ")
    assert f" of {str(tmp_path / 'x')!r}, a file is damaged: " in ran.err  # and what torch says
    assert ran.err.count("\n") == 1


def test_a_truncated_safetensors_file(capsys, tmp_path):
    file = tmp_path / "x.safetensors"
    fl.checkpoint.save_safetensors(state_of(), file)
    stored = file.read_bytes()
    file.write_bytes(stored[:-100])
    ran = command(capsys, "inspect", file)
    assert ran.status == 1
    assert ran.err == (
        f"functional-lowbit inspect: {str(file)!r} is truncated: it has {len(stored) - 100} bytes of {len(stored)}, "
        "which '1.0.nu.w.codes' needs\n"
    )
    file.write_bytes(stored[:3_000] + b"12345678" + stored[3_000:])
    ran = command(capsys, "inspect", file)
    text = f"{str(file)!r} has {len(stored) + 8} bytes, and its header tells of {len(stored)}"
    assert ran == (1, "", f"functional-lowbit inspect: {text}\n")


def test_folders_that_are_not_complete(capsys, tmp_path):
    folder = tmp_path / "x"
    fl.checkpoint.save(folder, state_of())
    (file,) = folder.glob("*.distcp")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    assert command(capsys, "inspect", folder) == (
        1,
        "",
        f"functional-lowbit inspect: the file {str(file)!r} is truncated: it has {size - 10} bytes of {size}\n",
    )
    stored = file.read_bytes()
    file.unlink()
    assert command(capsys, "inspect", folder).err == (
        f"functional-lowbit inspect: the file {str(file)!r} of the checkpoint is missing\n"
    )
    (folder / ".metadata").write_bytes(b"\x80")
    ran = command(capsys, "inspect", folder)
    assert ran.status == 1
    assert ran.err.startswith(
        f"functional-lowbit inspect: cannot read {str(folder / '.metadata')!r}, the file is damaged: "
    )
    (folder / ".metadata").unlink()
    file.write_bytes(stored)
    assert command(capsys, "inspect", folder) == (
        1,
        "",
        f"functional-lowbit inspect: {str(folder)!r} is no complete checkpoint: it has no .metadata, which is written "
        "last\n",
    )
    file.rename(folder / "optimizer.pt")
    assert command(capsys, "inspect", folder) == (
        2,
        "",
        f"functional-lowbit inspect: {str(folder)!r} is a folder without a checkpoint; give one of the files in it\n",
    )
    shutil.rmtree(folder)
    folder.mkdir()
    assert command(capsys, "inspect", folder) == (
        2,
        "",
        f"functional-lowbit inspect: there is no checkpoint at {str(folder)!r}\n",
    )


class Code:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("it ran",)


def test_code_in_a_file_runs_only_if_it_is_trusted(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of(), extra=Code())
    ran = command(capsys, "inspect", tmp_path / "x.pt")
    assert ran == (
        2,
        "",
        f"functional-lowbit inspect: {str(tmp_path / 'x.pt')!r} holds more than tensors and numbers: builtins.print; "
        "loading that can run any code, so use --unsafe if you trust whoever wrote it\n",
    )
    ran = command(capsys, "inspect", "--unsafe", tmp_path / "x.pt")
    assert ran.status == 0
    assert ran.out.startswith("it ran\n")
    torch.save({"extra": Code()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    ran = command(capsys, "inspect", tmp_path / "old.pt")
    assert (ran.status, ran.out) == (2, "")
    assert " holds more than tensors and numbers: print; " in ran.err  # torch leaves out whose it is


def test_code_in_a_folder_runs_only_if_it_is_trusted(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Code()))
    assert command(capsys, "inspect", tmp_path / "x") == (
        2,
        "",
        f"functional-lowbit inspect: {str(tmp_path / 'x' / '.metadata')!r} holds more than an account of tensors: "
        "builtins.print; loading that can run any code, so use --unsafe if you trust whoever wrote it\n",
    )
    assert command(capsys, "inspect", "--unsafe", tmp_path / "x").out == "it ran\n"  # and then it is no checkpoint


def test_a_class_of_another_library_is_named(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of(), extra=Code)
    assert command(capsys, "inspect", tmp_path / "x.pt").err == (
        f"functional-lowbit inspect: {str(tmp_path / 'x.pt')!r} holds more than tensors and numbers: "
        f"{Code.__module__}.Code; loading that can run any code, so use --unsafe if you trust whoever wrote it\n"
    )
