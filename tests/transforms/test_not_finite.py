"""A NaN or an Inf that one rank sees: all ranks leave the step out together, on every kind of mesh."""

from typing import Any

import pytest
import torch
import world as w
from tiers import slow_unless
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from world import World

import functional_lowbit as fl

Shapes = dict[str, tuple[int, ...]]
LEAVES: Shapes = {"up": (129, 64), "down": (9, 1024), "experts": (3, 20, 256), "uneven": (33, 300), "bias": (9,)}
FEW: Shapes = {"rows": (3, 2048), "one": (1, 4100), "bias": (2,)}  # on four ranks, the last one has nothing

# name -> leaves, mesh, placements of each leaf; None: a plain tensor, which every rank has
SETUPS: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "hsdp": (LEAVES, dict.fromkeys(LEAVES, ((2, 2), Replicate(), Shard(0)))),
    "tensor parallel": (
        LEAVES,
        {
            "up": ((), Shard(0)),
            "down": ((), Shard(1)),
            "experts": ((), Shard(1)),
            "uneven": ((), Shard(1)),
            "bias": ((), Replicate()),
        },
    ),
    "fsdp over tp": (
        LEAVES,
        {
            "up": ((2, 2), _StridedShard(0, split_factor=2), Shard(0)),
            "down": ((2, 2), Shard(0), Shard(1)),
            "experts": ((2, 2), Shard(0), Shard(1)),
            "uneven": ((2, 2), Shard(0), Shard(1)),
            "bias": ((2, 2), Shard(0), Replicate()),
        },
    ),
    "several": (
        LEAVES,
        {
            "up": ((), Shard(0)),
            "down": ((2, 2), Replicate(), Shard(1)),
            "experts": ("shard", Shard(1)),  # a part of the mesh: two groups of two ranks, each with a copy
            "uneven": None,
            "bias": ((2, 2), Shard(0), Shard(0)),
        },
    ),
    "nothing": (FEW, dict.fromkeys(FEW, ((), Shard(0)))),
}


def placed(setup: str, tree: dict[str, Tensor]) -> dict[str, Tensor]:
    cuts = SETUPS[setup][1]
    found = {}
    for name, x in tree.items():
        if cuts[name] is not None:
            on, *placements = cuts[name]
            x = w.shard(x, w.mesh(2, 2)[on] if isinstance(on, str) else w.mesh(*on), *placements)
        found[name] = x
    return found


def random(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    return {n: w.random(shape, seed + i) for i, (n, shape) in enumerate(shapes.items())}


def guarded(setup: str, way: str, format: str) -> Any:
    """A good step, then for each leaf a NaN in its first element and an Inf in its last one, then a good step."""
    shapes = SETUPS[setup][0]
    tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format=format)), 99)
    params = placed(setup, random(shapes, 0))
    state = tx.init(params)
    step = w.take(tx, way)
    spoils = [(n, at, bad) for n in shapes for at, bad in ((0, float("nan")), (-1, float("inf")))]
    counters, unchanged = [], []
    params, state = step(placed(setup, random(shapes, 10)), state, params)
    kept = w.fingerprint(params), w.of_state(state.inner_state)
    for k, (name, at, bad) in enumerate(spoils):
        grads = random(shapes, 20 + k)
        grads[name].view(-1)[at] = bad
        params, state = step(placed(setup, grads), state, params)
        counters.append([int(x) for x in state[:3]])
        unchanged.append((w.fingerprint(params), w.of_state(state.inner_state)) == kept)
    params, state = step(placed(setup, random(shapes, 99)), state, params)
    return {
        "counters": counters,
        "unchanged": unchanged,
        "last": [int(x) for x in state[:3]],
        "changed": {n for n, bits in w.fingerprint(params).items() if bits != kept[0][n]},
        "held": sum(fl.sharding.local_of(x).numel() for x in params.values()),
        "step": int(state.inner_state[1][0].step),
    }


