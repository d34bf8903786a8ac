"""Checkpoints on ranks: saved at any world size, in every format, and gone on with at any other, bit for bit.

Leaves whose rows the mesh cuts are in test_cut_checkpoints.py.
"""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world as w
from tiers import slow, slow_unless
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from whole import bits
from world import World

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec

SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (33, 512),
    "three": (3, 2048),  # the fourth rank holds nothing
    "padded": (34, 257),
    "conv": (19, 8, 6, 5),
    "experts": (6, 4, 256),
    "bias": (5,),
    "one": (1,),
}
SAVED_AT, MORE = 2, 1  # steps before and after the checkpoint
RULES = ("guarded", "stochastic", "statistics", *fl.formats.names())
LEAVES = {name: ["odd", "three", "padded"] if name in fl.formats.names() else list(SHAPES) for name in RULES}


@cache
def rule(name: str) -> tuple[Any, Any]:
    """A transformation and its compiled step."""
    if name == "guarded":
        tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1)))
    elif name == "stochastic":  # bfloat16 params, and updates too small for the nearest one
        tx = fl.adamw8bit(1e-4)
        return tx, fl.compile(tx, backend="eager", rounding="stochastic", key=7)
    elif name == "statistics":
        tx = fl.chain(fl.scale_by_factored_rms(min_dim_size_to_factor=8), fl.scale_by_trust_ratio(), fl.scale(-1e-2))
    else:
        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format=name))
    return tx, fl.compile(tx, backend="eager")


Mesh = tuple[int, ...] | str
MIXED = "mixed"  # several meshes and placements in one tree, on four ranks


def mixed(x: Tensor) -> Tensor:
    """What FSDP, tensor parallelism, expert weights and ignored parameters make of a tree; no block is cut."""
    both = w.mesh(2, 2)
    match tuple(x.shape):
        case (33, 512):
            spec = ShardSpec(both, (_StridedShard(0, split_factor=2), Shard(0)), tuple(x.shape), x.stride())
            places = zip(spec.local_offset(), spec.local_shape(), strict=True)
            return spec.wrap(x[tuple(slice(first, first + n) for first, n in places)].clone())
        case (3, 2048):
            return w.shard(x, both, Shard(1), Shard(0))
        case (34, 257):
            return w.shard(x)
        case (19, 8, 6, 5):
            return w.shard(x, both, Replicate(), Shard(0))
        case (6, 4, 256):
            return w.shard(x, both, Shard(1), Shard(0))
        case (1,):
            return w.shard(x, both, Shard(0), Replicate())
        case _:
            return x


def cutter(mesh: Mesh = ()) -> Callable[[Tensor], Tensor]:
    """Rows over the ranks; on a mesh of two dimensions repeated over the first; without ranks not at all."""
    if not dist.is_initialized():
        return lambda x: x
    if isinstance(mesh, str):
        return mixed
    if not mesh:
        return w.shard
    return lambda x: w.shard(x, w.mesh(*mesh), Replicate(), Shard(0) if x.ndim else Replicate())


