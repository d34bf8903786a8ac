"""Small states that the tests of checkpoints save."""

from pathlib import Path
from typing import Any

import torch
from helpers import random_like, run_pure

import functional_lowbit as fl


def make_params() -> dict[str, Any]:
    return random_like({"w": torch.empty(64, 64), "b": torch.empty(3)}, 0)


def after_two_steps(tx: fl.GradientTransformation) -> Any:
    return run_pure(tx, make_params(), [random_like(make_params(), t) for t in (1, 2)])[1]


def make_tree(format: str = "companded8", steps: int = 2) -> dict[str, Any]:
    tx = fl.adam8bit(0.1, format=format)
    params, state = run_pure(tx, make_params(), [random_like(make_params(), t) for t in range(steps)])
    return {"params": params, "state": state, "extra": {"epoch": steps, "name": "a", "loss": 0.5, "done": False}}


def names_in(folder: Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir())
