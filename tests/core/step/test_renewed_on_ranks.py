"""inject_hyperparams and multi_steps over DTensors, uneven and empty shards among them: the bits of the plain run."""

from collections.abc import Callable
from typing import Any

import pytest
import world as w
from tiers import slow_unless
from torch import Tensor
from world import World

import functional_lowbit as fl

SHAPES = {"w": (33, 512), "few rows": (2, 2048), "b": (5,), "one": (1,)}

MAKE: dict[str, Callable[[], fl.GradientTransformation]] = {
    "multi_steps": lambda: fl.multi_steps(
        fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(1e-2, weight_decay=0.1)), lambda step: 1 + step % 3
    ),
    "both, all in few bits": lambda: fl.apply_if_finite(
        fl.low_bit(
            fl.multi_steps(
                fl.inject_hyperparams(fl.adamw)(fl.schedules.linear_schedule(1e-2, 0.0, 4), weight_decay=0.1), 2
            )
        )
    ),
}


def trained(way: str, name: str, cut: bool) -> Any:
    """Six mini-steps, one of them not finite on one rank; fingerprints of params and state, and all counters."""

    def place(x: Tensor) -> Tensor:
        return w.shard(x) if cut else x

    tx = MAKE[name]()
    params = {k: place(w.random(s, i)) for i, (k, s) in enumerate(SHAPES.items())}
    state, step = tx.init(params), w.take(tx, way)
    for t in range(6):
        grads = {k: w.random(s, 10 + 10 * t + i) for i, (k, s) in enumerate(SHAPES.items())}
        if t == 2 and "both" in name:
            grads["one"][0] = float("nan")
        if t == 5:
            state = _set(state, 0.1)
        params, state = step({k: place(g) for k, g in grads.items()}, state, params)
    return w.fingerprint(params), w.of_state(state)


def _set(state: Any, rate: float) -> Any:
    """Another weight decay, in the one state that has one."""
    inner = getattr(state, "inner_state", None)
    if inner is not None:
        inner.inner_opt_state.hyperparams["weight_decay"].fill_(rate)
    return state


@slow_unless(lambda world, way: world == 3 and way == "native")
@pytest.mark.parametrize("world", [2, 3], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("way", ["native", "pure"])
@pytest.mark.parametrize("name", MAKE)
def test_bits_are_those_of_the_plain_run(world: World, alone: Callable[..., Any], way: str, name: str):
    plain = alone(trained, way, name, False)
    assert plain == alone(trained, "pure", name, False)
    for found in world.run(trained, way, name, True):
        assert found == plain
