"""Four leaves in three groups, for the tests of `partition` and of what belongs to it."""

from typing import Any

import torch
from helpers import random_like, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl

LABELS = {"embed": "embed", "layer": {"w": "matrix", "b": "rest"}, "norm": "rest"}
PATHS = {"embed": ["embed"], "matrix": ["layer.w"], "rest": ["layer.b", "norm"]}
STEPS = 3


def by_path(path: str, leaf: Tensor) -> str:
    return "embed" if path == "embed" else "matrix" if leaf.ndim > 1 else "rest"


def make_params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    shapes = {
        "embed": torch.empty(70, 64),
        "layer": {"w": torch.empty(64, 65), "b": torch.empty(65)},
        "norm": torch.empty(64),
    }
    return random_like(shapes, seed=0, dtype=dtype)


def make_grads(params: Any) -> list[Any]:
    return [random_like(params, seed=1 + t) for t in range(STEPS)]


def transforms() -> dict[str, fl.GradientTransformation]:
    """Another optimizer, format and learning rate for each group, with a norm inside two of them."""
    return {
        "embed": fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(1e-2)),
        "matrix": fl.chain(fl.clip_by_global_norm(2.0), fl.adamw4bit(fl.schedules.linear_schedule(0.1, 0.0, 5))),
        "rest": fl.sgd(0.1, 0.9),
    }


def flat(tree: Any) -> dict[str, Any]:
    return {"embed": tree["embed"], "layer.w": tree["layer"]["w"], "layer.b": tree["layer"]["b"], "norm": tree["norm"]}


def run_each(tx: fl.GradientTransformation, params: Any, grads: list[Any]) -> list[Any]:
    """(params, state) of the pure update, and of the step: the first rounds updates to the gradients' dtype."""
    step = fl.compile(tx, backend="eager", donate=False)
    return [run_pure(tx, params, grads), run_step(step, params, grads, tx.init(params))]


def run_both(tx: fl.GradientTransformation, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Params and state of the pure update, to which the step's are bit-equal in float32."""
    pure, stepped = run_each(tx, params, grads)
    assert same(stepped, pure)
    return pure


def only(label: str, tree: Any) -> dict[str, Any]:
    """The leaves of a label."""
    return {path: flat(tree)[path] for path in PATHS[label]}


def recipes() -> dict[str, fl.GradientTransformation]:
    return {"embed": fl.adamw(1e-2), "matrix": fl.lion(1e-2), "rest": fl.sgd(0.1, 0.9)}
