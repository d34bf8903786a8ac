"""One rank of 64 that hold a model of Llama 7B's shapes, and what it needs; see test_init_memory.py.

The process group is torch's fake one: one real process, with one rank's memory, whose collectives do nothing.
"""

import ctypes
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import functional_lowbit as fl
from functional_lowbit.sharding import ShardSpec, contiguous_stride

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32003  # three tokens more than Llama's: an uneven last shard
RANKS = 64


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for end in ("embedding", "head"):
        yield end, (VOCABULARY, WIDTH)
    yield "norm", (WIDTH,)
    for i in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            yield f"{i}.{name}", (WIDTH, WIDTH)
        for name in ("gate", "up"):
            yield f"{i}.{name}", (HIDDEN, WIDTH)
        yield f"{i}.down", (WIDTH, HIDDEN)
        for name in ("before", "after"):
            yield f"{i}.{name}", (WIDTH,)


def placed(mesh: DeviceMesh, make: Callable[[tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
    """Each leaf as a DTensor of this rank's part only: rows over the first mesh dimension, columns over the second."""
    params = {}
    for name, shape in shapes():
        placements = tuple(Shard(min(i, len(shape) - 1)) for i in range(mesh.ndim))
        spec = ShardSpec(mesh, placements, shape, contiguous_stride(shape))
        params[name] = spec.wrap(make(spec.local_shape()))
    return params


def growth(do: Callable[[], Any]) -> tuple[int, Any]:
    """How far the most memory that the process held while `do()` ran is above what it held before, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before could be used again without being counted
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from VmRSS
    before = _status("VmRSS")
    result = do()
    return _status("VmHWM") - before, result


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(key))


def main(rank: int, mesh_shape: tuple[int, ...]) -> None:
    """Prints JSON: for each format what init took and what describe says of it, and what a step took."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", mesh_shape)
    bf16 = torch.bfloat16
    seen: dict[str, Any] = {}
    rules = {name: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, format=name)) for name in sys.argv[3:]}
    meta = placed(mesh, lambda shape: torch.empty(shape, dtype=bf16, device="meta"))
    params = placed(mesh, lambda shape: torch.zeros(shape, dtype=bf16))
    grads = placed(mesh, lambda shape: torch.zeros(shape, dtype=bf16))
    # What comes with the first use: modules, caches, arenas, the compiled kernels.
    little = {"w": torch.zeros(64, 64, dtype=bf16), "b": torch.zeros(4, dtype=bf16)}
    steps = {name: fl.compile(tx) for name, tx in rules.items()}
    for name, tx in rules.items():
        steps[name](little, tx.init(little), {n: p.clone() for n, p in little.items()})
        fl.global_norm(params)
    for name, tx in rules.items():
        on_meta, planned = growth(lambda tx=tx: tx.init(meta))
        took, state = growth(lambda tx=tx: tx.init(params))
        report = fl.describe(state, params)
        tensors = fl.tree._optree.leaves(state)
        seen[name] = {
            "init": took,
            "meta init": on_meta,
            "described": report.total_bytes,
            "described on meta": fl.describe(planned).total_bytes,
            "same rows": fl.describe(planned).rows == report.rows,
            "meta devices": sorted({str(x.device) for x in fl.tree._optree.leaves(planned)}),
            "tensors": len(tensors),
            "global": sum(x.numel() * x.element_size() for x in tensors),
            "parameters": report.parameters,
        }
        if name == sys.argv[3]:
            seen["step"] = growth(lambda step=steps[name], state=state: step(grads, state, params))[0]
            seen["largest"] = max(p.to_local().numel() for p in params.values()) * 4
        del state, planned, tensors
    print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(int(n) for n in sys.argv[2].split("x")))
