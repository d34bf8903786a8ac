"""ShardSpec: torch's rule for local shapes, and what is refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from world import World

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec

two, four = (pytest.mark.parametrize("world", [n], indirect=True, ids=[f"W={n}"]) for n in (2, 4))

SHAPES = [(), (1,), (2,), (5,), (4096,), (1, 1), (3, 2048), (10, 2), (33, 512), (0, 4), (7, 5), (9, 1, 6), (4, 3, 3, 3)]


def placements_of(ndim: int, mesh_dims: int) -> list[tuple[Any, ...]]:
    return list(product([Replicate(), *(Shard(d) for d in range(ndim))], repeat=mesh_dims))


def shapes_by_torch(mesh_shape: tuple[int, ...]) -> Any:
    mesh = w.mesh(*mesh_shape)
    differ, count = [], 0
    for shape in SHAPES:
        for placements in placements_of(len(shape), mesh.ndim):
            spec = ShardSpec(mesh, placements, shape, torch.empty(shape).stride())
            expected = tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])
            count += 1
            for got in {spec.local_shape(), spec.local_shape(mesh.get_coordinate())} - {expected}:
                differ.append((shape, placements, got, expected))  # noqa: PERF401  a loop reads better
    return count, differ


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2)), (4, (1, 4)), (4, (4, 1)), (3, (1, 3))],
    indirect=["world"],
    ids=str,
)
def test_local_shape_is_torchs(world: World, mesh: tuple[int, ...]) -> None:
    for count, differ in world.run(shapes_by_torch, mesh):
        assert count >= len(SHAPES)
        assert differ == []


def round_trip(mesh_shape: tuple[int, ...]) -> Any:
    mesh = w.mesh(*mesh_shape)
    wrong = []
    for shape, dtype in product(SHAPES, (torch.float32, torch.bfloat16, torch.uint8)):
        full = (w.random(shape, 3) * 50).to(dtype)
        for placements in placements_of(len(shape), mesh.ndim):
            there = w.shard(full, mesh, *placements)
            tree = {"d": [nn.Parameter(there) if dtype.is_floating_point else there], "p": full, "none": None}
            locals_, specs = fl.sharding.to_local(tree)
            back = fl.sharding.from_local(locals_, specs)
            local, spec, again = locals_["d"][0], specs["d"][0], back["d"][0]
            fine = (
                type(local) is torch.Tensor
                and not local.requires_grad
                and local.data_ptr() == there.to_local().data_ptr()
                and specs["p"] is None
                and back["none"] is None
                and back["p"].data_ptr() == full.data_ptr()
                and spec == ShardSpec.of(there)
                and (again.shape, again.stride(), again.placements) == (there.shape, there.stride(), there.placements)
                and torch.equal(again.full_tensor(), full)
            )
            if not fine:
                wrong.append((shape, dtype, placements))
    return wrong


@pytest.mark.parametrize(
    ("world", "mesh"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2))], indirect=["world"], ids=str
)
def test_to_local_and_back(world: World, mesh: tuple[int, ...]) -> None:
    for wrong in world.run(round_trip, mesh):
        assert wrong == []


def error(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def several_pieces() -> DTensor:
    """A strided shard without the shard that goes with it: rows 0, 1, 4, 5 on one rank, and the others on the other."""
    return DTensor.from_local(
        torch.ones(4, 4), w.mesh(), [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 4), stride=(4, 1)
    )


def refusals() -> Any:
    spec = ShardSpec.of(w.shard(torch.zeros(33, 4)))
    assert spec is not None
    partial = DTensor.from_local(torch.ones(4, 4), w.mesh(), [Partial()], run_check=False)
    plain, cut = {"w": torch.ones(8, 4)}, {"w": w.shard(torch.ones(8, 4))}
    other = {"w": w.shard(torch.ones(8, 4), w.mesh(1, 2), Replicate(), Shard(0))}
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adam(0.1))
    state = tx.init(cut)
    return {
        "local": tuple(spec.local_shape()),
        "wrong local": error(spec.wrap, torch.zeros(8, 4)),
        "from_local": error(fl.sharding.from_local, [torch.zeros(9, 4).T], [spec]),
        "partial": error(ShardSpec.of, partial),
        "partial tree": error(fl.sharding.to_local, {"w": partial}),
        "partial norm": error(fl.global_norm, [partial]),
        "partial parameter": error(tx.init, {"a": [partial]}),
        "several pieces": error(tx.init, {"w": several_pieces()}),
        "plain gradient": error(tx.update, plain, state, cut),
        "plain gradient, compiled": error(fl.compile(tx, backend="eager"), plain, state, cut),
        "plain gradient, applied": error(fl.apply_updates, cut, plain),
        "plain parameter": error(fl.compile(tx, backend="eager"), cut, tx.init(plain), plain),
        "other mesh": error(fl.compile(tx, backend="eager"), other, state, cut),
        "untouched": torch.equal(cut["w"].full_tensor(), torch.ones(8, 4)),
    }


@two
def test_what_does_not_fit_is_refused(world: World) -> None:
    for rank, result in enumerate(world.run(refusals)):
        rows = (17, 16)[rank]
        assert result == {
            "local": (rows, 4),
            "wrong local": f"ValueError: ShardSpec.wrap: the local shard must have shape ({rows}, 4), which is this "
            "rank's part of the global shape (33, 4) under (Shard(dim=0),); got (8, 4)",
            "from_local": f"ValueError: ShardSpec.wrap: the local shard must have shape ({rows}, 4), which is this "
            "rank's part of the global shape (33, 4) under (Shard(dim=0),); got (4, 9)",
            "partial": "ValueError: ShardSpec.of: placements must be Shard or Replicate, got Partial(sum) in "
            "(Partial(sum),); redistribute the tensor first",
            "partial tree": result["partial"],
            "partial norm": result["partial"].replace("ShardSpec.of", "global_norm"),
            "partial parameter": result["partial"].replace("ShardSpec.of", "clip_by_global_norm.init: params['a.0']"),
            "several pieces": "ValueError: clip_by_global_norm.init: params['w']: each rank must hold one piece of the "
            "tensor, but (_StridedShard(dim=0, sf=2),) of shape (8, 4) on a mesh of (2,) gives some rank several; "
            "redistribute the tensor first",
            "plain gradient": "TypeError: clip_by_global_norm.update: updates['w'] is a plain tensor, but its "
            "parameter is a DTensor",
            "plain gradient, compiled": "TypeError: compile(tx): updates['w'] is a plain tensor, but its parameter is "
            "a DTensor",
            "plain gradient, applied": "TypeError: apply_updates: updates['w'] is a plain tensor, but its parameter is "
            "a DTensor",
            "plain parameter": "TypeError: compile(tx): updates['w'] is a DTensor, but its parameter is a plain tensor",
            "other mesh": "ValueError: compile(tx): updates['w'] lies on "
            "DeviceMesh((replicate=1, shard=2), 'cpu', stride=((), 1)), but its parameter on "
            "DeviceMesh((shard=2), 'cpu', stride=(1,))",
            "untouched": True,
        }


def strided_by_torch() -> Any:
    """Shapes and offsets of the strided shards of a parameter that is split by "shard" first, then by "replicate"."""
    mesh = w.mesh(2, 2)
    differ, refused = [], []
    for rows in range(20):
        full = torch.arange(rows * 3.0).view(rows, 3)
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        spec = ShardSpec(mesh, placements, (rows, 3), (3, 1))
        outer = full.chunk(2)  # as tensor parallelism does it, and fully_shard then with each
        row, column = mesh.get_coordinate() or (0, 0)
        inner = outer[column].chunk(2) if column < len(outer) else ()
        mine = inner[row] if row < len(inner) else full[:0]
        expected = compute_local_shape_and_global_offset((rows, 3), mesh, placements)[0]
        if tuple(mine.shape) != tuple(expected):
            refused.append(rows)  # torch's own DTensor disagrees with the shard that fully_shard makes
        first = spec.local_offset()[0]
        if spec.local_shape() != expected or not torch.equal(full[first : first + len(mine)], mine):
            differ.append(rows)
    return differ, refused


@four
def test_strided_shards_are_where_torch_puts_them(world: World) -> None:
    for differ, refused in world.run(strided_by_torch):
        assert differ == []
        assert refused == []


def tensor_parallel(sharded: bool) -> Any:
    """FSDP over tensor parallelism, by torch's own functions: column-wise gives strided shards, row-wise cuts rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 67))
    if sharded:
        mesh = w.mesh(2, 2)
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicate"])
    params = dict(model.named_parameters())
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2))
    state = tx.init(params)
    step = fl.compile(tx, backend="eager")
    norms = []
    for k in range(3):
        grads = {n: w.random(tuple(p.shape), 10 * k + i) for i, (n, p) in enumerate(params.items())}
        if sharded:
            grads = {n: w.shard(g, params[n].device_mesh, *params[n].placements) for n, g in grads.items()}
        norms.append(fl.global_norm(grads).item())
        params, state = step(grads, state, params)
    return {
        "placements": {n: str(getattr(p, "placements", None)) for n, p in params.items()},
        "norms": norms,
        "params": {n: w.whole(p).detach() for n, p in params.items()},
        "bits": w.fingerprint(params),
        "state": w.of_state(state),
        "cut": [row.path for row in fl.describe(state).rows if "cuts its rows" in row.why],
    }


