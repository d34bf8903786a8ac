"""How leaves reach the kernel: a large even leaf as a view, small and uneven ones copied together.

The kernel takes contiguous [n_blocks, block] (or flat [n]) tensors with every size at least 2. A large leaf that is
contiguous and has an even grid is such a tensor already. Anything else is copied into a staging buffer, several leaves
in one, worked on there, and copied back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_lowbit._core.step.slots import Slot
from functional_lowbit._private import foreach_copy_
from functional_lowbit.formats._grid import Grid

SMALL = 2**16  # elements; about as many are worked on in the time that one call takes
PART = 2**20  # elements of a large leaf in one call: what a kernel writes to memory in between stays this small
CHUNK = 2**18  # elements of a staging buffer: it stays in the cache, and peak memory stays small


class Filled(NamedTuple):
    """The slots of a kernel, filled for one leaf: this rank's part of it."""

    grid: Grid | None  # None: no moment has scales, and the leaf is worked on as a flat tensor
    tensors: tuple[Tensor, ...]  # one for each slot of the kernel

    @property
    def numel(self) -> int:
        """Elements."""
        return self.tensors[0].numel()


def run(leaves: Iterable[Filled], slots: Sequence[Slot], call: Callable[[list[Tensor]], None]) -> None:
    """Call the kernel for leaves that share it.

    Args:
        leaves: Some may be empty.
        slots: Of their tensors; none is one number for a whole leaf.
        call: Takes the tensors as the kernel wants them, and writes into them.
    """
    pending: dict[int, list[Filled]] = {}
    waiting: dict[int, int] = {}
    for leaf in leaves:
        if leaf.numel == 0:
            continue
        if _is_direct(leaf, slots):
            both = zip(leaf.tensors, slots, strict=True)
            views = [_spread(leaf.grid, x) if slot.shaped else x for x, slot in both]
            for first, last in _spans(views[0].shape[0], PART // (1 if leaf.grid is None else leaf.grid.block)):
                call([x[first:last] for x in views])
            continue
        block = 0 if leaf.grid is None else leaf.grid.block
        for piece in pieces(leaf, slots, CHUNK):
            pending.setdefault(block, []).append(piece)
            waiting[block] = waiting.get(block, 0) + piece.numel
            if waiting[block] >= CHUNK:
                _run_staged(pending.pop(block), slots, call)
                waiting[block] = 0
    for batch in pending.values():
        _run_staged(batch, slots, call)


def _spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, step), [step, 2 step), …; a rest of one is added to the span before it, since sizes are at least 2."""
    step = max(step, 2)
    for first in range(0, max(length - 1, 1), step):
        last = first + step
        yield first, length if last >= length - 1 else last


def _is_direct(leaf: Filled, slots: Sequence[Slot]) -> bool:
    if leaf.numel < SMALL or (leaf.grid is not None and (leaf.grid.padding or leaf.grid.n_blocks < 2)):
        return False
    return all(x.is_contiguous() for x, slot in zip(leaf.tensors, slots, strict=True) if slot.shaped)


def _spread(grid: Grid | None, x: Tensor) -> Tensor:
    """A tensor of the leaf's shape as [n_blocks, block], or flat."""
    if grid is None:
        return x if x.ndim == 1 else x.reshape(-1)
    return grid.to_blocks(x)


def _gathered(grid: Grid | None, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The way back from `_spread`."""
    if grid is None:
        return x if len(shape) == 1 else x.view(shape)
    return grid.from_blocks(x, shape)


def pieces(leaf: Filled, slots: Sequence[Slot], size: int) -> Iterator[Filled]:
    """A leaf to be staged, in pieces of at most `size` elements: rows, or for a single row blocks.

    A block is never cut, nor is a single row that does not lie in one piece of memory; such pieces may be larger.
    """
    grid = leaf.grid
    if leaf.numel <= size:
        yield leaf
        return
    if grid is None or grid.rows == 1:
        both = list(zip(leaf.tensors, slots, strict=True))
        if all(x.is_contiguous() or x.ndim == 1 for x, slot in both if slot.shaped):
            leaf = Filled(grid, tuple(x.view(-1) if slot.shaped else x for x, slot in both))
        elif grid is not None:
            yield leaf
            return
    rows = leaf.tensors[0].shape[0]
    if rows == 1:
        yield leaf
    elif grid is None or grid.rows > 1:
        step = max(1, size * rows // leaf.numel)
        each = 1 if grid is None else grid.rows // rows  # more than 1 where dimension 0 does not count rows alone
        for first in range(0, rows, step):
            last = min(first + step, rows)
            part = grid and grid._replace(rows=(last - first) * each)
            yield from pieces(_part(leaf, slots, (first, last), part, (first * each, last * each)), slots, size)
    else:
        step = max(1, size // grid.block)
        for first in range(0, grid.n_blocks, step):
            last = min(first + step, grid.n_blocks)
            span = (first * grid.block, min(last * grid.block, rows))
            yield _part(leaf, slots, span, Grid(1, span[1] - span[0], grid.block, last - first), (first, last))


def _part(
    leaf: Filled, slots: Sequence[Slot], span: tuple[int, int], grid: Grid | None, rows: tuple[int, int]
) -> Filled:
    """The elements `span` of dimension 0, with the blocks that belong to them."""
    per_row = 1 if leaf.grid is None or leaf.grid.rows == 1 else leaf.grid.blocks_per_row
    blocks = slice(rows[0] * per_row, rows[1] * per_row)
    cuts = {"element": slice(*span), "leaf": ...}
    return Filled(grid, tuple(x[cuts.get(slot.kind, blocks)] for x, slot in zip(leaf.tensors, slots, strict=True)))


def _run_staged(batch: list[Filled], slots: Sequence[Slot], call: Callable[[list[Tensor]], None]) -> None:
    """Copy leaves together, call the kernel, copy the results back."""
    arguments, lengths = [], []
    for i, slot in enumerate(slots):
        parts = [_spread(leaf.grid, leaf.tensors[i]) if slot.shaped else leaf.tensors[i] for leaf in batch]
        lengths.append([part.shape[0] for part in parts])
        together = torch.cat(parts)
        if together.shape[0] < 2:  # a size of 1 would be taken for a constant
            together = F.pad(together, (0, 0) * (together.ndim - 1) + (0, 1), value=1.0)
        arguments.append(together)
    call(arguments)
    for i, slot in enumerate(slots):
        if not slot.written:
            continue
        parts = arguments[i][: sum(lengths[i])].split(lengths[i])
        places = [leaf.tensors[i] for leaf in batch]
        if slot.shaped:
            parts = [_gathered(leaf.grid, x, place.shape) for leaf, x, place in zip(batch, parts, places, strict=True)]
        foreach_copy_(places, list(parts))
