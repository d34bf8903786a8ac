"""Communication between the ranks that hold parts of leaves."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from functional_lowbit._refused import WrongValue
from functional_lowbit.sharding._spec import ShardSpec, contiguous_stride

Coordinate = tuple[int, ...]  # a rank's index along each mesh dimension


def sum_over_shards(
    parts: Sequence[tuple[Tensor, ShardSpec | None]], measure: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    """A sum over all elements of all leaves, over the ranks that hold different parts of a leaf.

    A replicated part is counted once. Leaves that are sharded alike are measured and communicated together, so the
    number of collectives is that of the different (mesh, mesh dimension) pairs. Every rank must call this with the same
    leaves in the same order, empty shards included.

    Args:
        parts: (local shard, spec of its leaf), at least one.
        measure: The sum for some local shards, a tensor of always the same shape and dtype.
    """
    alike: dict[Any, list[Tensor]] = {}
    for local, spec in parts:
        key = None if spec is None or not spec.sharded_mesh_dims else (spec.mesh, spec.sharded_mesh_dims)
        alike.setdefault((key, local.device), []).append(local)
    result: Tensor | None = None
    for (key, _), locals in alike.items():
        total = measure(locals)
        if key is not None:
            mesh, mesh_dims = key
            for mesh_dim in mesh_dims:
                dist.all_reduce(total, group=mesh.get_group(mesh_dim))
        result = total if result is None else result + total.to(result.device)
    if result is None:
        raise WrongValue("nothing to add", speaker="sum_over_shards")
    return result


def sum_over_meshes_(number: Tensor, specs: Sequence[ShardSpec | None]) -> Tensor:
    """A number of each rank, added up over all ranks of all meshes; the same on every rank.

    Unlike in `sum_over_shards`, replicas count each, so that they notice when one of them is not like the others. Every
    rank must call this with the same specs in the same order.

    Args:
        number: 0-d; written to.
        specs: Of all leaves; None for a plain tensor.
    """
    meshes = dict.fromkeys(spec.mesh for spec in specs if spec is not None)
    # Larger ones last: then ranks agree also about what only the ranks of a part of them hold.
    for mesh in sorted(meshes, key=lambda mesh: mesh.size()):
        for mesh_dim in range(mesh.ndim):
            if mesh.size(mesh_dim) > 1:
                dist.all_reduce(number, group=mesh.get_group(mesh_dim))
    return number


def all_reduce_(x: Tensor, spec: ShardSpec | None, dims: Sequence[int], largest: bool = False) -> Tensor:
    """The sum (or the largest) over the ranks that hold different parts along some dimensions of a leaf.

    Args:
        x: What this rank has, contiguous; it is written to.
        spec: Of the leaf; None for a plain tensor.
        dims: Dimensions of the leaf, not negative. Mesh dimensions that cut others are left alone.
        largest: The largest instead of the sum.
    """
    if spec is None:
        return x
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for mesh_dim in spec.sharded_mesh_dims:
        if spec.placements[mesh_dim].dim % len(spec.shape) in dims and spec.mesh.size(mesh_dim) > 1:
            dist.all_reduce(x, op=op, group=spec.mesh.get_group(mesh_dim))
    return x


def team_of(spec: ShardSpec) -> list[Coordinate]:
    """The ranks that together hold one copy of a leaf, this one among them, in order. The others hold other copies."""
    own = spec.mesh.get_coordinate()
    if own is None:
        raise WrongValue("this rank is not in the mesh", speaker="team_of")
    cut = spec.sharded_mesh_dims
    ranges = [range(spec.mesh.size(d)) if d in cut else (own[d],) for d in range(len(own))]
    return list(itertools.product(*ranges))


def own_coordinate(spec: ShardSpec) -> Coordinate:
    """This rank's place in the mesh."""
    return tuple(spec.mesh.get_coordinate() or ())


def exchange(
    spec: ShardSpec, sends: Sequence[tuple[Coordinate, Tensor]], receives: Sequence[tuple[Coordinate, Tensor]]
) -> None:
    """Send and receive tensors, all at once; returns when all have arrived.

    At most one tensor goes from one rank to another, so that the order does not matter.

    Args:
        spec: Its mesh says which rank a coordinate is.
        sends: (to whom, what).
        receives: (from whom, where it is written to).
    """
    ranks = spec.mesh.mesh
    ops = [dist.P2POp(dist.isend, x, int(ranks[to])) for to, x in sends]
    ops += [dist.P2POp(dist.irecv, x, int(ranks[whence])) for whence, x in receives]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def reduced(spec: ShardSpec, dims: Sequence[int], keepdim: bool = True) -> ShardSpec:
    """The spec of what is left of a tensor: repeated where a reduced dimension was cut.

    Args:
        spec: Of the tensor.
        dims: Reduced dimensions, not negative.
        keepdim: Whether they are kept, with size 1.
    """
    left = [d for d in range(len(spec.shape)) if keepdim or d not in dims]
    shape = [1 if d in dims else spec.shape[d] for d in left]
    placements = []
    for mesh_dim, placement in enumerate(spec.placements):
        if mesh_dim not in spec.sharded_mesh_dims:
            placements.append(placement)
        elif placement.dim % len(spec.shape) in dims:
            placements.append(Replicate())
        elif keepdim:
            placements.append(placement)
        elif type(placement) is Shard:
            placements.append(Shard(left.index(placement.dim % len(spec.shape))))
        else:
            raise WrongValue(f"{placement!r} needs keepdim=True", speaker="reduce")
    return ShardSpec(spec.mesh, tuple(placements), tuple(shape), contiguous_stride(shape))
