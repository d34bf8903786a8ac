"""The global norm, the same number on every mesh."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.cpp.norm import square_bins
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.formats._grid import grid_of
from functional_lowbit.sharding import ShardSpec, part_of
from functional_lowbit.sharding._collectives import sum_over_shards
from functional_lowbit.sharding._spec import checked_spec

# Floating-point sums depend on their order, and the order on the mesh. So each block of the grid is summed in float32,
# which no split between blocks can change, and the sums of blocks are then added exactly: float32 numbers of one
# exponent are integers of 24 bits, and a float64 adds 2**29 of them without rounding. One bin for each exponent.
BLOCK = 256  # elements that are summed in float32, at most
EXPONENTS = 278  # frexp of a positive float32 gives -148 … 128
INFINITE, NOT_A_NUMBER = EXPONENTS, EXPONENTS + 1  # two more bins, which count


def global_norm(tree: Tree) -> Tensor:
    """The Euclidean norm of all leaves together.

    The sum of squares is taken over whole blocks and added exactly, so that the result is bit-equal for every split of
    dimension 0, and for every other split that cuts no block of the grid, whatever the number of ranks. A replicated
    leaf counts once. All ranks must call it together.

    Squares are float32: the norm of a block of 256 numbers is 0 below 1e-23 or so, and Inf above 1.8e19.

    Args:
        tree: Any pytree of floating-point tensors and DTensors; meshes and placements may differ. None is passed over.

    Returns:
        float32[], a plain tensor, the same on every rank; 0 for an empty tree.

    Raises:
        ValueError: for a placement other than `Shard` and `Replicate`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
        tensor(5.)
    """
    leaves = _optree.leaves(tree)
    if not leaves:
        return torch.zeros((), dtype=torch.float32)
    with speaking("global_norm"):
        specs = [checked_spec(x) for x in leaves]
    parts = [_in_blocks(part_of(x), tuple(x.shape), s) for x, s in zip(leaves, specs, strict=True)]
    bins = sum_over_shards(list(zip(parts, specs, strict=True)), _square_bins)
    total = torch.dot(bins[:EXPONENTS], _bin_values(bins.device))
    total = torch.where(bins[INFINITE] > 0, float("inf"), total)
    total = torch.where(bins[NOT_A_NUMBER] > 0, float("nan"), total)
    return total.sqrt().float()


def _in_blocks(local: Tensor, shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
    """A rank's part as rows that are summed by blocks; one dimension stays one, where each element is a block."""
    if len(shape) < 2 or local.numel() == 0:
        return local
    grid = grid_of(shape, BLOCK)
    if grid.padding == 0 and (spec is None or spec.keeps_blocks(BLOCK)):
        return local.reshape(-1, grid.block)
    return local.reshape(local.shape[0], -1)


@lru_cache(maxsize=8)
def _bin_values(device: torch.device) -> Tensor:
    """What a 1 in each bin stands for: float64[EXPONENTS]."""
    with torch.inference_mode(False):
        return torch.exp2(torch.arange(EXPONENTS, dtype=torch.float64, device=device) - (148 + 24))


def _square_bins(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of local tensors, added up by exponent: float64[EXPONENTS + 2]."""
    bins = square_bins(tensors, BLOCK, EXPONENTS + 2)
    if bins is not None:
        return bins
    squares = torch.cat([part for x in tensors for part in _block_squares(x)])
    mantissa, exponent = torch.frexp(squares)
    index = torch.where(squares.isnan(), NOT_A_NUMBER, torch.where(squares.isinf(), INFINITE, exponent + 148))
    weight = torch.where(squares < float("inf"), mantissa.double() * 2**24, 1.0)
    return torch.zeros(EXPONENTS + 2, dtype=torch.float64, device=squares.device).index_add(0, index, weight)


def _block_squares(x: Tensor) -> Iterator[Tensor]:
    """The sums of squares of the blocks of each row, float32, flat.

    A tensor of one dimension can be cut anywhere, so there each element is a block of its own.
    """
    x = x.float()
    if x.ndim < 2:
        yield x.reshape(-1).square()
        return
    # Contiguous, since a sum over strided memory is taken in another order.
    rows = x.reshape(x.shape[0], -1).contiguous() if x.numel() else x.new_zeros(0, 1)
    whole = rows.shape[1] // BLOCK * BLOCK
    if whole:
        blocks = rows[:, :whole].unflatten(1, (-1, BLOCK))
        yield torch.linalg.vector_norm(blocks, dim=-1).square().reshape(-1)
    if whole < rows.shape[1]:
        yield torch.linalg.vector_norm(rows[:, whole:], dim=-1).square()