PLACES = [
    (4, "hsdp", "native", "companded8"),
    (4, "hsdp", "pure", "root4"),
    (2, "tensor parallel", "eager", "e4m3"),
    (3, "tensor parallel", "native", "companded8"),
    (4, "fsdp over tp", "native", "companded8"),
    (4, "fsdp over tp", "pure", "root4"),
    (4, "several", "eager", "dynamic8"),
    (4, "several", "native", "companded8"),
]
NOTHING = [(4, "nothing", way, "companded8") for way in ("native", "eager", "pure")]


@slow_unless(lambda world, way: world < 4 or way == "native")
@pytest.mark.parametrize(("world", "setup", "way", "format"), [*PLACES, *NOTHING], indirect=["world"], ids=str)
def test_all_ranks_leave_the_step_out(world: World, setup: str, way: str, format: str) -> None:
    shapes = SETUPS[setup][0]
    bad = 2 * len(shapes)
    results = world.run(guarded, setup, way, format)
    for result in results:
        assert result["counters"] == [[k + 1, 0, k + 1] for k in range(bad)]
        assert result["unchanged"] == [True] * bad
        assert result["last"] == [0, 1, bad]
        assert result["changed"] == set(shapes)
        assert result["step"] == 2
    if setup == "nothing":
        assert [result["held"] > 0 for result in results] == [True, True, True, False]


def unguarded(setup: str, way: str, format: str) -> Any:
    """Without a guard, a NaN in one element of each leaf, of which other ranks know nothing."""
    shapes = SETUPS[setup][0]
    tx = fl.adamw8bit(1e-2, format=format)
    params = placed(setup, random(shapes, 0))
    state = tx.init(params)
    step = w.take(tx, way)
    for k in range(3):
        grads = random(shapes, 10 * k)
        if k == 1:
            for g in grads.values():
                g.view(-1)[-1] = float("nan")
        params, state = step(placed(setup, grads), state, params)
    return {n: w.whole(p).isfinite().logical_not().flatten().nonzero().flatten().tolist() for n, p in params.items()}


@slow_unless(lambda world, way: world < 4 or way == "native")
@pytest.mark.parametrize(("world", "setup", "way", "format"), PLACES, indirect=["world"], ids=str)
def test_without_a_guard_one_element_is_spoilt(world: World, setup: str, way: str, format: str) -> None:
    for spoilt in world.run(unguarded, setup, way, format):
        assert spoilt == {n: [torch.Size(shape).numel() - 1] for n, shape in SETUPS[setup][0].items()}


def one_rank(way: str, name: str) -> Any:
    """A bit that flipped in one rank's copy of a gradient, of which torch gives the others no sign."""
    shapes = {"hsdp": (33, 512), "repeated": (9, 600), "plain": (7,), "part": (20, 256), "rows": (5, 3)}

    def place(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "hsdp": w.shard(tree["hsdp"], w.mesh(2, 2), Replicate(), Shard(0)),
            "repeated": w.shard(tree["repeated"], w.mesh(), Replicate()),
            "plain": tree["plain"],
            "part": w.shard(tree["part"], w.mesh(2, 2)["shard"], Shard(0)),
            "rows": w.shard(tree["rows"]),
        }

    params, grads = place(random(shapes, 0)), place(random(shapes, 9))
    if w.rank() == 2:
        fl.sharding.local_of(grads[name]).view(-1)[-1] = float("inf")
    tx = fl.apply_if_finite(fl.adamw8bit(1e-2))
    before = w.fingerprint(params)
    params, state = w.take(tx, way)(grads, tx.init(params), params)
    return [int(x) for x in state[:3]], w.fingerprint(params) == before


@pytest.mark.parametrize("world", [4], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("way", ["native", "pure"])
@pytest.mark.parametrize("name", ["hsdp", "repeated", "plain", "part", "rows"])
def test_a_rank_that_differs_from_its_replicas_is_heard(world: World, way: str, name: str) -> None:
    assert world.run(one_rank, way, name) == [([1, 0, 1], True)] * 4
