"""Each private name of torch and optree that the library uses: whether it is there, and does what it is used for.

With another torch, run this file first: it says what of the library no longer works. `functional_lowbit._private` is
imported in the tests only, so that they say it even if that import fails.
"""

import ast
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_pytree

ROOT = Path(__file__).parents[1]


class Case(NamedTuple):
    """A name of `functional_lowbit._private`."""

    foreign: tuple[str, ...]  # the names of torch and optree behind it
    feature: str  # what of the library needs it
    check: Callable[[Any], bool]  # of the name; whether it does what it is used for


def quantized() -> Any:
    return import_module("functional_lowbit").quantize(torch.ones(4, 4), "companded8")


def is_tree_to_optree(namespace: str) -> bool:
    return len(optree.tree_leaves(quantized())) == 2


def is_tree_to_torch(register: Any) -> bool:
    return len(torch_pytree.tree_leaves(quantized())) == 2


class Pair:
    """A user's own node."""


optree.register_pytree_node(Pair, lambda x: ((), None), lambda aux, kids: Pair(), namespace="test_private")


def finds_namespaces(namespace_of: Any) -> bool:
    return namespace_of(Pair) == "test_private" and namespace_of(Case) is None


def counts_writes(version_of: Any) -> bool:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    return version_of(x) > before == version_of(x.clone())


def copies(foreach_copy_: Any) -> bool:
    places = [torch.zeros(2), torch.zeros(3)]
    foreach_copy_(places, [torch.ones(2), torch.ones(3)])
    return all(bool((x == 1).all()) for x in places)


def reads_repeated_indices(sparse_parts: Any) -> bool:
    x = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    indices, values = sparse_parts(x)
    return indices.tolist() == [[1, 1]] and values.tolist() == [2.0, 3.0]


def is_seen_in_vmap(function: Callable[[Tensor], bool]) -> bool:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(function(x))
        return x

    torch.vmap(look)(torch.ones(2))
    return seen == [True] and not function(torch.ones(2))


def sees_traces_and_tangents(is_watched: Any) -> bool:
    with FakeTensorMode():
        faked = is_watched()
    with forward_ad.dual_level():
        dual = is_watched()
    return faked and dual and not is_watched()


def leaves_modes(disable_current_modes: Any) -> bool:
    with FakeTensorMode(), disable_current_modes():
        return type(torch.ones(2)) is Tensor


