"""master_weights over DTensors: the bits of the plain run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor
from torch.distributed.tensor import Shard
from world import World

import functional_lowbit as fl


def trained(way: str, n_bits: int, cut: str) -> Any:
    """Three steps; fingerprints of params, state and masters."""

    def place(x: Tensor) -> Tensor:
        if cut == "plain":
            return x
        return w.shard(x, w.mesh(), Shard(1)) if cut == "columns" and x.ndim > 1 else w.shard(x)

    shapes = {"w": (129, 192), "b": (5,), "none": (1, 7)}
    tx = fl.chain(fl.clip(1.0), fl.master_weights(fl.adamw(1e-2), n_bits))
    params = {k: place(w.random(s, i, torch.bfloat16)) for i, (k, s) in enumerate(shapes.items())}
    state, step = tx.init(params), w.take(tx, way)
    for t in range(3):
        grads = {k: place(w.random(s, 10 * t + i, torch.bfloat16)) for i, (k, s) in enumerate(shapes.items())}
        params, state = step(grads, state, params)
    return w.fingerprint(params), w.of_state(state), w.fingerprint(fl.master_params(params, state))


@pytest.mark.parametrize("world", [2, 3], indirect=True, ids="W={}".format)
@pytest.mark.parametrize(("way", "n_bits"), [("pure", 16), ("eager", 16), ("pure", 8)])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_bits_are_those_of_the_plain_run(world: World, alone: Callable[..., Any], way: str, n_bits: int, cut: str):
    plain = alone(trained, way, n_bits, "plain")
    for found in world.run(trained, way, n_bits, cut):
        assert found == plain