@four
def test_fsdp_over_tensor_parallelism(world: World, alone: Callable[..., Any]) -> None:
    plain = alone(tensor_parallel, False)
    for result in world.run(tensor_parallel, True):
        assert result["placements"]["0.weight"] == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
        assert result["placements"]["2.weight"] == "(Shard(dim=0), Shard(dim=1))"
        assert result["cut"] == ["1.0.mu.2.weight", "1.0.nu.2.weight"]  # one block of 130 in a row, cut into 65 and 65
        # Its sums of squares are of 65 numbers and not of 130, which moves a float32 by an ulp or so.
        assert result["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        for name, p in result["params"].items():
            if name != "2.weight":  # what is left of the difference of the norms: 1e-6 of a step of 1e-2
                assert (p - plain["params"][name]).abs().max() <= 1e-2 * 1e-3
        assert result["state"]["1.0.mu.0.weight.codes"][1:3] == ((130, 64), (64, 1))


def other_gradients(way: str, clipped: bool) -> Any:
    """One gradient, resting sharded, repeated, as parts of a sum, and cut along the other dimension."""
    full, mesh = w.random((33, 512), 1), w.mesh()
    # Halves of powers of two add up exactly, so the sum over ranks is `full` bit for bit at two ranks.
    half = DTensor.from_local(full / 2, mesh, [Partial()], run_check=False)
    rests = {
        "sharded": w.shard(full),
        "repeated": w.shard(full, mesh, Replicate()),
        "sum": half,
        "columns": w.shard(full, mesh, Shard(1)),
    }
    seen = {}
    for name, grad in rests.items():
        tx: Any = fl.adamw8bit(1e-2)
        if clipped:
            tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), tx))
        params = {"w": w.shard(w.random((33, 512), 0))}
        params, state = w.take(tx, way)({"w": grad}, tx.init(params), params)
        seen[name] = (w.fingerprint(params), w.of_state(state))
        assert tuple(grad.placements) == tuple(rests[name].placements)
    return seen