def watches_without_a_compiler(mode: Any) -> bool:
    code = """
import sys, torch
from functional_lowbit._private import DispatchMode
seen = []
class Watch(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))
with Watch():
    torch.ones(2) + 1
sys.exit(torch.ops.aten.add.Tensor not in seen or "torch._dynamo" in sys.modules)
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def names_operations(schema_of: Any) -> bool:
    return schema_of(torch.ops.aten.add.Tensor).name == "aten::add" and schema_of(object()) is None


def is_a_cast(to_copy: Any) -> bool:
    graph = make_fx(lambda x: x.double())(torch.ones(2)).graph
    return any(node.target == to_copy for node in graph.nodes)


def finds_backends(compiler_of: Any) -> bool:
    patches = import_module("functional_lowbit._core.step.backends").RECOMPUTE
    known = import_module("torch._inductor.config")
    return (
        callable(compiler_of("eager")) and callable(compiler_of("inductor")) and all(hasattr(known, x) for x in patches)
    )


def lets_a_size_vary(mark_dynamic: Any) -> bool:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=count, fullgraph=True)
    x = torch.ones(4)
    mark_dynamic(x, 0)
    return double(x).shape == (4,) and double(torch.ones(7)).shape == (7,) and len(graphs) == 1


def is_strided(placement: Any) -> bool:
    x = placement(1, split_factor=2)
    return (x.dim, x.split_factor) == (1, 2)


def mesh_of_two(rank: int) -> Any:
    return import_module("functional_lowbit._private").mesh_without_group(torch.arange(2), ("shard",), rank)


def stays_elsewhere(dtensor_anywhere: Any) -> bool:
    x = dtensor_anywhere(torch.empty(2, 3, device="meta"), mesh_of_two(0), [Shard(0)], torch.Size((4, 3)), (3, 1))
    whole = (x.placements, x.shape, x.stride()) == ((Shard(0),), (4, 3), (3, 1))
    return whole and x.to_local().device.type == "meta" and x.device_mesh.device_type == "cpu"


def is_mesh_of_a_rank(mesh_without_group: Any) -> bool:
    mesh = mesh_of_two(1)
    return (mesh.shape, list(mesh.get_coordinate()), mesh.mesh_dim_names) == ((2,), [1], ("shard",))


def finds_the_shard(inner_of: Any) -> bool:
    local = torch.ones(2, 3)
    x = DTensor.from_local(local, mesh_of_two(0), [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    return inner_of(x) is not None and inner_of(x).data_ptr() == local.data_ptr() and inner_of(local) is None


def are_there(pickled: Any) -> bool:
    return all(hasattr(import_module(module), name) for module, name in pickled)


def finds_parameters(parameters_of: Any) -> bool:
    return list(parameters_of(nn.Linear(2, 3))) == ["weight", "bias"]


CASES = {
    "GLOBAL_NAMESPACE": Case(
        ("optree.registry.__GLOBAL_NAMESPACE",),
        "a user's own call of optree takes a quantized tensor for a leaf",
        is_tree_to_optree,
    ),
    "register_torch_node": Case(
        ("torch.utils._pytree.register_pytree_node",),
        "torch.func takes a quantized tensor for a leaf",
        is_tree_to_torch,
    ),
    "optree_namespace_of": Case(
        ("optree.registry._NODETYPE_REGISTRY",),
        "a node that a user registered in a namespace of optree is taken for a leaf",
        finds_namespaces,
    ),
    "version_of": Case(
        ("torch.Tensor._version",), "a leaf function that writes into its arguments is not refused", counts_writes
    ),
    "foreach_copy_": Case(
        ("torch._foreach_copy_",), "a step by torch.compile cannot write small leaves back together", copies
    ),
    "sparse_parts": Case(
        ("torch.Tensor._indices", "torch.Tensor._values"),
        "the command line cannot read the states of sparse gradients",
        reads_repeated_indices,
    ),
    "in_function_transform": Case(
        ("torch._C._functorch.maybe_current_level",),
        "updates that use fl.reduce cannot run inside torch.func",
        lambda f: is_seen_in_vmap(lambda x: f()),
    ),
    "is_wrapped": Case(
        ("torch._C._functorch.is_functorch_wrapped_tensor",),
        "the global norm in C++ reads tensors of torch.func, which have no memory",
        is_seen_in_vmap,
    ),
    "is_watched": Case(
        ("torch._C._len_torch_dispatch_stack", "torch.autograd.forward_ad._current_level"),
        "the global norm in C++ goes unseen by traces and forward AD",
        sees_traces_and_tangents,
    ),
    "disable_current_modes": Case(
        ("torch.utils._python_dispatch._disable_current_modes",),
        "a leaf function cannot be tried under FakeTensorMode",
        leaves_modes,
    ),
    "DispatchMode": Case(
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
        ),
        "a leaf function that mixes elements is not refused, or the first step waits for the import of torch._dynamo",
        watches_without_a_compiler,
    ),
    "schema_of": Case(
        ("torch.ops.aten.add.Tensor._schema",), "every leaf function is refused as one that mixes", names_operations
    ),
    "TO_COPY": Case(
        ("torch.ops.aten._to_copy",), "the native backend does not know a cast, so that it is not used", is_a_cast
    ),
    "compiler_of": Case(
        ("torch._dynamo.lookup_backend",), "no backend of torch.compile can be used, or not as fast", finds_backends
    ),
    "mark_dynamic": Case(
        ("torch._dynamo.mark_dynamic",), "torch.compile makes a graph for each shape of a leaf", lets_a_size_vary
    ),
    "StridedShard": Case(
        ("torch.distributed.tensor.placement_types._StridedShard",),
        "fully_shard over tensor parallelism does not work",
        is_strided,
    ),
    "dtensor_anywhere": Case(
        (
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
        ),
        "sharded states cannot rest on the CPU (offload, CPUOffloadPolicy)",
        stays_elsewhere,
    ),
    "mesh_without_group": Case(
        ("torch.distributed.device_mesh.DeviceMesh",),
        "memory_plan cannot plan a mesh without a process group",
        is_mesh_of_a_rank,
    ),
    "inner_of": Case(
        ("torch.distributed.tensor.DTensor",), "inspect takes torchao's sharded states for torch's", finds_the_shard
    ),
    "PICKLED_IN_METADATA": Case(
        ("torch.serialization._get_layout",), "inspect refuses the checkpoints that this torch writes", are_there
    ),
    "parameters_of": Case(
        ("torch.nn.Module",), "Optimizer.step does not see that a model has got new parameters", finds_parameters
    ),
}


def _missing(path: str) -> bool:
    """Whether nothing is found under a path of modules and attributes."""
    words = path.split(".")
    found: Any = import_module(words[0])
    for i, word in enumerate(words[1:], 2):
        if not hasattr(found, word):
            try:
                import_module(".".join(words[:i]))
            except ImportError:
                return True
        found = getattr(found, word, None)
    return found is None


@pytest.mark.parametrize("name", CASES)
def test_what_torch_and_optree_have_under_private_names(name):
    for path in CASES[name].foreign:
        assert not _missing(path), f"{path} is gone from torch {torch.__version__}: {CASES[name].feature}"


@pytest.mark.parametrize("name", CASES)
def test_a_private_name_does_what_it_is_used_for(name):
    works = CASES[name].check(getattr(import_module("functional_lowbit._private"), name))
    assert works, f"_private.{name} does not work with torch {torch.__version__}: {CASES[name].feature}"


def test_every_private_name_is_tried():
    names = []
    for node in ast.parse((ROOT / "functional_lowbit" / "_private.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert sorted(names) == sorted(CASES)


def test_a_missing_name_is_noticed():
    assert _missing("torch._no_such_name")
    assert _missing("torch.no_such_module._name")
    assert not _missing("torch._foreach_copy_")
