"""Checkpoints by torch.distributed.checkpoint: the same ranks, other ranks, and no ranks at all."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world as w
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from world import World

import functional_lowbit as fl

SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (33, 512),
    "three": (3, 2048),
    "padded": (34, 257),
    "conv": (19, 8, 6, 5),
    "bias": (5,),
    "one": (1,),
}
SAVED_AT, MORE = 3, 2  # steps before and after the checkpoint


def rule(name: str) -> Any:
    if name == "guarded":
        return fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1)))
    if name == "statistics":
        return fl.chain(fl.scale_by_factored_rms(min_dim_size_to_factor=8), fl.scale_by_trust_ratio(), fl.scale(-1e-2))
    return fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format=name))


RULES = ("guarded", "dynamic8", "bfloat16", "root4", "statistics")


def cutter() -> Callable[[Tensor], Tensor]:
    return w.shard if dist.is_initialized() else (lambda x: x)


def advance(tx: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    step = w.take(tx, "eager")
    cut = cutter()
    for k in steps:
        grads = {n: cut(w.random(shape, 100 * k + i)) for i, (n, shape) in enumerate(SHAPES.items())}
        params, state = step(grads, state, params)
    return params, state


def start(tx: Any, seed: int) -> tuple[Any, Any]:
    params = {n: cutter()(w.random(shape, seed + i)) for i, (n, shape) in enumerate(SHAPES.items())}
    return params, tx.init(params)


def bits(params: Any, state: Any) -> Any:
    return w.fingerprint(params), w.of_state(state)


def save(name: str, where: str) -> Any:
    tx = rule(name)
    params, state = advance(tx, *start(tx, 0), range(SAVED_AT))
    before = bits(params, state)
    dcp.save({"params": params, "state": fl.state_dict(state)}, checkpoint_id=where)
    assert bits(params, state) == before  # saving changes nothing
    return bits(*advance(tx, params, state, range(SAVED_AT, SAVED_AT + MORE)))


def load(name: str, where: str) -> Any:
    """Into a fresh model and a fresh state, whose numbers are others."""
    tx = rule(name)
    params, state = start(tx, 77)
    target = {"params": params, "state": fl.state_dict(state)}
    with warnings.catch_warnings():
        # What torch 2.13 says to a process without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(target, checkpoint_id=where, no_dist=not dist.is_initialized())
    state = fl.load_state_dict(state, target["state"])
    return bits(*advance(tx, target["params"], state, range(SAVED_AT, SAVED_AT + MORE)))


@pytest.fixture(scope="session")
def checkpoints(place: Path) -> Callable[[str, int], Any]:
    """`checkpoints(rule, ranks)`: where a run was saved, and the bits that it had when it went on."""
    known: dict[Any, Any] = {}

    def get(name: str, ranks: int) -> Any:
        if (name, ranks) not in known:
            world = World(ranks, place)
            for each in RULES:  # one start for all
                where = str(place / f"{each}-{ranks}")
                known[each, ranks] = where, world.run(save, each, where)
            world.close()
        return known[name, ranks]

    return get


@pytest.mark.parametrize("name", RULES)
def test_saved_at_two_ranks_goes_on_at_any_number(
    world: World, checkpoints: Callable[[str, int], Any], name: str
) -> None:
    where, uninterrupted = checkpoints(name, 2)
    for result in world.run(load, name, where):
        assert result == uninterrupted[0] == uninterrupted[1]


@pytest.mark.parametrize("name", RULES)
def test_saved_at_two_ranks_goes_on_without_ranks(
    alone: Callable[..., Any], checkpoints: Callable[[str, int], Any], name: str
) -> None:
    where, uninterrupted = checkpoints(name, 2)
    assert alone(load, name, where) == uninterrupted[0]


def cut_save_load(where: str) -> Any:
    """Leaves whose rows the mesh cuts, at the same number of ranks."""

    def fresh(seed: int) -> Any:
        params = {"c": w.shard(w.random((64, 500), seed), w.mesh(), Shard(1)), "v": w.shard(w.random((9001,), seed))}
        return params, tx.init(params)

    def go(params: Any, state: Any, steps: range) -> Any:
        for k in steps:
            grads = {
                "c": w.shard(w.random((64, 500), 9 * k), w.mesh(), Shard(1)),
                "v": w.shard(w.random((9001,), 9 * k + 1)),
            }
            params, state = step(grads, state, params)
        return params, state

    tx = fl.adamw8bit(1e-2)
    step = w.take(tx, "eager")
    params, state = go(*fresh(0), range(2))
    dcp.save({"params": params, "state": fl.state_dict(state)}, checkpoint_id=where)
    params, state = go(params, state, range(2, 4))
    other, other_state = fresh(5)
    target = {"params": other, "state": fl.state_dict(other_state)}
    dcp.load(target, checkpoint_id=where)
    other, other_state = go(target["params"], fl.load_state_dict(other_state, target["state"]), range(2, 4))
    return bits(params, state), bits(other, other_state)


@pytest.mark.parametrize("world", [3], indirect=True, ids="W={}".format)
def test_cut_leaves_go_on_at_the_same_number_of_ranks(world: World, place: Path) -> None:
    for uninterrupted, resumed in world.run(cut_save_load, str(place / "cut")):
        assert resumed == uninterrupted


def wrong_sharding() -> Any:
    tx = fl.adamw8bit(1e-2)
    full = w.random((64, 128), 0)
    plain, cut = fl.state_dict(tx.init({"w": full})), tx.init({"w": w.shard(full)})
    try:
        fl.load_state_dict(cut, plain)
    except ValueError as error:
        return str(error), isinstance(cut[0].mu["w"].codes, DTensor), torch.equal(plain["0.step"], torch.tensor(0))
    return None


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_a_plain_file_is_not_a_shard(world: World) -> None:
    for message, still, step in world.run(wrong_sharding):
        assert message == (
            "load_state_dict: '0.mu.w.codes' must have sharding (Shard(dim=0),), got none (a plain tensor)"
        )
        assert still
        assert step