@two
@pytest.mark.parametrize("way", ["eager", "pure"])
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_with_other_placements_are_moved_to_their_parameters(world: World, way: str, clipped: bool) -> None:
    for seen in world.run(other_gradients, way, clipped):
        assert seen["repeated"] == seen["sharded"]
        assert seen["sum"] == seen["sharded"]
        assert seen["columns"] == seen["sharded"]


def foreign_state() -> Any:
    """A state made before the parameters were sharded, or for parameters sharded otherwise."""
    full = w.random((64, 128), 0)
    tx = fl.chain(fl.scale(1.0), fl.adamw8bit(1e-2))
    small = {"w": w.shard(w.random((8, 2), 0))}
    params = {"w": w.shard(full)}
    grads = {"w": w.shard(w.random((64, 128), 1))}
    step = fl.compile(tx, backend="eager")
    states = {
        "plain": tx.init({"w": full}),
        "columns": tx.init({"w": w.shard(full, w.mesh(), Shard(1))}),
        "repeated": tx.init({"w": w.shard(full, w.mesh(), Replicate())}),
    }
    errors = {name: error(step, grads, state, params) for name, state in states.items()}
    plain32 = tx.init({"w": w.random((8, 2), 0)})
    errors["plain, float32"] = error(step, {"w": w.shard(w.random((8, 2), 1))}, plain32, small)
    errors["pure"] = error(tx.update, grads, states["plain"], params)
    errors["other way"] = error(step, {"w": full.clone()}, tx.init(params), {"w": full})
    return errors, torch.equal(params["w"].full_tensor(), full)


