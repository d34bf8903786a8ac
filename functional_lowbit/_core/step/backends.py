"""Which machine code runs a leaf kernel: generated C++ on the CPU, torch.compile anywhere, or plain torch."""

import ctypes
import warnings
from array import array
from collections.abc import Iterable
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_lowbit._core.cpp import library
from functional_lowbit._core.cpp.library import NoCompiler
from functional_lowbit._core.cpp.loops import Argument
from functional_lowbit._core.cpp.ops import Unsupported
from functional_lowbit._core.cpp.source import source
from functional_lowbit._core.step import staging
from functional_lowbit._core.step.kernel import example, make_compute, make_kernel
from functional_lowbit._core.step.slots import KernelKey, Slot, filled, numbers_of, of_leaf, slots_of, written
from functional_lowbit._core.step.staging import Filled
from functional_lowbit._private import compiler_of, mark_dynamic
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


RECOMPUTE = {"realize_reads_threshold": 16, "realize_opcount_threshold": 60, "realize_acc_reads_threshold": 16}
"""Inductor writes a value that is used twice to memory if it was expensive, and the new moments are: they are needed
for the step, for the scales and for the codes. By its own limits (4, 30, 8) that is seven loops over memory; by these
it is two. Without limits companded8 gains nothing, and dynamic8 takes a minute to compile: each use of a value is
traced again."""


class Kernel(Protocol):
    """A leaf kernel that can be run."""

    graphs: int  # compiled for it so far
    slots: tuple[Slot, ...]  # of the tensors of a leaf, in order

    def run(self, leaves: Iterable[staging.Filled], scalars: Tensor) -> None:
        """Work on leaves in place."""
        ...


class TorchKernel:
    """A kernel as a torch function, compiled by a backend of torch.compile or not at all ("eager")."""

    def __init__(self, key: KernelKey, backend: str):
        self.graphs = 0
        self.slots = of_leaf(slots_of(key))
        self._arguments = slots_of(key, lengths=key.blocked)
        own = of_leaf(self._arguments)
        self._staged = [slot._replace(kind="block") if slot.kind == "leaf" else slot for slot in own]
        self._function = function = make_kernel(key)
        if backend == "eager":
            return
        compiler = compiler_of(backend)
        options = {"config_patches": RECOMPUTE} if backend == "inductor" else {}

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return compiler(graph, inputs, **options)

        args, varying = example(key)
        function(*args)  # what is wrong with a leaf function is said without the compiler's words around it
        self._function = torch.compile(function, backend=counted, fullgraph=True)
        # Compiled on arguments that no leaf decides, so that every rank compiles the same code.
        args, varying = example(key)
        for arg, dim in varying:
            mark_dynamic(arg, dim)
        self._function(*args)

    def run(self, leaves: Iterable[staging.Filled], scalars: Tensor) -> None:
        """Work on leaves in place, in views and copies of the shapes that were compiled for."""
        each = (self._by_blocks(leaf) for leaf in leaves)
        staging.run(each, self._staged, lambda x: self._function(*filled(self._arguments, x, scalars=scalars)))

    def _by_blocks(self, leaf: staging.Filled) -> staging.Filled:
        """A leaf whose numbers for the whole leaf are repeated for each block, and whose blocks have lengths."""
        if leaf.grid is None:
            return leaf
        rows, both = (leaf.grid.n_blocks, 1), zip(leaf.tensors, self.slots, strict=True)
        tensors = [x.expand(rows).contiguous() if slot.kind == "leaf" else x for x, slot in both]
        lengths = leaf.grid.lengths(tensors[0].device)
        return staging.Filled(leaf.grid, tuple(filled(self._staged, tensors, lengths=lengths)))


class Kernels(dict[KernelKey, Kernel]):
    """The kernels of one step, each made when it is first asked for."""

    def __init__(self, backend: str | None):
        super().__init__()
        self.backend = backend

    def __missing__(self, key: KernelKey) -> Kernel:
        self[key] = kernel = kernel_for(key, self.backend)
        return kernel


_kernels: dict[tuple[KernelKey, str | None], Kernel] = {}
_making = RLock()  # tracing is for one thread at a time


def kernel_for(key: KernelKey, backend: str | None) -> Kernel:
    """The kernel of a key, made when it is first asked for.

    Args:
        key: What it is made for.
        backend: "native", "eager", or a backend of torch.compile. None: "native" where that is possible, else
            "inductor".
    """
    kernel = _kernels.get((key, backend))
    if kernel is None:
        with _making:
            kernel = _kernels.get((key, backend))
            if kernel is None:
                kernel = _kernels[key, backend] = _make(key, backend)
    return kernel


def _make(key: KernelKey, backend: str | None) -> Kernel:
    if backend not in (None, "native"):
        return TorchKernel(key, backend)
    try:
        if key.device.type != "cpu":
            raise Unsupported(f"the device {key.device}")
        make_kernel(key)(*example(key)[0])  # for clear errors, as above
        return NativeKernel(key)
    except (Unsupported, NoCompiler) as error:
        if backend == "native":
            raise NotImplementedError(f"compile: backend 'native' cannot be used: {error}") from error
        if isinstance(error, NoCompiler):
            warnings.warn(f"functional_lowbit: torch.compile is used instead of C++: {error}", stacklevel=2)
        return kernel_for(key, "inductor")
