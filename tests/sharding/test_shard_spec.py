"""ShardSpec: torch's rule for local shapes, and what is refused."""

from itertools import product
from typing import Any

import pytest
import torch
import world as w
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from world import World, error

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec

two, four = (pytest.mark.parametrize("world", [n], indirect=True, ids=[f"W={n}"]) for n in (2, 4))


SHAPES = [(), (1,), (2,), (5,), (4096,), (1, 1), (3, 2048), (10, 2), (33, 512), (0, 4), (7, 5), (9, 1, 6), (4, 3, 3, 3)]


def placements_of(ndim: int, mesh_dims: int) -> list[tuple[Any, ...]]:
    return list(product([Replicate(), *(Shard(d) for d in range(ndim))], repeat=mesh_dims))


def shapes_by_torch(mesh_shape: tuple[int, ...]) -> Any:
    mesh = w.mesh(*mesh_shape)
    differ, count = [], 0
    for shape in SHAPES:
        for placements in placements_of(len(shape), mesh.ndim):
            spec = ShardSpec(mesh, placements, shape, torch.empty(shape).stride())
            expected = tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])
            count += 1
            for got in {spec.local_shape(), spec.local_shape(mesh.get_coordinate())} - {expected}:
                differ.append((shape, placements, got, expected))  # noqa: PERF401  a loop reads better
    return count, differ


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2)), (4, (1, 4)), (4, (4, 1)), (3, (1, 3))],
    indirect=["world"],
    ids=str,
)
def test_local_shape_is_torchs(world: World, mesh: tuple[int, ...]) -> None:
    for count, differ in world.run(shapes_by_torch, mesh):
        assert count >= len(SHAPES)
        assert differ == []


def round_trip(mesh_shape: tuple[int, ...]) -> Any:
    mesh = w.mesh(*mesh_shape)
    wrong = []
    for shape, dtype in product(SHAPES, (torch.float32, torch.bfloat16, torch.uint8)):
        full = (w.random(shape, 3) * 50).to(dtype)
        for placements in placements_of(len(shape), mesh.ndim):
            there = w.shard(full, mesh, *placements)
            tree = {"d": [nn.Parameter(there) if dtype.is_floating_point else there], "p": full, "none": None}
            locals_, specs = fl.sharding.to_local(tree)
            back = fl.sharding.from_local(locals_, specs)
            local, spec, again = locals_["d"][0], specs["d"][0], back["d"][0]
            fine = (
                type(local) is torch.Tensor
                and not local.requires_grad
                and local.data_ptr() == there.to_local().data_ptr()
                and specs["p"] is None
                and back["none"] is None
                and back["p"].data_ptr() == full.data_ptr()
                and spec == ShardSpec.of(there)
                and (again.shape, again.stride(), again.placements) == (there.shape, there.stride(), there.placements)
                and torch.equal(again.full_tensor(), full)
            )
            if not fine:
                wrong.append((shape, dtype, placements))
    return wrong


@pytest.mark.parametrize(
    ("world", "mesh"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2))], indirect=["world"], ids=str
)
def test_to_local_and_back(world: World, mesh: tuple[int, ...]) -> None:
    for wrong in world.run(round_trip, mesh):
        assert wrong == []


def several_pieces() -> DTensor:
    """A strided shard without the shard that goes with it: rows 0, 1, 4, 5 on one rank, and the others on the other."""
    return DTensor.from_local(
        torch.ones(4, 4), w.mesh(), [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 4), stride=(4, 1)
    )


