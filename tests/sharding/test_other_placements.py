"""Parameters, gradients and states whose placements or meshes differ: moved where that is exact, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from world import World, error

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec

two, four = (pytest.mark.parametrize("world", [n], indirect=True, ids=[f"W={n}"]) for n in (2, 4))


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
