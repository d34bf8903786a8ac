"""Private names of torch and optree: the library uses these, through this module alone, and no others.

A new torch or optree may drop or change any of them without a word. `tests/test_private.py` tries each by itself, and
says what no longer works. Those that are imported here stop `import functional_lowbit` when they go; the others raise
AttributeError where they are used, if nothing else is said below.

Imports: nothing
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE, _NODETYPE_REGISTRY
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Trees

GLOBAL_NAMESPACE = __GLOBAL_NAMESPACE
"""Where a node of ours is registered so that a user's own calls of optree see it. optree has no public name for it."""

register_torch_node = torch_pytree.register_pytree_node
"""Makes a state in few bits a tree to torch too: without it `torch.func` takes a quantized tensor for a leaf."""


def optree_namespace_of(cls: type) -> str | None:
    """The namespace in which a user registered a class with optree, which has no public way to ask.

    Where the registry's keys change, such a class is taken for a leaf, and `init` refuses it as no tensor.
    """
    for key in _NODETYPE_REGISTRY:
        if isinstance(key, tuple) and key[1] is cls:
            return key[0]
    return None


# Tensors


def version_of(x: Tensor) -> int:
    """How often a tensor was written to: so a leaf function that writes into its arguments is found and refused."""
    return x._version


foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
"""Writes many small leaves back by one call after a step in place; a loop of `copy_` would be slower and no less right.
"""


def sparse_parts(x: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor as they are stored; the public ones refuse it where indices repeat.

    `inspect` and `convert` on the command line read optimizer states with sparse gradients by it.
    """
    return [x._indices(), x._values()]


# What torch does around an operation


def in_function_transform() -> bool:
    """Whether torch.func (vmap, grad) is at work: then tensors may not be looked at, and nothing can be watched.

    Without it `vmap` over an update that uses `fl.reduce` stops at the first `bool(tensor)`.
    """
    return maybe_current_level() is not None


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is one of torch.func's, without memory to read: the global norm in C++ leaves those to torch."""
    return is_functorch_wrapped_tensor(x)


def is_watched() -> bool:
    """Whether operations are traced, faked, or differentiated forward: then C++ may not compute behind torch's back.

    Without it the global norm has no tangent under forward AD, and no operation in a trace.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd.forward_ad._current_level >= 0


disable_current_modes = _disable_current_modes
"""Turns off modes while a leaf function is tried; under FakeTensorMode the trial would have no numbers."""


class DispatchMode(TorchDispatchMode):
    """Sees each operation as torch runs it: so a leaf function that mixes elements is found and refused."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, for more than a second, to keep it away from us. A torch that asks in another
        # way makes the first step slower, and no less right.
        return False


def schema_of(op: Any) -> Any:
    """The schema of an operation, with namespace and name; None for a higher-order operator.

    Where it goes, every leaf function is refused as one that mixes elements.
    """
    return getattr(op, "_schema", None)


TO_COPY = torch.ops.aten._to_copy.default
"""A cast in a traced graph. Under another name "native" does not know it, and inductor is used, or is asked for."""

# torch.compile, which takes seconds to import: only when it is called


def compiler_of(backend: str) -> Callable[..., Any]:
    """The function behind the name of a backend of torch.compile: so `Step` counts its graphs and sets its options."""
    return torch._dynamo.lookup_backend(backend)


def mark_dynamic(x: Tensor, dim: int) -> None:
    """Let a size vary in compiled code: without it there is a graph for each shape of a leaf."""
    torch._dynamo.mark_dynamic(x, dim)


# DTensor

StridedShard = _StridedShard
"""How `fully_shard` cuts a parameter that tensor parallelism has cut before: 2-D meshes need it."""


def dtensor_anywhere(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor whose shard stays on its device, which is not the mesh's: so rest sharded states that are offloaded.

    `DTensor.from_local` would move the shard.
    """
    meta = TensorMeta(shape, stride, local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def mesh_without_group(ranks: Tensor, names: tuple[str, ...] | None, rank: int) -> DeviceMesh:
    """A mesh as one of its ranks would see it, without a process group: `memory_plan` counts bytes of ranks by it.

    Without these arguments torch asks for a process group of that many ranks, and raises if there is none.
    """
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def inner_of(x: Any) -> Tensor | None:
    """The shard inside a DTensor as it is, a tensor subclass too; None for all others.

    `inspect` tells torchao's sharded states by it; without it they are shown as torch's.
    """
    return getattr(x, "_local_tensor", None)


# Files and modules

PICKLED_IN_METADATA = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
}
"""What torch writes into `.metadata` of a checkpoint under private names. `inspect` opens no others without `--unsafe`:
if torch renames one, it refuses the checkpoints of that torch, and says which name it met."""


def parameters_of(module: nn.Module) -> Any:
    """The parameters that a module itself holds, read without running its code; None if it is not made yet.

    By it `Optimizer.step` says that a model has got new parameters since; without it such a step goes by unseen.
    """
    return vars(module).get("_parameters")
