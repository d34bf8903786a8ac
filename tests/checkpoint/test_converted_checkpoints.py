"""convert=True on ranks: another format, block size and number of ranks at once give what a plain process converts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world as w
from tiers import slow
from torch import Tensor
from torch.distributed.tensor import Shard
from world import World

import functional_lowbit as fl

SHAPES = {"rows": (33, 512), "columns": (6, 1536), "experts": (4, 6, 320), "bias": (5,)}
RULES: dict[str, Callable[[], Any]] = {
    "8 bits": lambda: fl.adamw8bit(1e-2),
    "4 bits": lambda: fl.adamw4bit(1e-2),
    "short blocks": lambda: fl.adamw8bit(1e-2, block_size=64),
    "float32": lambda: fl.adamw(1e-2),
}


def put(name: str, x: Tensor, sharded: bool) -> Tensor:
    return w.shard(x, w.mesh(), Shard(1 if name in ("columns", "experts") else 0)) if sharded else x


def save(rule: str, where: str, sharded: bool) -> Any:
    tx = RULES[rule]()
    params = {n: put(n, w.random(s, i), sharded) for i, (n, s) in enumerate(SHAPES.items())}
    state = tx.init(params)
    step = fl.compile(tx, backend="eager")
    for k in range(2):
        grads = {n: put(n, w.random(s, 10 * k + i), sharded) for i, (n, s) in enumerate(SHAPES.items())}
        params, state = step(grads, state, params)
    fl.checkpoint.save(where, {"state": state})


def load(rule: str, where: str, sharded: bool) -> Any:
    params = {n: put(n, w.random(s, i), sharded) for i, (n, s) in enumerate(SHAPES.items())}
    fresh = RULES[rule]().init(params)
    loaded = fl.checkpoint.load(where, {"state": fresh}, convert=True)["state"]
    assert not [row for row in fl.describe(fresh).rows if "cuts its rows" in row.why]
    return w.of_state(loaded)


@slow
@pytest.mark.parametrize(
    ("saved", "wanted"), [("8 bits", "4 bits"), ("4 bits", "float32"), ("float32", "short blocks")]
)
def test_converted_at_another_number_of_ranks(
    place: Path, worlds: Callable[[int], World], alone: Callable[..., Any], saved: str, wanted: str
) -> None:
    here, there = str(place / f"plain-{saved}"), str(place / f"ranks-{saved}")
    alone(save, saved, here, False)
    plain = alone(load, wanted, here, False)
    two, three = worlds(2), worlds(3)
    two.run(save, saved, there, True)
    for result in [*two.run(load, wanted, there, True), *three.run(load, wanted, there, True)]:
        assert result == plain
