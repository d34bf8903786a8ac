"""Quantization errors on ranks: the same numbers on every rank, and those of one process."""

from typing import Any

import pytest
import torch
import world as w
from torch.distributed.tensor import Replicate, Shard
from world import World

import functional_lowbit as fl

SHAPES = {"uneven": (33, 512), "empty on some": (1, 5000), "vector": (8192,), "little": (5,)}
STEPS = 3


def train(mesh: tuple[int, ...]) -> Any:
    """Reports of one step and of a recorder, and the state; plain tensors without a mesh."""

    def placed(seed: int) -> dict[str, Any]:
        whole = {n: w.random(s, seed + i) for i, (n, s) in enumerate(SHAPES.items())}
        if not mesh:
            return whole
        placements = (*[Replicate()] * (len(mesh) - 1), Shard(0))
        return {n: w.shard(x, w.mesh(*mesh), *placements) for n, x in whole.items()}

    params = placed(0)
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.record_quantization_error(fl.adamw8bit(0.1), every=2))
    whole = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw4bit(0.1))  # looked at as a whole
    alone = fl.quantization_error(whole, placed(100), whole.init(params), params)
    state = tx.init(params)
    step = fl.compile(tx, backend="eager")
    for t in range(STEPS):
        params, state = step(placed(100 * (t + 1)), state, params)
    numbers = {k: float(x) for k, x in fl.state_dict(state).items() if isinstance(x, torch.Tensor) and x.ndim == 0}
    return alone, fl.recorded_quantization_error(state), numbers


@pytest.mark.parametrize(
    ("world", "mesh"), [(2, (2,)), (4, (2, 2))], indirect=["world"], ids=["2 ranks", "2 x 2 ranks"]
)
def test_the_same_numbers_on_every_rank(world: World, alone: Any, mesh: tuple[int, ...]) -> None:
    wanted = alone(train, ())
    seen = world.run(train, mesh)
    assert all(rank == seen[0] for rank in seen)
    for got, expected in zip(seen[0][:2], wanted[:2], strict=True):
        assert len(got.rows) == 3 * len(SHAPES)
        for row, other in zip(got.rows, expected.rows, strict=True):
            assert row[:3] == other[:3]
            # The sums are float64, in another order; what is rounded at the end is float32.
            assert row[3:] == pytest.approx(other[3:], rel=2e-7)
            assert (row.error > 0) == (row.path != "little")
    assert seen[0][1].step == 2
    assert seen[0][2].keys() == wanted[2].keys()
