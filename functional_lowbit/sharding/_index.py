"""Which elements of a whole leaf a rank holds, by their index in row-major order."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from functional_lowbit.formats._grid import Grid
from functional_lowbit.sharding._spec import ShardSpec, contiguous_stride


class GlobalIndex(NamedTuple):
    """A rank's elements as runs of one length, each of consecutive elements of the whole leaf."""

    starts: Tensor  # int64[runs], on the CPU; index of each run's first element
    length: int  # elements of a run

    def elements(self) -> Tensor:
        """The index of every element: int64[elements on this rank]."""
        return (self.starts[:, None] + torch.arange(self.length, device="cpu")).flatten()

    def blocks(self, grid: Grid) -> Tensor | None:
        """The index of the first element of each block: int64[n_blocks, 1]. The others of the block count on from it.

        None if the elements of some block do not: the mesh cuts a dimension behind the second, and blocks cross its
        edge.

        Args:
            grid: Of this rank's part of the leaf.
        """
        if grid.n_blocks == 0:
            return torch.zeros((0, 1), dtype=torch.int64, device="cpu")
        whole_rows = self.length % grid.row_length == 0
        whole_blocks = grid.row_length % self.length == 0 and self.length % grid.block == 0 and grid.padding == 0
        if not (whole_rows or whole_blocks):
            return None
        rows = torch.arange(grid.rows, device="cpu")[:, None] * grid.row_length
        local = (rows + torch.arange(grid.blocks_per_row, device="cpu") * grid.block).view(-1, 1)
        return self.starts[local // self.length] + local % self.length


def global_index(shape: Sequence[int], spec: ShardSpec | None) -> GlobalIndex:
    """Where this rank's elements are in the whole leaf.

    Args:
        shape: Of the whole leaf.
        spec: Of the leaf; None if this rank holds all of it.
    """
    local = tuple(shape) if spec is None else spec.local_shape()
    if prod(local) == 0:
        return GlobalIndex(torch.zeros(0, dtype=torch.int64, device="cpu"), 1)
    cut = max((d for d, (a, b) in enumerate(zip(local, shape, strict=True)) if a != b), default=0)
    starts = torch.zeros((), dtype=torch.int64, device="cpu")
    if spec is not None:
        stride = contiguous_stride(shape)
        for dim, first in enumerate(spec.local_offset()[: cut + 1]):
            here = torch.arange(local[dim] if dim < cut else 1, device="cpu")
            starts = starts[..., None] + (first + here) * stride[dim]
    return GlobalIndex(starts.flatten(), prod(local[cut:]))
