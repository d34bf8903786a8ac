"""A mesh that is only planned: DTensors as a rank of it would hold them, without a process group."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from functional_lowbit._private import StridedShard, mesh_without_group
from functional_lowbit._refused import WrongValue
from functional_lowbit.sharding import ShardSpec, contiguous_stride

MeshShape: TypeAlias = int | Sequence[int] | Mapping[str, int] | DeviceMesh
"""Ranks along each mesh dimension, with names if it is a dict; or a mesh that is there."""

Placements: TypeAlias = Sequence[Any] | Callable[[str, Tensor], Sequence[Any]] | None
"""A placement for each mesh dimension; or a function of path and leaf to that; None for those of `fully_shard`."""


class PlannedMesh:
    """A mesh of some shape, as each of its ranks sees it."""

    def __init__(self, mesh: MeshShape):
        self.names: tuple[str, ...] | None = None
        if isinstance(mesh, Mapping):
            self.names = tuple(mesh)
            sizes: Any = tuple(mesh.values())
        elif isinstance(mesh, DeviceMesh):
            self.names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
        else:
            sizes = (mesh,) if isinstance(mesh, int) else mesh
        if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes or not all(map(_is_size, sizes)):
            raise WrongValue(
                f"mesh must be a number of ranks, or such numbers for each mesh dimension, as (2, 4) or "
                "{'replicate': 2, 'shard': 4}, got "
                f"{mesh!r}"
            )
        self.shape = tuple(sizes)

    def specs(self, paths: Sequence[str], leaves: Sequence[Tensor], placements: Placements) -> list[ShardSpec]:
        """How each leaf is sharded, as rank 0 sees it."""
        mesh = self.of_rank(0)
        return [
            ShardSpec(mesh, self._placed(path, leaf, placements), tuple(leaf.shape), contiguous_stride(leaf.shape))
            for path, leaf in zip(paths, leaves, strict=True)
        ]

    def alike(self, specs: Sequence[ShardSpec]) -> list[list[int]]:
        """Ranks whose shards all have the same shapes, together; in order of the first of each."""
        different = {(s.shape, s.placements): s for s in specs}.values()
        groups: dict[Any, list[int]] = {}
        for rank, coordinate in enumerate(product(*map(range, self.shape))):
            groups.setdefault(tuple(s.local_shape(coordinate) for s in different), []).append(rank)
        return list(groups.values())

    def of_rank(self, rank: int) -> DeviceMesh:
        """The mesh as a rank would see it; nothing can be sent over it."""
        with torch.device("cpu"):  # whatever the default device
            ranks = torch.arange(prod(self.shape)).view(self.shape)
            return mesh_without_group(ranks, self.names, rank)

    def _placed(self, path: str, leaf: Tensor, placements: Placements) -> tuple[Any, ...]:
        if placements is None:
            last = Shard(0) if leaf.ndim else Replicate()
            return (*[Replicate()] * (len(self.shape) - 1), last)
        chosen = placements(path, leaf) if callable(placements) else placements
        if not isinstance(chosen, Sequence) or len(chosen) != len(self.shape):
            raise WrongValue(
                f"placements of {path!r} must be {len(self.shape)}, one for each dimension of the mesh {self.shape}, "
                f"got {chosen!r}",
                path,
            )
        return tuple(self._checked(path, leaf, p) for p in chosen)

    def _checked(self, path: str, leaf: Tensor, placement: Any) -> Any:
        if isinstance(placement, Replicate):
            return placement
        if not isinstance(placement, (Shard, StridedShard)):
            raise WrongValue(f"placements of {path!r} must be Shard or Replicate, got {placement!r}", path)
        if not -leaf.ndim <= placement.dim < leaf.ndim:
            raise WrongValue(
                f"placements of {path!r}: {placement!r} splits a dimension that shape {tuple(leaf.shape)} does not "
                "have; give a function of path and leaf, which may choose others for it",
                path,
            )
        if placement.dim >= 0:
            return placement
        dim = placement.dim + leaf.ndim
        if isinstance(placement, StridedShard):
            return StridedShard(dim, split_factor=placement.split_factor)
        return Shard(dim)


def on_rank(specs: Sequence[ShardSpec | None], leaves: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The leaves as DTensors of a mesh, one rank's; those without a spec as they are. Meta tensors only."""

    def placed(spec: ShardSpec, leaf: Tensor) -> Tensor:
        own = ShardSpec(mesh, spec.placements, spec.shape, spec.stride)
        return own.wrap(torch.empty(own.local_shape(), dtype=leaf.dtype, device="meta"))

    return [leaf if spec is None else placed(spec, leaf) for spec, leaf in zip(specs, leaves, strict=True)]


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
