"""Checkpoints for the tests of the command line, and how a command is run in this process."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import functional_lowbit as fl
from functional_lowbit.cli import main

PARAMS = {"w": (64, 128), "b": (64,)}


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *argv: Any) -> Ran:
    """Run a command; argparse's own exit is a status too."""
    capsys.readouterr()
    try:
        status = main([str(x) for x in argv])
    except SystemExit as end:
        status = int(end.code or 0)
    return Ran(status, *capsys.readouterr())


def params(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in PARAMS.items()}


def stepped(tx: fl.GradientTransformation) -> Any:
    """A state that has made three steps."""
    state = tx.init(params())
    for seed in (1, 2, 3):
        _, state = tx.update(params(seed), state, params())
    return state


def state_of(format: str = "companded8") -> Any:
    return stepped(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, format=format)))


def torch_file(path: Path, state: Any, **beside: Any) -> dict[str, Any]:
    """A file as a training writes it: the parameters, the state, and a number."""
    saved = {"step": 3, "params": params(), "optimizer": fl.state_dict(state), **beside}
    torch.save(saved, path)
    return saved


def optimizer_of(model: torch.nn.Module, tx: fl.GradientTransformation) -> fl.optim.Optimizer:
    """One that has made a step."""
    optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def torch_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's own, after two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def bitsandbytes_like() -> dict[str, Any]:
    """A state_dict as bitsandbytes 0.50 lays it out: codes, a scale for each 256 of them, and the values of codes."""
    qmap = torch.linspace(-1, 1, 256)
    nested = {
        "state1": torch.arange(512, dtype=torch.int32).to(torch.uint8),
        "qmap1": qmap,
        "absmax1": torch.tensor([2.0, 4.0]),
        "state2": torch.full((512,), 255, dtype=torch.uint8),
        "qmap2": (qmap + 1) / 2,
        "absmax2": torch.tensor([1.0, 0.5]),
    }
    return {"state": {0: {"step": 7, "__bnb_optimizer_quant_state__": nested}}, "param_groups": [{"params": [0]}]}


def converted(capsys, *argv):
    ran = command(capsys, "convert", "--json", *argv)
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def fresh(format):
    tx = fl.adamw(1e-3) if format == "float32" else fl.adamw8bit(1e-3, format=format)
    return fl.chain(fl.clip_by_global_norm(1.0), tx).init(params())


def refused(capsys, status, text, *argv):
    assert command(capsys, "convert", *argv) == (status, "", f"functional-lowbit convert: {text}\n")


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
