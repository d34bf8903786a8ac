"""The grid: how a tensor is cut into blocks that share a scale."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Grid(NamedTuple):
    """A tensor seen as rows, and each row as blocks of one length.

    A row is one index of dimension 0, or of the first dimensions if those behind them are long enough (`lead_of`); a
    tensor with fewer than two dimensions is a single row. No block crosses a row, so any split of these dimensions over
    ranks leaves every block whole. A row that cannot be divided evenly is padded with zeros behind its last block, by
    fewer elements than it has blocks.
    """

    rows: int
    row_length: int  # elements of a row
    block: int  # elements of a block
    blocks_per_row: int

    @property
    def n_blocks(self) -> int:
        """Blocks in all."""
        return self.rows * self.blocks_per_row

    @property
    def padding(self) -> int:
        """Zeros that are put behind each row."""
        return self.blocks_per_row * self.block - self.row_length

    def lengths(self, device: torch.device) -> Tensor:
        """Elements of each block without its padding: int32[n_blocks, 1]."""
        lengths = torch.full((self.rows, self.blocks_per_row), self.block, dtype=torch.int32, device=device)
        lengths[:, -1:] -= self.padding
        return lengths.view(-1, 1)

    def to_blocks(self, x: Tensor) -> Tensor:
        """[*shape] -> [n_blocks, block]: a view of a contiguous tensor without padding, else a copy."""
        if self.padding == 0:
            return x.reshape(self.n_blocks, self.block)
        return F.pad(x.reshape(self.rows, self.row_length), (0, self.padding)).view(self.n_blocks, self.block)

    def from_blocks(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """[n_blocks, block] -> [*shape]; the padding is dropped."""
        if self.padding == 0 or self.n_blocks == 0:
            return blocks.reshape(shape)
        return blocks.reshape(self.rows, -1)[:, : self.row_length].reshape(shape)

    def part(self, rows: int, row_length: int) -> "Grid":
        """The grid of a rank's part: some of the rows, or whole blocks of each."""
        if rows * row_length == 0:
            return Grid(0, row_length, 1, 0)
        return Grid(rows, row_length, self.block, -(-row_length // self.block))


def grid_of(shape: Sequence[int], block_size: int) -> Grid:
    """The grid of a shape. It depends on nothing else, so it is the same on every mesh.

    Args:
        shape: Of the whole tensor, or of a shard whose blocks are its own.
        block_size: The longest block, >= 1.
    """
    lead = lead_of(shape, block_size)
    rows, length = prod(shape[:lead]), prod(shape[lead:])
    if rows * length == 0:
        return Grid(0, length, 1, 0)
    block = _block_length(length, block_size)
    return Grid(rows, length, block, -(-length // block))


def lead_of(shape: Sequence[int], block_size: int) -> int:
    """How many dimensions, from the first, count rows; the others, flattened, are one row.

    It is 1, or more if rows of the dimensions behind divide evenly into blocks of at least 5/8 of the block size: then
    scales cost as little as they do for longer rows, and a mesh may split these dimensions too, as it does the second
    one of expert weights (experts, in, out). A tensor with fewer than two dimensions is a single row.
    """
    if len(shape) < 2:
        return 0
    for lead in range(len(shape) - 1, 1, -1):
        length = prod(shape[lead:])
        if length and length % (block := _block_length(length, block_size)) == 0 and 8 * block >= 5 * block_size:
            return lead
    return 1


@lru_cache(maxsize=4096)
def _block_length(length: int, block_size: int) -> int:
    """The block length for rows of `length`: an even division if there is a good one.

    First the fewest blocks that are short enough, if they come out equal (384 -> 2 x 192). Then the longest divisor
    that is at least 5/8 of the block size (640 -> 4 x 160): its scales cost 4 / 160 bytes per element at most. Else as
    even as it goes (257 -> 129 + 128).
    """
    fewest = -(-length // block_size)
    if length % fewest == 0:
        return length // fewest
    for block in range(block_size, (5 * block_size - 1) // 8, -1):
        if length % block == 0:
            return block
    return -(-length // fewest)
