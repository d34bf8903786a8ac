"""The command line on real states of torchao and bitsandbytes, and `bench` beside them."""

import json

import pytest
import torch
from cli_files import command

import functional_lowbit as fl

pytest.importorskip("torchao.optim", reason="needs torchao")


def quantized(kind, signed, x):
    """A moment as torchao's optimizers keep it."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    if kind == "fp8":
        state = OptimStateFp8.zeros(x.shape, 256)
    else:
        state = (OptimState8bit if kind == "8bit" else OptimState4bit).zeros(x.shape, signed)
    state.copy_(x)
    return state


@pytest.fixture
def torchao_file(tmp_path):
    m = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    state = {
        i: {"step": torch.tensor(3.0), "exp_avg": quantized(k, True, m), "exp_avg_sq": quantized(k, False, m * m)}
        for i, k in enumerate(("8bit", "4bit", "fp8"))
    }
    saved = {"state": state, "param_groups": [{"params": [0, 1, 2], "lr": torch.tensor(1e-3)}]}
    torch.save(saved, tmp_path / "ao.pt")
    return tmp_path / "ao.pt", saved


def test_the_numbers_of_torchao_are_those_of_its_dequantize(capsys, torchao_file):
    path, saved = torchao_file
    document = json.loads(command(capsys, "inspect", "--json", path).out)
    assert (document["states"][0]["library"], document["broken"]) == ("torchao", 0)
    found = {leaf["path"]: leaf for leaf in document["states"][0]["leaves"]}
    for i, entries in saved["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            x, leaf = entries[name].dequantize(), found[f"{i}.{name}"]
            assert (leaf["min"], leaf["max"]) == (float(x.min()), float(x.max()))
            assert (leaf["zeros"], leaf["numbers"]) == (int((x == 0).sum()), x.numel())


def test_torchao_becomes_ours(capsys, torchao_file, tmp_path):
    path, saved = torchao_file
    ran = command(capsys, "convert", "--json", path, tmp_path / "ours.pt", "--to", "dynamic8")
    assert ran.status == 0
    own = {str(i): torch.zeros(64, 128) for i in range(3)}
    like = fl.adamw8bit(1e-3, format="dynamic8").init(own)
    loaded = fl.load_state_dict(like, torch.load(tmp_path / "ours.pt"))
    # The same map and blocks: no number changes but the last place of torchao's table (formats/dynamic.py).
    assert torch.allclose(loaded[0].mu["0"].dequantize(), saved["state"][0]["exp_avg"].dequantize(), rtol=1e-6)


def test_bitsandbytes(capsys, tmp_path):
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    p = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = bnb.optim.AdamW8bit([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "bnb.pt")
    document = json.loads(command(capsys, "inspect", "--json", tmp_path / "bnb.pt").out)
    found = {leaf["path"]: leaf for leaf in document["states"][0]["leaves"]}
    assert document["states"][0]["library"] == "bitsandbytes"
    assert found["0.state1"]["max"] == pytest.approx(0.1, rel=1e-6)  # (1 - b1) g
    assert found["0.state2"]["max"] == pytest.approx(0.001, rel=1e-6)  # (1 - b2) g**2


def test_bench_times_bitsandbytes(capsys):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    ran = command(capsys, "bench", "--json", "--size", "8192", "--rounds", "1", "--only", "bitsandbytes")
    document = json.loads(ran.out)
    assert ran.status == 0
    assert [row["name"] for row in document["rows"]] == ["torch fused", "bitsandbytes AdamW8bit"]
