"""Groups of parameters on ranks: the same bits as in one process, with a norm of each group's own leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from torch.distributed.tensor import Replicate, Shard
from world import World

import functional_lowbit as fl

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (129, 192),  # uneven rows
    "layer.w": (33, 512),
    "layer.short": (3, 2048),  # at W = 4, rank 3 holds nothing
    "layer.b": (5,),
    "norm": (1,),  # on one rank only
    "head": (64, 70),
}


def label(path: str, leaf: Any) -> str:
    return "embed" if path == "embed" else "frozen" if path == "head" else "matrix" if leaf.ndim > 1 else "rest"


RULES: dict[str, Callable[[], Any]] = {
    "partition": lambda: fl.partition(
        {
            "embed": fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(1e-2)),
            "matrix": fl.chain(fl.clip_by_global_norm(2.0), fl.adamw4bit(2e-2)),
            "rest": fl.chain(fl.clip_by_global_norm(1e-3), fl.sgd(0.1, 0.9)),
            "frozen": fl.set_to_zero(),
            "none": fl.chain(fl.clip_by_global_norm(1.0), fl.adam(1.0)),
        },
        label,
    ),
    "a gate, and whole matrices": lambda: fl.partition(
        {
            "embed": fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(1e-2))),
            "matrix": fl.chain(fl.scale_by_trust_ratio(), fl.scale(-1e-2)),
            "rest": fl.sgd(0.1),
            "frozen": fl.set_to_zero(),
        },
        label,
    ),
    "selective_transform": lambda: fl.selective_transform(
        fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2)), freeze_mask=lambda path, leaf: leaf.ndim < 2
    ),
}
ALONG_COLUMNS = {"layer.w", "layer.short"}  # whose blocks a cut in two leaves whole


def tensor_parallel(name: str, x: Any) -> Any:
    cut = Shard(1) if name in ALONG_COLUMNS else Shard(0) if x.ndim > 1 else Replicate()
    return w.shard(x, w.mesh(), cut)


MESHES: dict[str, Callable[[str, Any], Any]] = {
    "plain": lambda name, x: x,
    "rows": lambda name, x: w.shard(x),
    "tensor parallel": tensor_parallel,
    "hsdp": lambda name, x: w.shard(x, w.mesh(2, 2), Replicate(), Shard(0)),
}
OF_SIZE = {1: ["rows"], 2: ["rows", "tensor parallel"], 3: ["rows"], 4: ["rows", "hsdp"]}


def train(rule: str, way: str, on: str) -> dict[str, Any]:
    """Three steps, an Inf in the second gradient of `embed` where a gate is there to see it."""
    tx, cut = RULES[rule](), MESHES[on]
    params = {name: cut(name, w.random(shape, i)) for i, (name, shape) in enumerate(SHAPES.items())}
    state = tx.init(params)
    step = w.take(tx, way)
    for t in range(3):
        full = {name: w.random(shape, 100 * (t + 1) + i) for i, (name, shape) in enumerate(SHAPES.items())}
        if t == 1 and "gate" in rule:
            full["embed"][-1, -1] = torch.inf
        params, state = step({name: cut(name, x) for name, x in full.items()}, state, params)
    return {"params": w.fingerprint(params), "state": w.of_state(state)}


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        ("partition", "eager"),
        ("partition", "pure"),
        ("a gate, and whole matrices", "eager"),
        ("selective_transform", "eager"),
    ],
)
def test_the_bits_of_one_process(world: World, alone: Callable[..., Any], rule: str, way: str) -> None:
    plain = alone(train, rule, way, "plain")
    for on in OF_SIZE[world.size]:
        for result in world.run(train, rule, way, on):
            assert result == plain


def test_frozen_leaves_stay_and_the_others_move(alone: Callable[..., Any]) -> None:
    before = w.fingerprint({name: w.random(shape, i) for i, (name, shape) in enumerate(SHAPES.items())})
    for rule, still in (("partition", {"head"}), ("selective_transform", {"layer.b", "norm"})):
        after = alone(train, rule, "pure", "plain")["params"]
        assert {name for name in SHAPES if after[name] == before[name]} == still
