"""A plan without a process group says, byte for byte and row for row, what every rank of a real run finds."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import world as w
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from world import World

import functional_lowbit as fl

SHAPES = {  # uneven rows, ranks without a row, blocks that the mesh cuts, leaves that stay in float32
    "even": (64, 512),
    "uneven": (33, 640),
    "empty on some": (1, 5000),
    "cut": (9001,),
    "short rows": (129, 192),
    "experts": (3, 40, 256),
    "little": (5,),
    "scalar": (),
}
RULES = {
    **{
        f: (lambda f=f: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, format=f))) for f in fl.formats.names()
    },
    "masters": lambda: fl.master_weights(fl.adamw4bit(1e-3)),
    "factored": lambda: fl.chain(fl.scale_by_factored_rms(min_dim_size_to_factor=8), fl.scale(-1e-3)),
    "muon": lambda: fl.low_bit(fl.scale_by_muon()),
}


def placements(name: str, x: Any, dims: int) -> tuple[Any, ...]:
    """What `fully_shard` does, but for two leaves that are split in other ways."""
    if name == "uneven" and dims == 2:
        return (Shard(1), Shard(0))
    if name == "experts":
        return (Shard(1),) if dims == 1 else (Shard(2), Shard(0))
    return (*[Replicate()] * (dims - 1), Shard(0) if x.ndim else Replicate())


def found(mesh: tuple[int, ...]) -> Any:
    params = {
        n: w.shard(torch.zeros(s, dtype=torch.bfloat16), w.mesh(*mesh), *placements(n, torch.empty(s), len(mesh)))
        for n, s in SHAPES.items()
    }
    seen = {}
    for name, rule in RULES.items():
        tx = rule()
        state = tx.init(params)
        parts = [fl.sharding.local_of(x) for x in pytree.tree_leaves(state) if x is not None]
        seen[name] = (fl.describe(state, params), sum(x.nbytes for x in parts), fl.memory_plan(tx, params))
    return seen


MESHES = pytest.mark.parametrize(
    ("world", "mesh"), [(2, (2,)), (4, (2, 2))], indirect=["world"], ids=["2 ranks", "2 x 2 ranks"]
)


@MESHES
def test_a_plan_is_what_every_rank_finds(world: World, mesh: tuple[int, ...]) -> None:
    params = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in SHAPES.items()}
    seen = world.run(found, mesh)
    for name, rule in RULES.items():
        plan = fl.memory_plan(rule(), params, mesh=mesh, placements=lambda n, x: placements(n, x, len(mesh)))
        assert [rank[name][0] for rank in seen] == list(plan.ranks), name
        assert [rank[name][1] for rank in seen] == [report.total_bytes for report in plan.ranks], name
        assert all(rank[name][2] == plan for rank in seen), name  # made from the DTensors themselves
        assert len({report.training_bytes for report in plan.ranks}) > 1, name  # the shards are uneven
        assert plan.training_bytes == max(rank[name][0].training_bytes for rank in seen), name
        stored = [row for row in plan.rows if row.format in ("companded8", "root4")]
        assert any("cuts its rows" in row.why for row in stored) == bool(stored), name


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 129), nn.LayerNorm(129), nn.Linear(129, 1025), nn.Conv2d(3, 64, 5))


def under_fully_shard(mesh: tuple[int, ...]) -> Any:
    model = module()
    fully_shard(model, mesh=w.mesh(*mesh))
    params = dict(model.named_parameters())
    return fl.describe(fl.adamw8bit(1e-3).init(params), params)


@MESHES
def test_without_placements_it_is_fully_shard(world: World, mesh: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = module()
    assert list(fl.memory_plan(fl.adamw8bit(1e-3), model, mesh=mesh).ranks) == world.run(under_fully_shard, mesh)
