"""`inspect`: numbers, entries and codes that a state cannot have are named."""

import pytest
import torch
from cli_files import bitsandbytes_like, command, inspected, leaves, problems, state_of, stepped, torch_adamw

import functional_lowbit as fl
from functional_lowbit.cli._leaves import never_written


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
        lambda saved: saved.update(schema=saved["schema"].replace('"version": 3', '"version": true')),
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