def start(seed: int, cut: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Params and states of all rules."""
    tree = {}
    for name in RULES:
        dtype = torch.bfloat16 if name == "stochastic" else torch.float32
        params = {n: cut(w.random(SHAPES[n], seed + i, dtype)) for i, n in enumerate(LEAVES[name])}
        tree[name] = {"params": params, "state": rule(name)[0].init(params)}
    return tree


def advance(tree: dict[str, Any], steps: range, cut: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    for k in steps:
        grads = {n: cut(w.random(shape, 100 * k + i)) for i, (n, shape) in enumerate(SHAPES.items())}
        for name, one in tree.items():
            given = {n: grads[n].bfloat16() if name == "stochastic" else grads[n] for n in LEAVES[name]}
            one["params"], one["state"] = rule(name)[1](given, one["state"], one["params"])
    return tree


def uninterrupted() -> Any:
    tree = advance(start(0, cutter()), range(SAVED_AT), cutter())
    saved = bits(tree)
    return saved, bits(advance(tree, range(SAVED_AT, SAVED_AT + MORE), cutter()))


def save(where: str, how: str, mesh: Mesh = ()) -> Any:
    """Bits when the checkpoint was written, and after; and those that the run has that goes on."""
    cut = cutter(mesh)
    tree = advance(start(0, cut), range(SAVED_AT), cut)
    before = bits(tree)
    if how == "ours":
        fl.checkpoint.save(where, tree)
    elif how == "ours, async":  # two at once, and collectives of the training beside them
        running = [fl.checkpoint.async_save(where + end, tree) for end in ("", "-again")]
        on = bits(advance(tree, range(SAVED_AT, SAVED_AT + MORE), cut))
        for one in running:
            one.result()
        return before, before, on
    else:
        target = {name: {"params": one["params"], "state": fl.state_dict(one["state"])} for name, one in tree.items()}
        if how == "torch":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as in load
                dcp.save(target, checkpoint_id=where)
        else:
            dcp.async_save(target, checkpoint_id=where).result()  # type: ignore[union-attr]
    after = bits(tree)
    return before, after, bits(advance(tree, range(SAVED_AT, SAVED_AT + MORE), cut))


def load(where: str, how: str, mesh: Mesh = ()) -> Any:
    """Into a fresh model and a fresh state, whose numbers are others: bits as loaded, and after more steps."""
    cut = cutter(mesh)
    fresh = start(77, cut)
    if how == "ours":
        before = bits(fresh)
        tree = fl.checkpoint.load(where, fresh)
        assert bits(fresh) == before
    else:
        target = {name: {"params": one["params"], "state": fl.state_dict(one["state"])} for name, one in fresh.items()}
        with warnings.catch_warnings():
            # What torch 2.13 says to a process without a process group, which is what is meant here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(target, checkpoint_id=where, no_dist=not dist.is_initialized())
        tree = {
            name: {"params": one["params"], "state": fl.load_state_dict(fresh[name]["state"], one["state"])}
            for name, one in target.items()
        }
    loaded = bits(tree)
    return loaded, bits(advance(tree, range(SAVED_AT, SAVED_AT + MORE), cut))


@pytest.fixture(scope="session")
def saved(place: Path, alone: Callable[..., Any]) -> Callable[..., str]:
    """`saved(ranks, how)`: where a run was saved; 0 ranks is a process without a process group."""
    known: dict[Any, str] = {}

    def get(ranks: int, how: str) -> str:
        if (ranks, how) not in known:
            where = known[ranks, how] = str(place / f"{how}-{ranks}")
            world = World(ranks, place)
            results = world.run(save, where, how)
            world.close()
            wanted, end = alone(uninterrupted)
            for before, after, on in results:
                assert before == after == wanted  # saving changes nothing
                assert on == end
        return known[ranks, how]

    return get


@slow_unless(lambda world, before: (world, before) == (2, 3))
@pytest.mark.parametrize("before", [0, 1, 2, 3, 4], ids="from={}".format)
def test_goes_on_at_any_number_of_ranks(
    world: World, saved: Callable[..., str], alone: Callable[..., Any], before: int
) -> None:
    for result in world.run(load, saved(before, "ours"), "ours"):
        assert result == alone(uninterrupted)


@slow_unless(lambda before: before in (0, 2))
@pytest.mark.parametrize("before", [0, 1, 2, 3, 4], ids="from={}".format)
def test_goes_on_without_ranks(saved: Callable[..., str], alone: Callable[..., Any], before: int) -> None:
    assert alone(load, saved(before, "ours"), "ours") == alone(uninterrupted)


@slow_unless(lambda world: world == 2)
@pytest.mark.parametrize(
    ("world", "how"), [(1, "torch"), (2, "torch"), (3, "torch, async"), (4, "torch")], indirect=["world"], ids=str
)
def test_torch_alone_saves_and_loads_state_dicts(
    world: World, saved: Callable[..., str], alone: Callable[..., Any], how: str
) -> None:
    """`dcp.save`, `async_save` and `load` of `fl.state_dict(state)`, without our functions for files."""
    for result in world.run(load, saved(2, how), "torch"):
        assert result == alone(uninterrupted)


@slow
@pytest.mark.parametrize("world", [3], indirect=True, ids="W={}".format)
def test_torch_alone_saves_without_ranks(world: World, saved: Callable[..., str], alone: Callable[..., Any]) -> None:
    for result in world.run(load, saved(0, "torch"), "torch"):
        assert result == alone(uninterrupted)


@pytest.mark.parametrize("how", ["torch", "torch, async"])
def test_torch_alone_without_ranks(saved: Callable[..., str], alone: Callable[..., Any], how: str) -> None:
    assert alone(load, saved(2, how), "torch") == alone(uninterrupted)


@slow
@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_async_save_beside_the_training(world: World, saved: Callable[..., str], alone: Callable[..., Any]) -> None:
    where = saved(3, "ours, async")
    for end in ("", "-again"):
        for result in world.run(load, where + end, "ours"):
            assert result == alone(uninterrupted)


@slow
@pytest.mark.parametrize(("world", "mesh"), [(2, (2, 1)), (4, (2, 2)), (4, MIXED)], indirect=["world"], ids=str)
def test_other_meshes(
    world: World, place: Path, saved: Callable[..., str], alone: Callable[..., Any], mesh: Mesh
) -> None:
    where = str(place / f"mesh-{mesh}")
    wanted, end = alone(uninterrupted)
    for before, after, on in world.run(save, where, "ours", mesh):
        assert (before, after, on) == (wanted, wanted, end)
    assert alone(load, where, "ours") == (wanted, end)
    for result in world.run(load, where, "ours"):
        assert result == (wanted, end)
    for result in world.run(load, saved(3, "ours"), "ours", mesh):
        assert result == (wanted, end)


def wrong_sharding() -> Any:
    tx = fl.adamw8bit(1e-2)
    full = w.random((64, 128), 0)
    plain, cut = fl.state_dict(tx.init({"w": full})), tx.init({"w": w.shard(full)})
    try:
        fl.load_state_dict(cut, plain)
    except ValueError as error:
        return str(error), isinstance(cut[0].mu["w"].codes, DTensor), torch.equal(plain["0.step"], torch.tensor(0))
    return None


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_a_plain_file_is_not_a_shard(world: World) -> None:
    for message, still, step in world.run(wrong_sharding):
        assert message == (
            "load_state_dict: '0.mu.w.codes' must have sharding (Shard(dim=0),), got none (a plain tensor)"
        )
        assert still
        assert step


def other_meshes(where: str) -> Any:
    """A state on one mesh, and states of the same placements on meshes of another order or shape."""
    tx, full, places = fl.adamw8bit(1e-2), w.random((64, 256), 0), (Replicate(), Shard(0))

    def trained(ranks: list[list[int]], steps: int) -> Any:
        mesh = DeviceMesh("cpu", ranks)
        params = {"w": w.shard(full, mesh, *places)}
        state = tx.init(params)
        for _ in range(steps):
            state = tx.update(params, state, params)[1]
        return state

    state = trained([[0, 1], [2, 3]], 1)
    fl.checkpoint.save(where, state)
    texts = []
    for ranks in ([[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]):
        own = trained(ranks, 0)
        assert w.of_state(fl.checkpoint.load(where, own)) == w.of_state(state)
        try:
            assert w.of_state(fl.load_state_dict(own, fl.state_dict(state))) == w.of_state(state)
        except ValueError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("world", [4], indirect=True, ids="W={}".format)
def test_equal_placements_on_another_mesh(world: World, place: Path) -> None:
    """The shards are other parts of the tensor there: they are refused, but for a checkpoint, which moves them."""
    for texts in world.run(other_meshes, str(place / "meshes")):
        assert texts == [
            f"load_state_dict: '0.mu.w.codes' must be on a mesh of the ranks {ranks}, got [[0, 1], [2, 3]]; "
            "checkpoint.save and load take any mesh"
            for ranks in ([[0, 2], [1, 3]], [[0], [1], [2], [3]])
        ]
