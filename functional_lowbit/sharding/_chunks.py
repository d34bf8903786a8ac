"""Which indices of a tensor a rank holds, by the rule of `torch.chunk`. Numbers only, no tensors.

How a mesh splits a tensor is a `Split` for each mesh dimension.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TypeAlias

Split: TypeAlias = tuple[int, int] | None
"""(dimension of the tensor, number of parts that it is split into before), or None where a mesh dimension repeats it.

The second number is 1 but for strided shards: there, a mesh dimension further right has split the dimension first.
"""

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""(first index, index behind the last) of pieces of one dimension, in order; one piece at least, if an empty one."""


@lru_cache(maxsize=65536)
def part(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of the shard of one rank, if it is one piece.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Ranks along each mesh dimension.
        splits: What each mesh dimension does.
        coordinate: The rank's index along each mesh dimension.
    """
    runs = _runs(shape, mesh_shape, splits, coordinate)
    return tuple(sum(b - a for a, b in each) for each in runs), tuple(each[0][0] for each in runs)


@lru_cache(maxsize=4096)
def in_one_piece(shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...]) -> bool:
    """Whether every rank's indices of each dimension follow each other. All ranks are looked at, so that all agree."""
    if all(split is None or split[1] == 1 for split in splits):
        return True
    coordinates = product(*map(range, mesh_shape))
    return all(len(runs) == 1 for c in coordinates for runs in _runs(shape, mesh_shape, splits, c))


@lru_cache(maxsize=4096)
def shapes(shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...]) -> set[tuple[int, ...]]:
    """The different shapes of shards. Dimensions are split by different mesh dimensions, so each is looked at alone."""
    lengths = []
    for dim in range(len(shape)):
        ranges = (range(n if s is not None and s[0] == dim else 1) for n, s in zip(mesh_shape, splits, strict=True))
        lengths.append({part(shape, mesh_shape, splits, c)[0][dim] for c in product(*ranges)})
    return set(product(*lengths))


@lru_cache(maxsize=65536)
def _runs(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...], coordinate: tuple[int, ...]
) -> tuple[Runs, ...]:
    """The indices that a rank holds, for each dimension of the tensor. Mesh dimensions apply from left to right."""
    runs: list[Runs] = [((0, length),) for length in shape]
    for split, parts, index in zip(splits, mesh_shape, coordinate, strict=True):
        if split is not None:
            dim, before = split
            pieces = [_chunk(runs[dim], before, j) for j in range(before)]
            runs[dim] = _joined([_chunk(piece, parts, index) for piece in pieces])
    return tuple(runs)


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """One of the parts that `torch.chunk` makes of the pieces put together."""
    size = -(-sum(stop - start for start, stop in runs) // parts)
    skip, left = size * index, size
    found = []
    for start, stop in runs:
        first = min(start + skip, stop)
        last = min(first + left, stop)
        skip, left = skip - (first - start), left - (last - first)
        if last > first:
            found.append((first, last))
    return tuple(found) or ((runs[-1][1], runs[-1][1]),)


def _joined(pieces: Sequence[Runs]) -> Runs:
    """Pieces put together; neighbours become one run."""
    runs = [run for piece in pieces for run in piece]
    found: list[tuple[int, int]] = []
    for start, stop in [run for run in runs if run[0] < run[1]] or runs[:1]:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
