"""The grid: every element in one block of its own row, blocks short enough and nearly even, for every split alike."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from functional_lowbit._grid import Grid, grid_of

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 2000)),
    st.lists(st.integers(0, 40), min_size=2, max_size=5).map(tuple).filter(lambda s: torch.Size(s).numel() < 50_000),
    st.tuples(st.integers(1, 5), st.integers(1, 5000)),
)
BLOCK_SIZES = st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 256, 2048]))
PROPERTY = settings(max_examples=300, deadline=None)


@PROPERTY
@given(SHAPES, BLOCK_SIZES)
def test_every_element_is_in_one_block_and_comes_back(shape, block_size):
    grid = grid_of(shape, block_size)
    x = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int32).reshape(shape)
    blocks = grid.to_blocks(x)
    assert blocks.shape == (grid.n_blocks, grid.block)
    assert torch.equal(blocks[blocks > 0].sort().values, x.flatten())  # once each; all else is padding
    assert torch.equal(grid.from_blocks(blocks, shape), x)


@PROPERTY
@given(SHAPES, BLOCK_SIZES)
def test_blocks_are_short_enough_and_nearly_even(shape, block_size):
    grid = grid_of(shape, block_size)
    assert 1 <= grid.block <= block_size
    if grid.n_blocks:
        assert 0 <= grid.padding < grid.blocks_per_row
        fewest = -(-grid.row_length // block_size)
        # at most 8/5 as many as there must be, since a divisor is taken from 5/8 of the block size on
        assert fewest <= grid.blocks_per_row <= max(fewest, -(-8 * grid.row_length // (5 * block_size)))


@PROPERTY
@given(st.integers(1, 30), st.integers(1, 3000), BLOCK_SIZES, st.data())
def test_a_shard_of_whole_rows_has_a_part_of_the_grid(rows, length, block_size, data):
    whole = grid_of((rows, length), block_size)
    x = torch.arange(rows * length, dtype=torch.int32).reshape(rows, length)
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    part = grid_of((last - first, length), block_size)
    blocks = whole.to_blocks(x)[first * whole.blocks_per_row : last * whole.blocks_per_row]
    assert torch.equal(part.to_blocks(x[first:last]), blocks) or first == last


@PROPERTY
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), BLOCK_SIZES)
def test_only_the_first_dimension_and_the_rest_count(shape, block_size):
    assert grid_of((3, *shape), block_size) == grid_of((3, torch.Size(shape).numel()), block_size)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((4096,), Grid(1, 4096, 256, 16)),
        ((33, 512), Grid(33, 512, 256, 2)),
        ((10, 384), Grid(10, 384, 192, 2)),  # two equal blocks
        ((10, 640), Grid(10, 640, 160, 4)),  # a divisor of at least 5/8 of 256
        ((10, 257), Grid(10, 257, 129, 2)),  # a prime: as even as it goes
        ((7,), Grid(1, 7, 7, 1)),
        ((), Grid(1, 1, 1, 1)),
        ((0, 5), Grid(0, 5, 1, 0)),
        ((5, 0), Grid(0, 0, 1, 0)),
        ((2, 3, 4, 5), Grid(2, 60, 60, 1)),
        ((2, 2**31), Grid(2, 2**31, 256, 2**23)),  # more elements than an int32 counts
    ],
)
def test_golden_grids(shape, wanted):
    assert grid_of(shape, 256) == wanted


def test_an_even_grid_of_a_contiguous_tensor_is_a_view():
    x = torch.zeros(4, 512)
    grid_of((4, 512), 256).to_blocks(x)[3, 0] = 1.0
    assert x[1, 256] == 1.0
