"""The grid: every element in one block of its own row, blocks short enough and nearly even, for every split alike."""

from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st

from functional_lowbit.formats._grid import Grid, grid_of, lead_of

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 2000)),
    st.lists(st.integers(0, 40), min_size=2, max_size=5).map(tuple).filter(lambda s: torch.Size(s).numel() < 50_000),
    st.tuples(st.integers(1, 5), st.integers(1, 5000)),
)
BLOCK_SIZES = st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 256, 2048]))
PROPERTY = settings(max_examples=300)


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
@given(st.lists(st.integers(1, 40), min_size=3, max_size=5), BLOCK_SIZES)
def test_rows_of_the_last_dimensions_are_even_and_long(shape, block_size):
    """Dimensions behind the first count rows too if that costs no more scales: 8/5 of the fewest at most."""
    grid, lead = grid_of(shape, block_size), lead_of(shape, block_size)
    assert (grid.rows, grid.row_length) == (prod(shape[:lead]), prod(shape[lead:]))
    assert 1 <= lead < len(shape)
    if lead > 1:
        assert grid.padding == 0
        assert 8 * grid.block >= 5 * block_size
    for longer in range(lead + 1, len(shape)):  # as many as can be
        row = grid_of([prod(shape[longer:])], block_size)
        assert row.padding or 8 * row.block < 5 * block_size


@PROPERTY
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 600), BLOCK_SIZES, st.data())
def test_a_part_of_the_rows_or_of_a_rows_blocks_has_a_part_of_the_grid(rows, mid, length, block_size, data):
    shape = (rows, mid, length)
    whole, lead = grid_of(shape, block_size), lead_of(shape, block_size)
    x = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    dim = data.draw(st.integers(0, lead))
    if dim < lead:
        edges = list(range(shape[dim] + 1))
    else:
        inner = prod(shape[dim + 1 :])
        edges = [i for i in range(shape[dim] + 1) if i * inner % whole.block == 0 or i == shape[dim]]
    first, last = sorted((data.draw(st.sampled_from(edges)), data.draw(st.sampled_from(edges))))
    local = x.narrow(dim, first, last - first)
    part = whole.part(prod(local.shape[:lead]), prod(local.shape[lead:]))
    blocks = {tuple(block) for block in whole.to_blocks(x).tolist()}
    assert all(tuple(block) in blocks for block in part.to_blocks(local).tolist()) or whole.padding
    assert torch.equal(part.from_blocks(part.to_blocks(local), local.shape), local)


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
        ((8, 64, 512), Grid(512, 512, 256, 2)),  # experts: their second dimension counts rows too
        ((8, 64, 100), Grid(8, 6400, 256, 25)),  # rows of 100 would cost 8/5 of the scales, and more
        ((2, 3, 4, 160), Grid(24, 160, 160, 1)),
        ((2, 2**31), Grid(2, 2**31, 256, 2**23)),  # more elements than an int32 counts
    ],
)
def test_golden_grids(shape, wanted):
    assert grid_of(shape, 256) == wanted


def test_an_even_grid_of_a_contiguous_tensor_is_a_view():
    x = torch.zeros(4, 512)
    grid_of((4, 512), 256).to_blocks(x)[3, 0] = 1.0
    assert x[1, 256] == 1.0
