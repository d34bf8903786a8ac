"""`plan`: the table is that of memory_plan and of real states, for each kind of model and checkpoint."""

import json

import pytest
import torch
from cli_files import command, optimizer_of, params, state_of, torch_adamw, torch_file

import functional_lowbit as fl

SHAPES = "1001x512,512"


def planned(capsys, *argv):
    ran = command(capsys, "plan", "--json", *argv)
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def row_of(document, optimizer, format):
    (row,) = [r for r in document["rows"] if (r["optimizer"], r["format"]) == (optimizer, format)]
    return row


def trees(dtype=torch.float32):
    return {"0": torch.zeros(1001, 512, dtype=dtype), "1": torch.zeros(512, dtype=dtype)}


@pytest.mark.parametrize("format", fl.formats.names())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_are_those_of_a_real_state(capsys, format, dtype):
    tree = trees(getattr(torch, dtype))
    tx = fl.adamw(1e-3) if format == "float32" else fl.adamw8bit(1e-3, format=format)
    real = fl.describe(tx.init(tree), tree)
    row = row_of(planned(capsys, "--shapes", SHAPES, "--dtype", dtype), "adamw", format)
    assert row["state_bytes"] == real.total_bytes
    assert row["training_bytes"] == real.training_bytes
    assert row["bytes_per_parameter"] == real.bytes_per_parameter


def test_the_first_row_is_that_of_torch(capsys):
    modules = [torch.nn.Parameter(x) for x in trees().values()]
    optimizer = torch.optim.AdamW(modules)
    for p in modules:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = sum(x.nbytes for entries in optimizer.state.values() for x in entries.values())
    weights = sum(p.nbytes for p in modules)
    row = planned(capsys, "--shapes", SHAPES, "--dtype", "bfloat16")["rows"][0]
    assert (row["optimizer"], row["format"]) == ("torch AdamW", "float32")
    assert (row["weight_bytes"], row["state_bytes"], row["training_bytes"]) == (weights, state, 2 * weights + state)


def test_ranks_are_those_of_memory_plan(capsys):
    document = planned(capsys, "--shapes", SHAPES, "--ranks", "2", "--format", "companded8")
    plan = fl.memory_plan(fl.adamw8bit(1e-3), trees(), mesh=2)
    row = row_of(document, "adamw", "companded8")
    assert document["mesh"] == [2]
    assert row["training_bytes"] == plan.ranks[0].training_bytes
    assert row["smallest_training_bytes"] == plan.ranks[1].training_bytes
    assert row["all_ranks"]["training_bytes"] == sum(r.training_bytes for r in plan.ranks)
    copies = planned(capsys, "--shapes", SHAPES, "--mesh", "3x2", "--format", "companded8")
    again = row_of(copies, "adamw", "companded8")
    assert again["training_bytes"] == row["training_bytes"]
    assert again["all_ranks"]["training_bytes"] == 3 * row["all_ranks"]["training_bytes"]


def test_optimizers_and_formats_by_name(capsys):
    def pairs(*argv):
        rows = planned(capsys, "--shapes", SHAPES, *argv)["rows"][1:]
        return [(r["optimizer"], r["format"]) for r in rows]

    assert pairs() == [("adamw", name) for name in fl.formats.names()]
    assert pairs("--optimizer", "adamw4bit,lion8bit") == [("adamw4bit", "root4"), ("lion8bit", "companded8")]
    assert pairs("--optimizer", "adamfp8,sgd", "--format", "e4m3,float32") == [
        (name, format) for name in ("adamfp8", "sgd") for format in ("e4m3", "float32")
    ]
    everything = pairs("--optimizer", "all", "--format", "all")
    assert everything == [(o, f) for o in ("adamw", "adam", "lion", "sgd") for f in fl.formats.names()]


