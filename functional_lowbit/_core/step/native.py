"""The leaf kernel as machine code for the CPU: one call for all leaves of a group, of any shape, in place."""

import ctypes
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.cpp import library
from functional_lowbit._core.cpp.loops import Argument
from functional_lowbit._core.cpp.source import source
from functional_lowbit._core.step.kernel import make_compute
from functional_lowbit._core.step.slots import KernelKey, Slot, numbers_of, of_leaf, slots_of, written
from functional_lowbit._core.step.staging import Filled
from functional_lowbit.formats._grid import Grid

PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory of their own
FLAT_BLOCK = 1024  # elements worked on together where no moment has blocks


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor's numbers are what lies at its address."""
    return type(x) in PLAIN and x.data_ptr() != 0 and not x.is_neg()


class NativeKernel:
    """A kernel of generated C++. It takes leaves as they lie in memory."""

    graphs = 1

    def __init__(self, key: KernelKey):
        every = slots_of(key)
        self.slots = of_leaf(every)
        text = source(
            make_compute(key, in_place=False),
            [Argument(slot.dtype, slot.kind, slot.packed, slot.read) for slot in every],
            [self.slots.index(slot) for slot in written(every)],
            len(numbers_of(key)),
        )
        self._is_written = [slot.written for slot in self.slots]
        self._is_foreign = [slot.name in (Slot.UPDATE, Slot.PARAM) for slot in self.slots]
        self._run = library.load(text).run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self._run.restype = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeKernel":
        return self  # it has no state, and its code cannot be copied

    def run(self, leaves: Iterable[Filled], scalars: Tensor) -> None:
        """Work on leaves in place. The scalars are contiguous."""
        table = array("q")
        copies: list[tuple[Tensor, Tensor]] = []
        alive: list[Tensor] = []  # copies of what is only read, until the call is over
        written: list[Tensor] = []
        numel, n_leaves = 0, 0
        for leaf in leaves:
            size = leaf.numel
            if size == 0:
                continue
            grid = leaf.grid or Grid(1, size, FLAT_BLOCK, -(-size // FLAT_BLOCK))
            table.extend((grid.n_blocks, grid.row_length, grid.block, grid.blocks_per_row))
            for x, is_written, is_foreign in zip(leaf.tensors, self._is_written, self._is_foreign, strict=True):
                if not x.is_contiguous() or (is_foreign and not _is_plain(x)):
                    original, x = x, torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
                    if is_written:
                        copies.append((original, x))
                    else:
                        alive.append(x)
                if is_written:
                    written.append(x)
                table.append(x.data_ptr())
            numel += size
            n_leaves += 1
        if not n_leaves:
            return
        threads = torch.get_num_threads() if numel >= library.SMALL else 1
        self._run(table.buffer_info()[0], n_leaves, scalars.data_ptr(), threads)
        for original, copy in copies:
            original.copy_(copy)
        torch.autograd.graph.increment_version(written)
