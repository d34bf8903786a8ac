"""DTensor in, DTensor out: local shards for the arithmetic, and the way back from the global shape and stride.

What knows of DTensors is in this module; messages between ranks are in `_collectives`, files in `checkpoint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from functional_lowbit._private import StridedShard, dtensor_anywhere
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats import _grid
from functional_lowbit.sharding import _chunks


@dataclass(frozen=True)
class ShardSpec:
    """All that is needed to rebuild a DTensor from a local shard.

    Args:
        mesh: The device mesh.
        placements: One placement for each mesh dimension: `Shard`, `Replicate`, or the strided shard that
            `fully_shard` makes of a tensor-parallel parameter.
        shape: Global shape.
        stride: Global stride, in elements.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.sharding.ShardSpec.of(torch.ones(2)) is None  # a plain tensor needs no spec
        True
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "ShardSpec | None":
        """The spec of a DTensor; None for a plain tensor.

        Raises:
            ValueError: for a placement other than `Shard` and `Replicate`, for strided shards that are not one piece of
                the tensor, and on a rank that is not in the mesh.
        """
        if not isinstance(x, DTensor):
            return None
        with speaking("ShardSpec.of"):
            return checked_spec(x)

    @property
    def sharded_mesh_dims(self) -> tuple[int, ...]:
        """The mesh dimensions over which the tensor is split (and not repeated)."""
        return tuple(i for i, p in enumerate(self.placements) if not isinstance(p, Replicate))

    @property
    def _splits(self) -> tuple[_chunks.Split, ...]:
        found: list[_chunks.Split] = []
        for p in self.placements:
            if isinstance(p, Replicate):
                found.append(None)
            else:
                found.append((p.dim, int(p.split_factor) if isinstance(p, StridedShard) else 1))
        return tuple(found)

    def parts_of(self, dim: int) -> int:
        """Into how many parts the mesh splits a dimension of the tensor."""
        return prod(self.mesh.size(i) for i in self.sharded_mesh_dims if self.placements[i].dim == dim)

    def keeps_blocks(self, block_size: int) -> bool:
        """Whether every rank holds whole blocks of the whole tensor's grid, and as many as a DTensor of blocks says.

        So it is if only dimensions that count rows are split; and if the first dimension behind them is split evenly,
        on the edges of blocks.

        Args:
            block_size: Of the grid: the longest block.
        """
        lead = _grid.lead_of(self.shape, block_size)
        if any(self.parts_of(dim) > 1 for dim in range(lead + 1, len(self.shape))):
            return False
        parts = self.parts_of(lead) if lead < len(self.shape) else 1
        if parts == 1 or prod(self.shape) == 0:
            return True
        grid = _grid.grid_of(self.shape, block_size)
        return grid.padding == 0 and self.shape[lead] % parts == 0 and grid.blocks_per_row % parts == 0

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of one rank's shard, by the rule of `torch.chunk`.

        Args:
            coordinate: The rank's index along each mesh dimension; this rank's by default.

        Raises:
            ValueError: without a coordinate on a rank that is not in the mesh.
        """
        return self._part("ShardSpec.local_shape", coordinate)[0]

    def local_offset(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """The index in the whole tensor of one rank's first element, by the rule of `torch.chunk`.

        An empty shard begins where the elements before it end.

        Args:
            coordinate: The rank's index along each mesh dimension; this rank's by default.

        Raises:
            ValueError: without a coordinate on a rank that is not in the mesh.
        """
        return self._part("ShardSpec.local_offset", coordinate)[1]

    def _part(self, speaker: str, coordinate: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, offset) of one rank's shard."""
        if coordinate is None:
            coordinate = self.mesh.get_coordinate()
            if coordinate is None:
                raise WrongValue("this rank is not in the mesh; pass a coordinate", speaker=speaker)
        return _chunks.part(self.shape, tuple(self.mesh.shape), self._splits, tuple(coordinate))

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor whose shard on this rank is `local`, of any dtype. Nothing is copied or communicated.

        `local` stays where it is, also if that is the CPU and the mesh is of another device: so rest a state that is
        offloaded, and the parameters of `fully_shard` with its `CPUOffloadPolicy`.

        Raises:
            ValueError: if `local` does not have this rank's `local_shape()`.
        """
        expected = self.local_shape()
        if tuple(local.shape) != expected:
            raise WrongValue(
                f"the local shard must have shape {expected}, which is this rank's part of the global shape "
                f"{self.shape} under {self.placements}; got {tuple(local.shape)}",
                speaker="ShardSpec.wrap",
            )
        shape = torch.Size(self.shape)
        if local.device.type not in (self.mesh.device_type, "meta"):
            # from_local would move it to the mesh's device. fully_shard makes what it offloads like this, too.
            return dtensor_anywhere(local, self.mesh, self.placements, shape, self.stride)
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=self.stride)

    def like(self, shape: Sequence[int]) -> "ShardSpec":
        """The same mesh and placements for a contiguous tensor of another global shape."""
        return ShardSpec(self.mesh, self.placements, tuple(shape), contiguous_stride(shape))

    def moved(self, dims: Sequence[int | None], shape: Sequence[int]) -> "ShardSpec":
        """The same mesh for a contiguous tensor of another global shape, whose dimensions are split like those here.

        Args:
            dims: For each dimension of this tensor, the one of the other that is split like it; None if none is.
            shape: Global shape of the other tensor.
        """
        placements = []
        for placement in self.placements:
            dim = None if isinstance(placement, Replicate) else dims[placement.dim]
            if dim is None:
                placements.append(Replicate())
            elif isinstance(placement, StridedShard):
                placements.append(StridedShard(dim, split_factor=placement.split_factor))
            else:
                placements.append(Shard(dim))
        return ShardSpec(self.mesh, tuple(placements), tuple(shape), contiguous_stride(shape))

    def per_shard(self, local_length: int) -> "ShardSpec":
        """A spec for data that belongs to one shard and has no global order: one row of `local_length` for each shard.

        The global shape is (ranks of the first sharded mesh dimension, ranks of the second, …, local_length).
        """
        placements: list[Any] = [Replicate()] * len(self.placements)
        lead = []
        for mesh_dim in self.sharded_mesh_dims:
            placements[mesh_dim] = Shard(len(lead))
            lead.append(self.mesh.size(mesh_dim))
        shape = (*lead, local_length)
        return ShardSpec(self.mesh, tuple(placements), shape, contiguous_stride(shape))

    def local_shapes(self) -> set[tuple[int, ...]]:
        """The different shapes that shards have, over all ranks: full chunks, the last one, empty ones."""
        return _chunks.shapes(self.shape, tuple(self.mesh.shape), self._splits)


def checked_spec(x: Tensor) -> ShardSpec | None:
    """As `ShardSpec.of`, but what is refused is so in the name of whoever asks."""
    if not isinstance(x, DTensor):
        return None
    for placement in x.placements:
        if not isinstance(placement, (Shard, StridedShard, Replicate)):
            raise WrongValue(
                f"placements must be Shard or Replicate, got {placement!r} in {tuple(x.placements)}; redistribute the "
                "tensor first"
            )
    spec = ShardSpec(x.device_mesh, tuple(x.placements), tuple(x.shape), tuple(x.stride()))
    if spec.mesh.get_coordinate() is None:
        raise WrongValue(f"this rank is not in the tensor's mesh, {spec.mesh}; leave the tensor out of the tree here")
    if not _chunks.in_one_piece(spec.shape, tuple(spec.mesh.shape), spec._splits):
        raise WrongValue(
            f"each rank must hold one piece of the tensor, but {spec.placements} of shape {spec.shape} on a mesh of "
            f"{tuple(spec.mesh.shape)} gives some rank several; redistribute the tensor first"
        )
    return spec


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor, in elements."""
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))