def test_each_optimizer_keeps_its_own_moments(capsys):
    document = planned(capsys, "--shapes", SHAPES, "--optimizer", "all", "--format", "float32")
    n = 1001 * 512 + 512
    moments = {o: row_of(document, o, "float32")["state_bytes"] // (4 * n) for o in ("adamw", "adam", "lion", "sgd")}
    assert moments == {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1}


def test_a_block_size(capsys):
    argv = ("--shapes", SHAPES, "--format", "companded8", "--block-size", "64")
    real = fl.describe(fl.adamw8bit(1e-3, block_size=64).init(trees()))
    assert row_of(planned(capsys, *argv), "adamw", "companded8")["state_bytes"] == real.total_bytes


def test_the_parameters_of_each_kind_of_file(capsys, tmp_path):
    state = state_of()
    torch_file(tmp_path / "training.pt", state)
    torch.save(params(), tmp_path / "model.pt")
    torch.save({"optimizer": fl.state_dict(state)}, tmp_path / "state.pt")
    torch.save(optimizer_of(torch.nn.Linear(128, 64), fl.adamw8bit(1e-3)).state_dict(), tmp_path / "optimizer.pt")
    torch.save(torch_adamw(torch.nn.Linear(128, 64)).state_dict(), tmp_path / "torch.pt")
    fl.checkpoint.save(tmp_path / "folder", {"params": params(), "state": state})
    fl.checkpoint.save(tmp_path / "only", state)
    fl.checkpoint.save_safetensors(state, tmp_path / "state.safetensors")
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    safetensors.save_file(params(), tmp_path / "model.safetensors")
    (tmp_path / "shards").mkdir()
    for name, x in params().items():
        safetensors.save_file({name: x}, tmp_path / "shards" / f"{name}.safetensors")
    names = ["training.pt", "model.pt", "state.pt", "optimizer.pt", "torch.pt", "folder", "only"]
    for name in [*names, "state.safetensors", "model.safetensors", "shards"]:
        document = planned(capsys, tmp_path / name, "--format", "root4")
        assert (document["parameters"], document["tensors"]) == (64 * 128 + 64, 2), name
        assert row_of(document, "adamw", "root4")["state_bytes"] == 8 + 2 * (256 + 64 * (64 + 4)), name


def test_tied_parameters_and_lists_in_a_file(capsys, tmp_path):
    w = torch.ones(64, 64)
    model = {"embedding": w, "head": w, "transposed": w.t(), "rows": w[:32], "none": torch.ones(0), "nothing": w[:0]}
    torch.save({"model": model}, tmp_path / "tied.pt")
    assert planned(capsys, tmp_path / "tied.pt")["parameters"] == (64 + 64 + 32) * 64
    torch.save({"params": ([torch.ones(3), torch.ones(4, dtype=torch.bfloat16)], torch.ones(5))}, tmp_path / "list.pt")
    document = planned(capsys, tmp_path / "list.pt", "--format", "float32")
    assert (document["parameters"], document["dtypes"]) == (12, ["bfloat16", "float32"])


def test_a_config_of_transformers(capsys, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    ran = command(capsys, "plan", "--json", tmp_path)  # transformers has something to say on stderr
    assert json.loads(ran.out)["parameters"] == 16 * 8 + 4 * 8 + (12 * 64 + 13 * 8) + 16


def test_integer_tensors_are_left_out_and_said_so(capsys, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    safetensors.save_file({**params(), "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    document = planned(capsys, tmp_path / "model.safetensors")
    assert document["tensors"] == 2
    assert document["notes"] == [
        f"1 tensors of {str(tmp_path / 'model.safetensors')!r} are not floating-point and were left out, the first is "
        "'ids' (I64)"
    ]


def test_the_table(capsys):
    ran = command(capsys, "plan", "--shapes", SHAPES, "--optimizer", "adamw8bit", "--ranks", "2")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "1001x512,512: 513,024 parameters in 2 tensors, float32, on 2 ranks (2)",
        "",
        "optimizer    format      weights  gradients    state    total  bytes/param  smallest rank  all ranks",
        "torch AdamW  float32     1.03 MB    1.03 MB  2.05 MB  4.11 MB        16.00        4.10 MB    8.21 MB",
        "adamw8bit    companded8  1.03 MB    1.03 MB   523 kB  2.58 MB        10.04        2.57 MB    5.15 MB",
        "numbers are those of the rank that needs most",
    ]


def test_every_leaf_of_one(capsys):
    argv = ("plan", "--shapes", SHAPES, "--optimizer", "adamw8bit", "--leaves")
    table = fl.memory_plan(fl.adamw8bit(1e-3), trees()).table(all_rows=True)
    assert command(capsys, *argv).out == f"{SHAPES}: 513,024 parameters in 2 tensors, float32\n\n{table}\n"
    assert planned(capsys, *argv[1:])["report"]["rows"][0]["path"] == "0.step"


FORMATS = ", ".join(fl.formats.names())


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "give either a MODEL or --shapes"),
        (["x", "--shapes", "2"], "give either a MODEL or --shapes"),
        (
            ["--shapes", "2x"],
            "--shapes must be sizes joined by x, and shapes by commas, as 1000x512,512; got '2x'",
        ),
        (
            ["--shapes", ""],
            "--shapes must be sizes joined by x, and shapes by commas, as 1000x512,512; got ''",
        ),
        (
            ["--shapes", "9999999999x9999999999"],
            "--shapes must be sizes joined by x, and shapes by commas, as 1000x512,512; got '9999999999x9999999999'",
        ),
        (["--shapes", "2", "--format", "int3"], f"--format must be of {FORMATS} or all; got 'int3'"),
        (
            ["--shapes", "2", "--optimizer", "adam3"],
            "--optimizer must be of adamw, adam, lion, sgd, adamw8bit, adamw4bit, adamwfp8, adam8bit, adam4bit, "
            "adamfp8, lion8bit, sgd8bit or all; got 'adam3'",
        ),
        (
            ["--shapes", "2", "--leaves"],
            "--leaves lists one optimizer in one format, but 8 are asked for; choose with --optimizer and --format",
        ),
        (["missing"], "there is no 'missing'"),
        (["missing.safetensors"], "there is nothing at 'missing.safetensors'"),
    ],
)
def test_mistakes(capsys, argv, text):
    assert command(capsys, "plan", *argv) == (2, "", f"functional-lowbit plan: {text}\n")


def test_a_model_of_integers(capsys, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    file = tmp_path / "ids.safetensors"
    safetensors.save_file({"ids": torch.arange(3)}, file)
    ran = command(capsys, "plan", file)
    assert ran == (2, "", f"functional-lowbit plan: {str(file)!r} has no floating-point parameters\n")


def test_files_without_parameters(capsys, tmp_path):
    torch.save({"epoch": 3, "name": "x"}, tmp_path / "x.pt")
    torch.save({"a": torch.arange(3)}, tmp_path / "ids.pt")
    for name in ("x.pt", "ids.pt"):
        assert command(capsys, "plan", tmp_path / name) == (
            2,
            "",
            f"functional-lowbit plan: {str(tmp_path / name)!r} holds neither a model's tensors nor an optimizer "
            "state\n",
        )
