"""Which machine code runs a leaf kernel: generated C++ on the CPU, torch.compile anywhere, or plain torch."""

import warnings
from collections.abc import Iterable
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_lowbit._core.cpp.library import NoCompiler
from functional_lowbit._core.cpp.ops import Unsupported
from functional_lowbit._core.step import staging
from functional_lowbit._core.step.kernel import example, make_kernel
from functional_lowbit._core.step.native import NativeKernel
from functional_lowbit._core.step.slots import KernelKey, Slot, filled, of_leaf, slots_of
from functional_lowbit._private import compiler_of, mark_dynamic

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

    Raises:
        NotImplementedError: for "native", if it cannot be made.
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