@two
def test_a_state_sharded_unlike_its_parameters_is_refused(world: World) -> None:
    for errors, untouched in world.run(foreign_state):
        assert untouched
        rest = "; make the state with init(params) after the parameters are sharded"
        cut, none = "(Shard(dim=0),)", "none (a plain tensor)"
        start = "ValueError: compile(tx): state.mu['w'] has sharding"
        assert errors == {
            "plain": f"{start} {none}, but its parameter has {cut}{rest}",
            "columns": f"{start} (Shard(dim=1),), but its parameter has {cut}{rest}",
            "repeated": f"{start} (Replicate(),), but its parameter has {cut}{rest}",
            "plain, float32": f"{start} {none}, but its parameter has {cut}{rest}",
            "pure": f"ValueError: scale_by_adam.update: state.mu['w'] has sharding {none}, but its parameter has "
            f"{cut}{rest}",
            "other way": f"{start} {cut}, but its parameter has {none}{rest}",
        }


def other_ranks_order() -> Any:
    """Meshes of the same ranks and placements, but in another order, or of another shape: states are not exchanged."""
    full = w.random((256, 64), 0)
    meshes = {"4 x 1": w.mesh(4, 1), "2 x 2": w.mesh(2, 2), "turned": DeviceMesh("cpu", [[3, 2], [1, 0]])}
    on = {n: {"w": w.shard(full, mesh, Shard(0), Replicate())} for n, mesh in meshes.items()}
    half = {n: {"w": w.shard(full.bfloat16(), mesh, Shard(0), Replicate())} for n, mesh in meshes.items()}
    adam, adam8, masters = fl.adam(0.1), fl.adamw8bit(0.1), fl.master_weights(fl.sgd(0.1))
    factored = fl.scale_by_factored_rms(min_dim_size_to_factor=2)
    seen = {}
    for n in ("4 x 1", "turned"):
        seen[n] = [
            error(fl.compile(adam, backend="native"), on["2 x 2"], adam.init(on[n]), on["2 x 2"]),
            error(fl.compile(adam8, backend="native"), on["2 x 2"], adam8.init(on[n]), on["2 x 2"]),
            error(adam.update, on["2 x 2"], adam.init(on[n]), on["2 x 2"]),
            error(masters.update, half["2 x 2"], masters.init(half[n]), half["2 x 2"]),
            error(factored.update, on["2 x 2"], factored.init(on[n]), on["2 x 2"]),
        ]
    plain = masters.init({"w": full.bfloat16()})
    return seen, error(fl.compile(masters, backend="native"), half["2 x 2"], plain, half["2 x 2"])


@four
def test_a_state_on_another_mesh_is_refused(world: World) -> None:
    for seen, plain in world.run(other_ranks_order):
        for errors in seen.values():
            for message, field in zip(errors, ("mu", "mu", "mu", "error", "v_row"), strict=True):
                assert f"state.{field}['w']" in message
                assert "make the state with init(params) after the parameters are sharded" in message
        assert plain == (
            "ValueError: compile(tx): state.error['w'] has sharding none (a plain tensor), but its parameter has "
            "(Shard(dim=0), Replicate()); make the state with init(params) after the parameters are sharded"
        )


