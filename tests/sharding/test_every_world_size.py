"""The same bits for every number of ranks, and for plain tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from cases import CASES
from tiers import slow, slow_unless
from torch import Tensor
from torch.distributed.tensor import DTensor
from world import World

import functional_lowbit as fl

SHAPES: dict[str, tuple[int, ...]] = {
    "odd_rows": (33, 512),
    "three_rows": (3, 2048),  # at W = 4, rank 3 holds nothing
    "position_table": (129, 192),
    "square": (64, 64),
    "tall": (101, 640),  # as (1601, 1280): W = 4 gives 26, 26, 26, 23; blocks of 160
    "prime_row": (34, 257),  # blocks that need padding
    "experts": (5, 7, 320),  # rows of 320, so that a split of either of the first two dimensions cuts none
    "conv": (19, 8, 3, 3),
    "five_dims": (6, 2, 5, 3, 31),
    "one_block": (17, 250),
    "rows_of_two": (10, 2),
    "small": (5, 10),  # 2, 2, 1, 0
    "scalar": (),
    "empty": (0, 7),
    "bias": (5,),
    "one": (1,),
}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clip_adamw8bit": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1)),
    "dynamic8": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format="dynamic8")),
    "bfloat16": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format="bfloat16")),
    "adamw4bit": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw4bit(1e-2, weight_decay=0.1)),
    "dynamic4": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format="dynamic4")),
    "adamwfp8": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamwfp8(1e-2)),
    "sgd8bit": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.sgd8bit(1e-1, nesterov=True)),
    "fp32_adamw": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw(1e-2)),
    "if_finite": lambda: fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2))),
    **{name: case.make for name, case in CASES.items() if case.ranks},
}

WAYS = ("native", "inductor", "eager", "pure")
RUNS = [
    *(("clip_adamw8bit", way, torch.float32) for way in WAYS),
    ("clip_adamw8bit", "native", torch.bfloat16),
    ("clip_adamw8bit", "pure", torch.bfloat16),
    ("dynamic8", "native", torch.float32),
    ("dynamic8", "pure", torch.float32),
    ("bfloat16", "pure", torch.float32),
    ("adamw4bit", "native", torch.float32),
    ("adamw4bit", "pure", torch.bfloat16),
    ("dynamic4", "pure", torch.float32),
    ("adamwfp8", "native", torch.float32),
    ("sgd8bit", "pure", torch.float32),
    ("fp32_adamw", "native", torch.float32),
    ("if_finite", "native", torch.float32),
    ("if_finite", "pure", torch.float32),
    *((name, way, torch.float32) for name, case in CASES.items() for way in case.ranks),
]

QUICK = {1: (), 2: ("clip_adamw8bit", "adamw4bit", "if_finite", "adabelief"), 3: ("clip_adamw8bit",), 4: ()}


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: w.random(shape, i, dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of different size in each leaf, so that the norm adds numbers of many exponents."""
    return {
        name: (w.random(shape, 1000 * (step + 1) + i) * 2.0 ** (3 - i)).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def train(optimizer: str, way: str, dtype: torch.dtype, sharded: bool) -> dict[str, Any]:
    """Three steps; the fingerprints of params and state, and what else must be the same on every rank."""
    cut = w.shard if sharded else (lambda x: x)
    tx = OPTIMIZERS[optimizer]()
    params = {name: cut(x) for name, x in start(dtype).items()}
    state = tx.init(params)
    step = w.take(tx, way)
    for i in range(3):
        grads = {name: cut(x) for name, x in gradients(i, dtype).items()}
        params, state = step(grads, state, params)
    moments = {name: x for name, x in fl.state_dict(state).items() if isinstance(x, Tensor) and x.ndim}
    return {
        "params": w.fingerprint(params),
        "state": w.of_state(state),
        "graphs": getattr(step, "graphs", None),
        "dtensors": {isinstance(x, DTensor) for x in [*params.values(), *moments.values()]},
        "placements": {str(x.placements) for n, x in moments.items() if isinstance(x, DTensor) and "scalar" not in n},
    }


@slow_unless(lambda world, way, optimizer: way == "native" and optimizer in QUICK[world])
@pytest.mark.parametrize(("optimizer", "way", "dtype"), RUNS)
def test_params_and_state_have_the_bits_of_the_plain_run(
    world: World, alone: Callable[..., Any], optimizer: str, way: str, dtype: torch.dtype
) -> None:
    plain = alone(train, optimizer, way, dtype, False)
    results = world.run(train, optimizer, way, dtype, True)
    for result in results:
        assert result["params"] == plain["params"]
        assert result["state"] == plain["state"]  # shapes and strides of codes and scales among it
        assert result["graphs"] == plain["graphs"]
        assert result["dtensors"] == {True}
        assert result["placements"] == {"(Shard(dim=0),)"}
    assert plain["dtensors"] == {False}


@slow
@pytest.mark.parametrize("optimizer", ["clip_adamw8bit", "lion8bit", "if_finite"])
def test_every_way_to_step_gives_the_same_bits(alone: Callable[..., Any], optimizer: str) -> None:
    ways = [alone(train, optimizer, way, torch.float32, False) for way in WAYS]
    assert ways[0]["params"] == ways[1]["params"] == ways[2]["params"]
    assert ways[0]["state"] == ways[1]["state"] == ways[2]["state"]
    assert ways[0]["graphs"] == 2
    before = w.fingerprint(start(torch.float32))
    changed = {name for name, bits in ways[0]["params"].items() if bits != before[name]}
    assert changed == set(SHAPES) - {"empty"}


def rare(sharded: bool) -> dict[str, Any]:
    """What the runs above leave out: donation off, masks, a user's own pair, a transposed parameter, `quantize`."""
    cut = w.shard if sharded else (lambda x: x)
    seen: dict[str, Any] = {}
    full = {"t": w.random((96, 50), 0).t(), "w": w.random((33, 256), 1), "b": w.random((7,), 2)}
    double = fl.GradientTransformation(lambda params: (), lambda u, s, p=None: (fl.tree.scale(2.0, u), s))
    rules = {
        "masked": lambda: fl.chain(
            fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1, mask={"t": True, "w": True, "b": False})
        ),
        "left out": lambda: fl.masked(
            fl.chain(fl.clip_by_global_norm(0.1), fl.adam8bit(1e-2)), {"t": True, "w": True, "b": False}
        ),
        "opaque": lambda: fl.chain(fl.clip_by_global_norm(1.0), double, fl.adamw8bit(1e-2)),
    }
    for name, rule in rules.items():
        for way in ("eager", "pure"):
            tx = rule()
            params = {n: cut(x) for n, x in full.items()}
            state = tx.init(params)
            kept = w.fingerprint(params), w.of_state(state)
            step = w.take(tx, way) if way == "pure" else fl.compile(tx, backend=way, donate=False)
            new, new_state = params, state
            for k in range(3):
                grads = {n: cut(w.random(tuple(x.shape), 10 * k + i)) for i, (n, x) in enumerate(full.items())}
                new, new_state = step(grads, new_state, new)
            assert (w.fingerprint(params), w.of_state(state)) == kept
            hashes = {n: w.digest(w.whole(x)) for n, x in new.items()}  # the stride of a sum is torch's choice
            seen[name, way] = hashes, w.of_state(new_state)
    for format in fl.formats.names():
        q = fl.quantize(cut(w.random((35, 300), 5).square()), format, signed=False)
        seen[format] = w.fingerprint({"x": q.dequantize(), "codes": q.codes})
    return seen


@slow_unless(lambda world: world == 3)
def test_masks_own_pairs_and_transposed_leaves(world: World, alone: Callable[..., Any]) -> None:
    plain = alone(rare, False)
    for name in ("masked", "left out", "opaque"):
        assert plain[name, "eager"] == plain[name, "pure"]
    for seen in world.run(rare, True):
        assert seen == plain
