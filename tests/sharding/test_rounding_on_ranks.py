"""Stochastic rounding gives the bits of the plain run, on every mesh and for every placement."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from world import World

import functional_lowbit as fl
from functional_lowbit.formats._grid import grid_of
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.sharding._index import global_index

SHAPES = [(129, 192), (5,), (1,), (2, 3), (7, 4, 6), (0, 4), (3, 2, 5, 4), ()]


def some(*sizes: int) -> Any:
    return pytest.mark.parametrize("world", sizes, indirect=True, ids="W={}".format)


def rounded(sharded: bool) -> Any:
    """Every placement of every shape: two steps of updates that are too small for the nearest bfloat16."""
    seen = {}
    for shape in SHAPES:
        placements = [Replicate(), *map(Shard, range(len(shape)))] if sharded else [None]
        for placement in placements:
            cut = (lambda x, p=placement: w.shard(x, w.mesh(), p)) if sharded else (lambda x: x)
            params = {"w": cut(w.random(shape, 0, torch.bfloat16))}
            for step in range(2):
                updates = {"w": cut(w.random(shape, step) * 1e-3)}
                key = fl.rounding.fold_in(7, step)
                params = fl.apply_updates(params, updates, rounding="stochastic", key=key)
            seen[shape, str(placement)] = w.fingerprint(params)["w"]
    return seen


@some(2, 3)
def test_bits_are_those_of_the_plain_run(world: World, alone: Callable[..., Any]) -> None:
    plain = alone(rounded, False)
    for seen in world.run(rounded, True):
        assert len(seen) == sum(1 + len(shape) for shape in SHAPES)
        assert {key: plain[key[0], "None"] for key in seen} == seen


def indices(mesh_shape: tuple[int, ...]) -> Any:
    """What differs from torch's offsets, or from a tensor of indices that torch shards."""
    mesh, wrong = w.mesh(*mesh_shape), []
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        every = [*product([Replicate(), *map(Shard, range(len(shape)))], repeat=mesh.ndim)]
        if mesh.ndim == 2 and shape:
            every.append((_StridedShard(0, split_factor=mesh.size(1)), Shard(0)))
        for placements in every:
            local = w.shard(whole, mesh, *placements).to_local()
            spec = ShardSpec(mesh, placements, shape, whole.stride())
            index = global_index(shape, spec)
            offset = tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])
            if local.numel() and spec.local_offset() != offset:
                wrong.append((shape, placements, spec.local_offset(), offset))
            if not torch.equal(index.elements(), local.flatten()):
                wrong.append((shape, placements, index))
            for block_size in (2, 4, 250):
                grid = grid_of(local.shape, block_size)
                starts = index.blocks(grid)
                blocks = grid.to_blocks(local)
                if starts is None:
                    # Refused only where the mesh cuts behind the second dimension.
                    if all(p.dim < 2 for p in placements if isinstance(p, Shard)):
                        wrong.append((shape, placements, grid))
                    continue
                counted = grid.from_blocks(starts + torch.arange(grid.block), local.shape)
                if blocks.numel() and not torch.equal(counted, local):
                    wrong.append((shape, placements, grid, starts))
    return wrong


@pytest.mark.parametrize(("world", "mesh"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (2, 2))], indirect=["world"], ids=str)
def test_indices_are_those_of_the_whole_leaf(world: World, mesh: tuple[int, ...]) -> None:
    for wrong in world.run(indices, mesh):
        assert wrong == []


def placed(dims: int) -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Leaves of which the mesh cuts no block of 256; bfloat16 is rounded in the kernel."""
    if dims == 1:
        return {
            "rows": ((33, 640), (Shard(0),)),
            "columns": ((33, 640), (Shard(1),)),
            "repeated": ((33, 640), (Replicate(),)),
            "experts": ((5, 7, 320), (Shard(1),)),
            "vector": ((8192,), (Shard(0),)),
            "small": ((5,), (Shard(0),)),
        }
    return {
        "strided": ((35, 640), (_StridedShard(0, split_factor=2), Shard(0))),
        "both": ((33, 512), (Shard(0), Shard(1))),
        "columns twice": ((9, 1024), (Shard(1), Shard(1))),
        "strided columns": ((9, 1024), (_StridedShard(1, split_factor=2), Shard(1))),
        "experts": ((5, 7, 320), (Shard(1), Shard(0))),
        "vector": ((8192,), (_StridedShard(0, split_factor=2), Shard(0))),
        "hybrid": ((33, 640), (Replicate(), Shard(0))),
    }


def stepped(rule: str, way: str, dims: int, sharded: bool) -> Any:
    """Three steps on bfloat16: in noise, or with masters."""
    leaves = placed(dims)
    mesh = w.mesh(*(2,) * dims) if sharded else None

    def cut(name: str, x: Tensor) -> Tensor:
        return w.shard(x, mesh, *leaves[name][1]) if sharded else x

    params = {n: cut(n, w.random(s, i, torch.bfloat16)) for i, (n, (s, _)) in enumerate(leaves.items())}
    tx: Any = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, weight_decay=0.1))
    if rule == "masters":
        tx = fl.master_weights(tx)
        step = fl.compile(tx, backend=way)
    else:
        step = fl.compile(tx, backend=way, rounding="stochastic", key=7)
    state = tx.init(params)
    for k in range(3):
        grads = {n: cut(n, w.random(s, 9 * k + i, torch.bfloat16)) for i, (n, (s, _)) in enumerate(leaves.items())}
        params, state = step(grads, state, params)
    return w.fingerprint(params), w.of_state(state)


@pytest.mark.parametrize(("world", "dims"), [(2, 1), (4, 2)], indirect=["world"], ids=str)
@pytest.mark.parametrize(("rule", "way"), [("noise", "native"), ("noise", "eager"), ("masters", "native")])
def test_steps_of_bfloat16_on_any_placement(
    world: World, alone: Callable[..., Any], dims: int, rule: str, way: str
) -> None:
    plain = alone(stepped, rule, way, dims, False)
    for found in world.run(stepped, rule, way, dims, True):
        assert found == plain
