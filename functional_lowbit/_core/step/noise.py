"""Where the noise of stochastic rounding starts, for each leaf and block of a compiled step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree, rounding
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats._grid import Grid, grid_of
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.sharding._index import global_index

HALF = (torch.bfloat16, torch.float16)
BLOCK = 1024  # elements of a block in a leaf whose moments have none


class Start(NamedTuple):
    """The blocks in which a leaf is worked on, and the index of each block's first element in the whole leaf."""

    grid: Grid
    counter: Tensor  # int32[n_blocks, 1]


class Noise:
    """The noise of a step: `words(i)` for leaf i, after `begin`."""

    @speaking("compile")
    def __init__(self, key: int | Tensor):
        self._key = rounding.check_key(key)
        self._starts: dict[tuple[Any, ...], Start | None] = {}

    @speaking("compile")
    def begin(self, state: Any, paths: Sequence[str]) -> None:
        """Make this step's keys: the key given, with the state's step and each leaf's path folded in."""
        step = _first_step(state)
        if step is None:
            raise WrongValue(
                "rounding='stochastic' needs a state that counts steps, so that each has noise of its own; put a "
                "transformation with a step into the chain, for instance scale_by_schedule"
            )
        self.keys = rounding.leaf_keys(rounding.fold_in(self._key, step.to("cpu")), paths)
        low, high, _ = rounding.words(self.keys, torch.zeros((), dtype=torch.int64, device="cpu"))
        self._low, self._high = low.unbind(), high.unbind()

    def start(self, shape: Sequence[int], spec: ShardSpec | None, grid: Grid | None) -> Start | None:
        """Where the blocks of this rank's part begin; None if some block's elements do not follow each other.

        Args:
            shape: Of the whole leaf.
            spec: Of the leaf.
            grid: That of its moments, or None if they have no blocks.
        """
        place = (tuple(shape), spec, grid)
        if place not in self._starts:
            self._starts[place] = _start(shape, spec, grid)
        return self._starts[place]

    def words(self, i: int, start: Start, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`rounding.Words`: int32[] and int32[] for the leaf, int32[n_blocks, 1]."""
        return self._low[i].to(device), self._high[i].to(device), start.counter.to(device)

    def round_(self, p: Tensor, u: Tensor, i: int, shape: Sequence[int], spec: ShardSpec | None) -> None:
        """Write p + u, rounded stochastically, into `p`: float32 `u` and `p` are this rank's part of leaf i."""
        index = global_index(shape, spec).elements().to(p.device)
        noise = rounding.bits(*rounding.words(self.keys[i].to(p.device), index)).view(p.shape)
        p.copy_(rounding.stochastic_round(p.float() + u, p.dtype, noise))


def _start(shape: Sequence[int], spec: ShardSpec | None, grid: Grid | None) -> Start | None:
    index = global_index(shape, spec)
    if grid is None:
        local = tuple(shape) if spec is None else spec.local_shape()
        numel = len(index.starts) * index.length
        grid = grid_of((numel,) if len(index.starts) == 1 else local, BLOCK)
    blocks = index.blocks(grid)
    # A size of 1 would be taken for a constant by torch.compile, and the counter has 31 bits.
    if blocks is None or grid.block < 2 or (len(blocks) and int(blocks.max()) + grid.block >= 2**31):
        return None
    return Start(grid, blocks.to(torch.int32))


def _first_step(state: Any) -> Tensor | None:
    """The first field called `step` of a state, int64[]."""
    named = (at.node for at in _optree.stored_leaves(state) if at.name == "step")
    return next((x for x in named if isinstance(x, Tensor) and x.dtype == torch.int64 and x.ndim == 0), None)
