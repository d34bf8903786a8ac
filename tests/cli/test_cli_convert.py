"""`convert`: what it writes loads strictly, and has the bits of a conversion in the library."""

import os

import pytest
import torch
from cli_files import (
    bitsandbytes_like,
    command,
    converted,
    fresh,
    optimizer_of,
    params,
    refused,
    state_of,
    stepped,
    torch_adamw,
    torch_file,
)
from helpers import same
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import functional_lowbit as fl
from functional_lowbit.cli._rewritten import first_difference


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


def test_places_with_the_same_words(capsys, tmp_path):
    state = fl.state_dict(state_of())
    torch.save({"a.b": {"c": state}, "a": {"b": {"c": state}}, 0: state, "0": {"x": state}}, tmp_path / "a.pt")
    document = converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    assert len(document["states"]) == 4
    tree = torch.load(tmp_path / "b.pt")
    for found in (tree["a.b"]["c"], tree["a"]["b"]["c"], tree[0], tree["0"]["x"]):
        fl.load_state_dict(fresh("root4"), found)


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


def test_what_else_a_file_may_hold_is_copied(capsys, tmp_path):
    beside = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(2, device="meta"), "nan": float("nan")}
    torch_file(tmp_path / "a.pt", state_of(), **beside)
    converted(capsys, tmp_path / "a.pt", tmp_path / "b.pt", "--to", "root4")
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["meta"].is_meta
    assert first_difference({"x": torch.eye(3).to_sparse()}, {"x": torch.eye(3)}) == "x"
    assert first_difference({"x": torch.eye(3).to_sparse()}, {"x": (2 * torch.eye(3)).to_sparse()}) == "x"
