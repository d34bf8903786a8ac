"""offload over DTensors: the bits of the plain run; and shards that rest on the CPU in a mesh of another device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from threads import Threads
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from world import World

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec, local_of
from functional_lowbit.transforms._offload import offloaded

SHAPES = {"w": (129, 192), "rows": (5, 3000), "b": (5,), "none": (1, 7)}  # on 2 ranks uneven, and one empty
SIZE = 10_000  # bytes of a buffer; a rank holds 12384 elements of w


def trained(format: str, is_staged: bool, way: str, cut: str) -> Any:
    """Two steps; fingerprints of params and state. A global norm and a gate look at all ranks."""

    def place(x: Tensor) -> Tensor:
        if cut == "plain":
            return x
        return w.shard(x, w.mesh(), Shard(1)) if cut == "columns" and x.ndim > 1 else w.shard(x)

    adam = fl.adamw8bit(1e-2, format=format)
    if is_staged:
        adam = offloaded(adam, SIZE, lambda device: Threads())
    tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), adam))
    params = {k: place(w.random(s, i)) for i, (k, s) in enumerate(SHAPES.items())}
    state, step = tx.init(params), w.take(tx, way)
    for t in range(2):
        grads = {k: place(w.random(s, 10 * (t + 1) + i)) for i, (k, s) in enumerate(SHAPES.items())}
        params, state = step(grads, state, params)
    return w.fingerprint(params), w.of_state(state)


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("way", ["eager", "pure"])
@pytest.mark.parametrize("format", fl.formats.names())
def test_rows_over_ranks_have_the_bits_of_the_plain_run(world: World, alone: Callable[..., Any], format: str, way: str):
    plain = alone(trained, format, False, "eager", "plain")
    for found in world.run(trained, format, True, way, "rows"):
        assert found == plain


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("format", ["companded8", "root4"])
def test_blocks_that_the_mesh_cuts_have_the_bits_of_the_run_without_offload(world: World, format: str):
    plain = world.run(trained, format, False, "eager", "columns")
    assert world.run(trained, format, True, "eager", "columns") == plain


def in_a_mesh_of_cuda() -> Any:
    """Two steps of parameters that are said to be on CUDA devices, and are on the CPU, as fully_shard's policy does."""
    other = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=w.rank())
    tx = fl.chain(fl.clip(1.0), offloaded(fl.adamw8bit(1e-2), SIZE, lambda device: Threads()))
    found = []
    for mesh in (w.mesh(), other):

        def place(x: Tensor, mesh: DeviceMesh = mesh) -> DTensor:
            spec = ShardSpec.of(w.shard(x))
            assert spec is not None
            return ShardSpec(mesh, spec.placements, spec.shape, spec.stride).wrap(local_of(w.shard(x)).clone())

        params = {k: place(w.random(s, i)) for i, (k, s) in enumerate(SHAPES.items())}
        state, step = tx.init(params), fl.compile(tx, backend="eager")
        for t in range(2):
            grads = {k: place(w.random(s, 10 * (t + 1) + i)) for i, (k, s) in enumerate(SHAPES.items())}
            params, state = step(grads, state, params)
        saved = fl.state_dict(fl.load_state_dict(tx.init(params), fl.state_dict(state)))
        tensors = [x for x in {**params, **saved}.values() if isinstance(x, DTensor)]
        assert {x.device_mesh for x in tensors} == {mesh}
        assert {local_of(x).device.type for x in tensors} == {"cpu"}
        found.append([(tuple(x.shape), x.stride(), x.placements, local_of(x).tolist()) for x in tensors])
    return len(found[0]), found[0] == found[1]


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_shards_on_the_cpu_stay_there_in_a_mesh_of_another_device(world: World):
    # 4 parameters; of w and rows the codes and scales of two moments, of b and none the moments
    assert world.run(in_a_mesh_of_cuda) == [(4 + 2 * 2 * 2 + 2 * 2, True)] * 2


def wrapped() -> Any:
    spec = ShardSpec(
        DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=w.rank()), (Shard(0),), (3, 2), (1, 3)
    )
    here, meta = spec.wrap(torch.ones(2 - w.rank(), 2)), spec.wrap(torch.ones(2 - w.rank(), 2, device="meta"))
    return [
        (x.to_local().device.type, tuple(x.shape), x.stride(), x.dtype, ShardSpec.of(x) == spec) for x in (here, meta)
    ]


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_a_wrapped_shard_stays_where_it_is(world: World):
    wanted = [(device, (3, 2), (1, 3), torch.float32, True) for device in ("cpu", "meta")]
    assert world.run(wrapped) == [wanted, wanted]
