"""The leaf kernel as machine code for the CPU: one call for all leaves of a group, of any shape, in place."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.cpp import library
from functional_lowbit._core.cpp.loops import Argument
from functional_lowbit._core.cpp.source import source
from functional_lowbit._core.step.kernel import KernelKey, make_compute
from functional_lowbit._core.step.staging import Leaf
from functional_lowbit.formats._grid import Grid
from functional_lowbit.formats._halves import CODE_DTYPES

PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory of their own
FLAT_BLOCK = 1024  # elements worked on together where no moment has blocks


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor's numbers are what lies at its address."""
    return type(x) in PLAIN and x.data_ptr() != 0 and not x.is_neg()


class NativeKernel:
    """A kernel of generated C++. It takes leaves as they lie in memory."""

    graphs = 1

    def __init__(self, key: KernelKey):
        arguments = [Argument(key.grad_dtype, "element"), Argument(key.param_dtype, "element")]
        for codec in (codec for stage in key.stages for codec in stage.codecs):
            if codec is None or codec.parts == 1:
                arguments.append(Argument(torch.float32 if codec is None else codec.dtype, "element"))
            else:
                arguments.append(Argument(codec.dtype, "code", codec.packing == 2))
                arguments.append(Argument(torch.float32, "block"))
        places = [*range(2, len(arguments))]
        if key.stochastic:
            arguments += [Argument(torch.int32, kind) for kind in ("leaf", "leaf", "block")]
        if key.master_bits:
            if key.apply:
                places.append(len(arguments))
            arguments.append(Argument(CODE_DTYPES[key.master_bits], "element"))
        n_inputs = len(arguments)
        if not (key.apply or key.discards):
            arguments.append(Argument(torch.float32, "element"))
        if not key.discards:
            places.append(1 if key.apply else n_inputs)
        self._places = frozenset(places)
        n_scalars = 1 + key.n_gates + sum(len(stage.scalars) for stage in key.stages)
        compute = make_compute(key, in_place=False)
        text = source(compute, n_inputs, n_scalars, arguments, places)
        self._run = library.load(text).run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self._run.restype = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeKernel":
        return self  # it has no state, and its code cannot be copied

    def run(self, leaves: Iterable[Leaf], shaped: Sequence[bool], scalars: Tensor) -> None:
        """Work on leaves in place.

        Args:
            leaves: Their tensors, in the kernel's order: those at its places are written, the others read.
            shaped: For each of a leaf's tensors, whether it has the leaf's shape; else it is [n_blocks, any] or [].
            scalars: float32, contiguous.
        """
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
            for i, x in enumerate(leaf.tensors):
                if not x.is_contiguous() or (i < 2 and not _is_plain(x)):
                    original, x = x, torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
                    if i in self._places:
                        copies.append((original, x))
                    else:
                        alive.append(x)
                if i in self._places:
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