def unlike_chunks() -> Any:
    """A gradient and a parameter whose shards are not those of torch.chunk: 3 and 4 rows instead of 4 and 3."""
    full = w.random((7, 64), 0)
    local = full[:3] if w.rank() == 0 else full[3:]
    odd = {"w": DTensor.from_local(local, w.mesh(), [Shard(0)], run_check=False, shape=(7, 64), stride=(64, 1))}
    even = {"w": w.shard(full)}
    tx = fl.adam(0.1)
    return {
        "gradient": error(fl.compile(tx, backend="native"), odd, tx.init(even), even),
        "pure": error(tx.update, odd, tx.init(even), even),
        "parameter": error(tx.init, odd),
    }


@two
def test_shards_that_are_no_chunks_are_refused(world: World) -> None:
    for rank, errors in enumerate(world.run(unlike_chunks)):
        got, want = ((3, 64), (4, 64)) if rank == 0 else ((4, 64), (3, 64))
        rest = f"has a shard of shape {got} on this rank, but (Shard(dim=0),) of (7, 64) give it {want}"
        assert errors == {
            "gradient": f"ValueError: compile(tx): updates['w'] {rest}",
            "pure": f"ValueError: scale_by_adam.update: updates['w'] {rest}",
            "parameter": f"ValueError: scale_by_adam.init: params['w'] {rest}",
        }


def without_params(x: Tensor) -> Any:
    """A gradient that rests otherwise than the state, in an update without params; and a pair that moves its state."""
    mesh = w.mesh(2, 2)
    tx = fl.trace(0.9)
    state = tx.init(w.shard(x, mesh, Shard(0), Shard(1)))
    _, state = tx.update(w.shard(x, mesh, Shard(1), Shard(0)), state)

    def moves(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, (updates * 2).redistribute(mesh, [Shard(0), Replicate()])

    pair = fl.GradientTransformation(lambda p: (p * 0).redistribute(mesh, [Replicate(), Shard(0)]), moves)
    p = w.shard(x, mesh, Shard(0), Shard(1))
    g = w.shard(x, mesh, Shard(0), Shard(1))
    _, moved = fl.compile(pair, backend="eager")(g, pair.init(p), p)
    return state.trace.placements, torch.equal(state.trace.full_tensor(), x), torch.equal(moved.full_tensor(), 2 * x)


@four
def test_states_and_gradients_that_rest_otherwise_keep_their_numbers(world: World) -> None:
    x = w.random((4, 4), 0)
    for result in world.run(without_params, x):
        assert result == ((Shard(0), Shard(1)), True, True)


def outside() -> Any:
    """A leaf on a mesh of rank 0 alone."""
    mesh = DeviceMesh("cpu", [0])
    x = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False)
    spec = ShardSpec(mesh, (Shard(0),), (4, 4), (4, 1))
    return {
        "init": error(fl.adam(0.1).init, {"w": x}),
        "norm": error(fl.global_norm, {"w": x}),
        "local shape": error(spec.local_shape),
        "rank 0's": spec.local_shape((0,)),
        "mesh": str(mesh),
    }


@two
def test_a_leaf_on_a_mesh_of_other_ranks_is_refused(world: World) -> None:
    inside, other = world.run(outside)
    assert (inside["init"], inside["norm"], inside["local shape"]) == ("no error",) * 3
    rest = f"this rank is not in the tensor's mesh, {other.pop('mesh')}; leave the tensor out of the tree here"
    assert other == {
        "init": f"ValueError: scale_by_adam.init: params['w']: {rest}",
        "norm": f"ValueError: global_norm: {rest}",
        "local shape": "ValueError: ShardSpec.local_shape: this rank is not in the mesh; pass a coordinate",
        "rank 0's": (4, 4),
    }