def refusals() -> Any:
    spec = ShardSpec.of(w.shard(torch.zeros(33, 4)))
    assert spec is not None
    partial = DTensor.from_local(torch.ones(4, 4), w.mesh(), [Partial()], run_check=False)
    plain, cut = {"w": torch.ones(8, 4)}, {"w": w.shard(torch.ones(8, 4))}
    other = {"w": w.shard(torch.ones(8, 4), w.mesh(1, 2), Replicate(), Shard(0))}
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adam(0.1))
    state = tx.init(cut)
    return {
        "local": tuple(spec.local_shape()),
        "wrong local": error(spec.wrap, torch.zeros(8, 4)),
        "from_local": error(fl.sharding.from_local, [torch.zeros(9, 4).T], [spec]),
        "partial": error(ShardSpec.of, partial),
        "partial tree": error(fl.sharding.to_local, {"w": partial}),
        "partial norm": error(fl.global_norm, [partial]),
        "partial parameter": error(tx.init, {"a": [partial]}),
        "several pieces": error(tx.init, {"w": several_pieces()}),
        "plain gradient": error(tx.update, plain, state, cut),
        "plain gradient, compiled": error(fl.compile(tx, backend="eager"), plain, state, cut),
        "plain gradient, applied": error(fl.apply_updates, cut, plain),
        "plain parameter": error(fl.compile(tx, backend="eager"), cut, tx.init(plain), plain),
        "other mesh": error(fl.compile(tx, backend="eager"), other, state, cut),
        "untouched": torch.equal(cut["w"].full_tensor(), torch.ones(8, 4)),
    }


@two
def test_what_does_not_fit_is_refused(world: World) -> None:
    for rank, result in enumerate(world.run(refusals)):
        rows = (17, 16)[rank]
        assert result == {
            "local": (rows, 4),
            "wrong local": f"ValueError: ShardSpec.wrap: the local shard must have shape ({rows}, 4), which is this "
            "rank's part of the global shape (33, 4) under (Shard(dim=0),); got (8, 4)",
            "from_local": f"ValueError: ShardSpec.wrap: the local shard must have shape ({rows}, 4), which is this "
            "rank's part of the global shape (33, 4) under (Shard(dim=0),); got (4, 9)",
            "partial": "ValueError: ShardSpec.of: placements must be Shard or Replicate, got Partial(sum) in "
            "(Partial(sum),); redistribute the tensor first",
            "partial tree": result["partial"],
            "partial norm": result["partial"].replace("ShardSpec.of", "global_norm"),
            "partial parameter": result["partial"].replace("ShardSpec.of", "clip_by_global_norm.init: params['a.0']"),
            "several pieces": "ValueError: clip_by_global_norm.init: params['w']: each rank must hold one piece of the "
            "tensor, but (_StridedShard(dim=0, sf=2),) of shape (8, 4) on a mesh of (2,) gives some rank several; "
            "redistribute the tensor first",
            "plain gradient": "TypeError: clip_by_global_norm.update: updates['w'] is a plain tensor, but its "
            "parameter is a DTensor",
            "plain gradient, compiled": "TypeError: compile(tx): updates['w'] is a plain tensor, but its parameter is "
            "a DTensor",
            "plain gradient, applied": "TypeError: apply_updates: updates['w'] is a plain tensor, but its parameter is "
            "a DTensor",
            "plain parameter": "TypeError: compile(tx): updates['w'] is a DTensor, but its parameter is a plain tensor",
            "other mesh": "ValueError: compile(tx): updates['w'] lies on "
            "DeviceMesh((replicate=1, shard=2), 'cpu', stride=((), 1)), but its parameter on "
            "DeviceMesh((shard=2), 'cpu', stride=(1,))",
            "untouched": True,
        }


def strided_by_torch() -> Any:
    """Shapes and offsets of the strided shards of a parameter that is split by "shard" first, then by "replicate"."""
    mesh = w.mesh(2, 2)
    differ, refused = [], []
    for rows in range(20):
        full = torch.arange(rows * 3.0).view(rows, 3)
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        spec = ShardSpec(mesh, placements, (rows, 3), (3, 1))
        outer = full.chunk(2)  # as tensor parallelism does it, and fully_shard then with each
        row, column = mesh.get_coordinate() or (0, 0)
        inner = outer[column].chunk(2) if column < len(outer) else ()
        mine = inner[row] if row < len(inner) else full[:0]
        expected = compute_local_shape_and_global_offset((rows, 3), mesh, placements)[0]
        if tuple(mine.shape) != tuple(expected):
            refused.append(rows)  # torch's own DTensor disagrees with the shard that fully_shard makes
        first = spec.local_offset()[0]
        if spec.local_shape() != expected or not torch.equal(full[first : first + len(mine)], mine):
            differ.append(rows)
    return differ, refused


@four
def test_strided_shards_are_where_torch_puts_them(world: World) -> None:
    for differ, refused in world.run(strided_by_torch):
        assert differ == []
        assert refused == []
