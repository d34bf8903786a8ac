"""DTensor in, DTensor out: local shards for the arithmetic, and the way back from the global shape and stride.

All that knows of `torch.distributed` is in this module (and in the checkpoint's).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from functional_lowbit import _tree
from functional_lowbit._base import Tree


@dataclass(frozen=True)
class ShardSpec:
    """All that is needed to rebuild a DTensor from a local shard.

    Args:
        mesh: The device mesh.
        placements: One placement for each mesh dimension; `Shard` or `Replicate`.
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
            ValueError: for a placement other than `Shard` and `Replicate`.
        """
        if not isinstance(x, DTensor):
            return None
        for placement in x.placements:
            if not isinstance(placement, (Shard, Replicate)):
                raise ValueError(
                    f"ShardSpec.of: placements must be Shard or Replicate, got {placement!r} in {tuple(x.placements)}; "
                    "redistribute the tensor first"
                )
        return cls(x.device_mesh, tuple(x.placements), tuple(x.shape), tuple(x.stride()))

    @property
    def sharded_mesh_dims(self) -> tuple[int, ...]:
        """The mesh dimensions over which the tensor is split (and not repeated)."""
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Shard))

    @property
    def keeps_rows(self) -> bool:
        """Whether every rank holds whole rows, so that no block of a grid is cut."""
        sharded = [self.placements[i] for i in self.sharded_mesh_dims]
        return not sharded or (len(self.shape) > 1 and all(p.dim % len(self.shape) == 0 for p in sharded))

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of one rank's shard, by the rule of `torch.chunk`.

        Args:
            coordinate: The rank's index along each mesh dimension; this rank's by default.

        Raises:
            ValueError: without a coordinate on a rank that is not in the mesh.
        """
        return self._part("local_shape", coordinate)[0]

    def local_offset(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """The index in the whole tensor of one rank's first element, by the rule of `torch.chunk`.

        An empty shard begins where the elements before it end.

        Args:
            coordinate: The rank's index along each mesh dimension; this rank's by default.

        Raises:
            ValueError: without a coordinate on a rank that is not in the mesh.
        """
        return self._part("local_offset", coordinate)[1]

    def _part(self, speaker: str, coordinate: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, offset) of one rank's shard."""
        if coordinate is None:
            coordinate = self.mesh.get_coordinate()
            if coordinate is None:
                raise ValueError(f"ShardSpec.{speaker}: this rank is not in the mesh; pass a coordinate")
        shape, offset = list(self.shape), [0] * len(self.shape)
        for mesh_dim, (placement, index) in enumerate(zip(self.placements, coordinate, strict=True)):
            if isinstance(placement, Shard):
                length = shape[placement.dim]
                first = min(-(-length // self.mesh.size(mesh_dim)) * index, length)
                offset[placement.dim] += first
                shape[placement.dim] = min(-(-length // self.mesh.size(mesh_dim)), length - first)
        return tuple(shape), tuple(offset)

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor whose shard on this rank is `local`, of any dtype. Nothing is copied or communicated.

        Raises:
            ValueError: if `local` does not have this rank's `local_shape()`.
        """
        expected = self.local_shape()
        if tuple(local.shape) != expected:
            raise ValueError(
                f"ShardSpec.wrap: the local shard must have shape {expected}, which is this rank's part of the global "
                f"shape {self.shape} under {self.placements}; got {tuple(local.shape)}"
            )
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def like(self, shape: Sequence[int]) -> "ShardSpec":
        """The same mesh and placements for a contiguous tensor of another global shape."""
        return ShardSpec(self.mesh, self.placements, tuple(shape), contiguous_stride(shape))

    def per_shard(self, local_length: int) -> "ShardSpec":
        """A spec for data that belongs to one shard and has no global order: one row of `local_length` for each shard.

        The global shape is (ranks of the first sharded mesh dimension, ranks of the second, …, local_length).
        """
        placements, lead = [], []
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                placements.append(Shard(len(lead)))
                lead.append(self.mesh.size(mesh_dim))
            else:
                placements.append(Replicate())
        shape = (*lead, local_length)
        return ShardSpec(self.mesh, tuple(placements), shape, contiguous_stride(shape))

    def local_shapes(self) -> set[tuple[int, ...]]:
        """The different shapes that shards have, over all ranks: full chunks, the last one, empty ones."""
        shapes = {self.shape}
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                ranks, dim = self.mesh.size(mesh_dim), placement.dim
                cut: set[tuple[int, ...]] = set()
                for shape in shapes:
                    chunk = -(-shape[dim] // ranks)
                    full = shape[dim] // chunk if chunk else 0
                    lengths = {
                        chunk,
                        shape[dim] - full * chunk if full < ranks else chunk,
                        0 if full + 1 < ranks else chunk,
                    }
                    cut |= {(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths}
                shapes = cut
        return shapes


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor, in elements."""
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def local_of(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, detached; a plain tensor is detached too. Shares memory with `x`."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            x = x.to_local()
        if hasattr(x, "wait"):  # an AsyncCollectiveTensor, whose communication may not have ended
            x = x.wait()  # type: ignore[operator]
    return x.detach() if x.requires_grad or type(x) is not Tensor else x


def part_of(x: Tensor) -> Tensor:
    """As `local_of`, but a plain tensor that is no parameter keeps its autograd history, for meta-gradients."""
    return local_of(x) if isinstance(x, (DTensor, torch.nn.Parameter)) else x


def wrap(local: Tensor, spec: ShardSpec | None) -> Tensor:
    """`spec.wrap(local)`, or the plain tensor if there is no spec."""
    return local if spec is None else spec.wrap(local)


def to_local(tree: Tree) -> tuple[Tree, Tree]:
    """Split a tree into detached local tensors and the specs that rebuild it.

    Args:
        tree: Any pytree of tensors and DTensors.

    Returns:
        Two trees of the same structure: local tensors, which share memory with the leaves, and a `ShardSpec` for each
        DTensor or None for each plain tensor.

    Raises:
        ValueError: for a placement other than `Shard` and `Replicate`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> locals_, specs = fl.sharding.to_local({"w": torch.ones(2, requires_grad=True)})
        >>> locals_, specs
        ({'w': tensor([1., 1.])}, {'w': None})
    """
    leaves, treedef = _tree.flatten(tree)
    specs = [ShardSpec.of(x) for x in leaves]
    return _tree.unflatten(treedef, [local_of(x) for x in leaves]), _tree.unflatten(treedef, specs)


def from_local(locals_: Tree, specs: Tree) -> Tree:
    """The way back from `to_local`: DTensors of the global shape and stride in the specs.

    Raises:
        ValueError: if a local tensor does not have the shape that its spec says.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.sharding.from_local({"w": torch.ones(2)}, {"w": None})
        {'w': tensor([1., 1.])}
    """
    leaves, treedef = _tree.flatten(locals_)
    return _tree.unflatten(
        treedef, [wrap(x, s) for x, s in zip(leaves, _tree.flatten_up_to(treedef, specs), strict=True)]
    )


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
    for (key, _), locals_ in alike.items():
        total = measure(locals_)
        if key is not None:
            mesh, mesh_dims = key
            for mesh_dim in mesh_dims:
                dist.all_reduce(total, group=mesh.get_group(mesh_dim))
        result = total if result is None else result + total.to(result.device)
    if result is None:
        raise ValueError("sum_over_shards: nothing to add")
    return result
