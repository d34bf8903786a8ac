"""Placements that cut rows: blocks end at the shard's edge, so bits depend on the mesh, and the error is bounded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from world import World

import functional_lowbit as fl

LR, DECAY, STEPS = 0.5, 0.9, 6

# shape -> placements in one dimension, and in two
LEAVES: dict[tuple[int, ...], tuple[Any, Any]] = {
    (64, 503): (Shard(1), (Shard(0), Shard(1))),
    (33, 301): (Shard(1), (Shard(1), Shard(0))),
    (4097,): (Shard(0), (Shard(0), Shard(0))),
    (10_001,): (Shard(0), (Replicate(), Shard(0))),
    (40, 9, 13): (Shard(2), (Shard(1), Shard(2))),
    (4096, 3): (Shard(1), (Shard(1), Shard(0))),  # columns of one element, and empty ones: a shard is one row
    (2, 3001): (Shard(1), (Shard(1), Shard(1))),
}


def grads(step: int) -> dict[str, Tensor]:
    return {str(shape): w.random(shape, 100 * step + i) for i, shape in enumerate(LEAVES)}


def sgd(way: str, dims: int, low_bit: bool) -> Any:
    """Momentum over fixed gradients: linear, so that the error of the stored momentum can be followed exactly."""

    def cut(name: str, x: Tensor) -> Tensor:
        if not dims:
            return x.flatten()  # the rule is elementwise; as one row, blocks are as long as they get
        one, two = LEAVES[tuple(x.shape)]
        return w.shard(x, w.mesh(), one) if dims == 1 else w.shard(x, w.mesh(2, 2), *two)

    tx: Any = fl.sgd8bit(LR, DECAY) if low_bit else fl.sgd(LR, DECAY)
    params = {n: cut(n, torch.zeros_like(x)) for n, x in grads(0).items()}
    state = tx.init(params)
    step = w.take(tx, way)
    for k in range(STEPS):
        params, state = step({n: cut(n, x) for n, x in grads(k).items()}, state, params)
    parts = {k: x for k, x in fl.state_dict(state).items() if isinstance(x, Tensor)}
    return {
        "params": {n: w.whole(x) for n, x in params.items()},
        "trace": {n: w.whole(x.dequantize() if low_bit else x) for n, x in state[0].trace.items()},
        "full": {k: tuple(w.whole(x).shape) == tuple(x.shape) for k, x in parts.items()},
        "state bytes": sum(row.bytes for row in fl.describe(state).rows if row.format == "companded8"),
        "elements": sum(x.to_local().numel() if isinstance(x, DTensor) else x.numel() for x in params.values()),
        "why": {row.path: row.why for row in fl.describe(state).rows},
        "graphs": getattr(step, "graphs", None),
        "step": int(state[0].step),
    }


def bound() -> float:
    """How far a stored step may be from a float32 one.

    companded8 rounds the code 127 * 2y / (1 + |y|) of y = x / absmax by at most a half, and dy/dcode <= 4 / 254, so a
    stored momentum is off by at most absmax * 2 / 254 / (1 - 1/254), whichever block it is in. An error made at one
    step is multiplied by DECAY at each later one.
    """
    largest = sum(DECAY**k for k in range(STEPS)) * max(
        float(g.abs().max()) for k in range(STEPS) for g in grads(k).values()
    )
    rounding = largest * 2 / 253
    return LR * sum(rounding * DECAY**j for k in range(STEPS) for j in range(1, k + 1))


@pytest.mark.parametrize(("world", "dims"), [(2, 1), (3, 1), (4, 1), (4, 2)], indirect=["world"], ids=str)
def test_a_cut_leaf_trains(world: World, alone: Callable[..., Any], dims: int) -> None:
    exact = alone(sgd, "eager", 0, False)["params"]
    plain = alone(sgd, "eager", 0, True)["params"]
    by_way = {way: world.run(sgd, way, dims, True) for way in ("native", "eager", "pure")}
    first = by_way["pure"][0]
    for name, flat in exact.items():
        expected = flat.view(first["params"][name].shape)
        error = (first["params"][name] - expected).abs()
        assert 0 < error.max() <= bound()
        # A shorter block has no larger absmax, so on average the error is that of the longest blocks or less;
        # 1.1 leaves room for means of thousands of numbers.
        assert error.mean() <= 1.1 * (plain[name] - flat).abs().mean()
    for way, results in by_way.items():
        for result in results:
            for name in exact:
                assert torch.equal(result["params"][name], first["params"][name])
                assert torch.equal(result["trace"][name], first["trace"][name])
                why = result["why"][f"0.trace.{name}"]
                assert why == "at least 4,096 elements; the mesh cuts its rows, so each shard has blocks of its own"
            assert result["step"] == STEPS
            assert set(result["full"].values()) == {True}
            # Every rank holds as much as the largest, which is rank 0 for every leaf.
            assert result["state bytes"] <= 1.05 * results[0]["elements"]
            assert result["graphs"] == {"native": 1, "eager": 0, "pure": None}[way]


def in_four_bits() -> Any:
    """Whether each shard, empty ones too, is stored as it would be alone, and reads as zeros before the first step."""
    seen = []
    for i, (shape, (placement, _)) in enumerate(LEAVES.items()):
        x = w.shard(w.random(shape, i), w.mesh(), placement)
        q, local = fl.quantize(x, "root4"), x.to_local()
        codec, grid = q.format.signed, q.layout.local_grid()
        alone = (
            grid.from_blocks(codec.decode(*codec.encode(grid.to_blocks(local))), local.shape) if len(local) else local
        )
        fresh = fl.low_bit(fl.trace(DECAY), "root4").init({"x": x}).trace["x"]
        seen.append((torch.equal(q.dequantize().to_local(), alone), int(w.whole(fresh.dequantize()).count_nonzero())))
    return seen


@pytest.mark.parametrize("world", [2, 4], indirect=True, ids="W={}".format)
def test_shards_of_cut_rows_in_four_bits(world: World) -> None:
    for seen in world.run(in_four_bits):
        assert seen == [(True, 0)] * len(LEAVES)


# Splits on the edges of blocks of at most 256, for 2 and for 4 ranks: the grid stays that of the whole tensor.
ON_EDGES: dict[tuple[int, ...], Any] = {
    (64, 1024): Shard(1),
    (33, 640): Shard(1),  # 4 blocks of 160
    (8192,): Shard(0),
    (8, 12, 512): Shard(1),  # experts: the second dimension counts rows too
    (8, 10, 640): Shard(1),  # 4 shards: 3, 3, 3, 1
    (3, 5, 1024): Shard(2),
    (16, 64, 100): Shard(1),  # rows of 6400 = 25 blocks of 256, which nothing divides: cut
}
CUT = "(16, 64, 100)"


def on_edges(rule: str, sharded: bool, way: str, dims: int) -> Any:
    tx: Any = fl.adamw8bit(1e-2) if rule == "clipped" else fl.adamw8bit(1e-2, format=rule, block_size=256)
    if rule == "clipped":
        tx = fl.chain(fl.clip_by_global_norm(1.0), tx)

    def cut(name: str, x: Tensor) -> Tensor:
        placement = ON_EDGES[tuple(x.shape)]
        if not sharded:
            return x
        return w.shard(x, w.mesh(), placement) if dims == 1 else w.shard(x, w.mesh(2, 2), placement, placement)

    names = [s for s in ON_EDGES if rule != "clipped" or str(s) != CUT]  # whose sum of squares depends on the mesh
    params = {str(s): cut(str(s), w.random(s, i)) for i, s in enumerate(names)}
    state = tx.init(params)
    step = w.take(tx, way)
    for k in range(3):
        grads = {str(s): cut(str(s), w.random(s, 100 * k + i)) for i, s in enumerate(names)}
        params, state = step(grads, state, params)
    return {
        "params": w.fingerprint(params),
        "state": w.of_state(state),
        "why": {row.path.rsplit(".", 1)[1]: row.why for row in fl.describe(state).rows},
    }


@pytest.mark.parametrize(("world", "dims"), [(2, 1), (4, 1), (4, 2)], indirect=["world"], ids=str)
@pytest.mark.parametrize(
    ("rule", "way"), [("clipped", "native"), ("clipped", "pure"), ("root4", "native"), ("dynamic8", "eager")]
)
def test_a_split_on_block_edges_changes_no_bit(
    world: World, alone: Callable[..., Any], dims: int, rule: str, way: str
) -> None:
    plain = alone(on_edges, rule, False, way, 0)
    for result in world.run(on_edges, rule, True, way, dims):
        same = {n for n, bits in result["params"].items() if bits == plain["params"][n]}
        assert same == set(result["params"]) - {CUT}
        cut = {n for n, why in result["why"].items() if "cuts its rows" in why}
        assert cut == set(result["params"]) & {CUT}
        for name, bits in result["state"].items():
            if any(f".{n}." in name for n in same):
                assert bits == plain["state"][name]
