"""CASES that broke other libraries, on more meshes and in more formats than test_cases_on_ranks.py has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import world as w
from tiers import slow, slow_unless
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from world import World

import functional_lowbit as fl

# 1: the mesh must not choose the algorithm, whatever the format.

CASE_1 = {"whole": (6, 1024), "uneven": (5, 1000), "cut": (4097,), "small": (8,)}


def case_1(mesh: tuple[int, ...] | None) -> Any:
    seen = {}
    for format in fl.formats.names():
        params = {n: w.random(shape, i) for i, (n, shape) in enumerate(CASE_1.items())}
        grads = [{n: w.random(shape, 10 * k + i) for i, (n, shape) in enumerate(CASE_1.items())} for k in (1, 2)]
        if mesh:
            params, *grads = (
                {n: w.shard(x, w.mesh(*mesh), Replicate(), Shard(0)) for n, x in tree.items()}
                for tree in (params, *grads)
            )
        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, format=format))
        state = tx.init(params)
        step = w.take(tx, "eager")
        for g in grads:
            params, state = step(g, state, params)
        bits = {**w.fingerprint(params), **w.of_state(state)}
        seen[format] = (
            [(row.path, row.format, row.shape) for row in fl.describe(state).rows],
            {n: x for n, x in bits.items() if "cut" not in n and n != "schema"},
        )
    return seen


@pytest.mark.parametrize(
    ("world", "mesh"), [(2, (2, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2))], indirect=["world"], ids=str
)
def test_case_1_in_every_format(world: World, alone: Callable[..., Any], mesh: tuple[int, ...]) -> None:
    plain = alone(case_1, None)
    for seen in world.run(case_1, mesh):
        assert seen == plain  # also what the leaf that the mesh cuts is stored as


# 5: a checkpoint into a fresh model and a fresh state.


def case_5(where: str, rounding: str) -> Any:
    """An MLP in bf16 under fully_shard: 20 steps, save, 5 more; and the 5 again from the file."""
    seen = {}
    for format in fl.formats.names():
        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, format=format))
        key = 3 if rounding == "stochastic" else None
        model, params, state = case_5_start(tx, 0)
        step = fl.compile(tx, backend="eager", rounding=rounding, key=key)
        for k in range(20):
            state, _ = case_5_step(model, params, step, state, k)
        saved = {"params": dict(model.named_parameters()), "state": fl.state_dict(state)}
        dcp.save(saved, checkpoint_id=f"{where}-{format}")
        ends = []
        for fresh in (False, True):
            if fresh:
                model, params, state = case_5_start(tx, 1)
                target = {"params": params, "state": fl.state_dict(state)}
                dcp.load(target, checkpoint_id=f"{where}-{format}")
                state = fl.load_state_dict(state, target["state"])
            step = fl.compile(tx, backend="eager", rounding=rounding, key=key)
            losses = []
            for k in range(20, 25):
                state, loss = case_5_step(model, params, step, state, k)
                losses.append(loss)
            ends.append((w.fingerprint(params), w.of_state(state), losses))
        seen[format] = ends
    return seen


def case_5_start(tx: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).bfloat16()
    fully_shard(model, mesh=w.mesh())
    params = dict(model.named_parameters())
    return model, params, tx.init(params)


def case_5_step(model: nn.Module, params: Any, step: Any, state: Any, k: int) -> Any:
    x = w.random((16, 256), 100 + k, torch.bfloat16)
    loss = (model(x) - x.roll(1, 1)).float().square().mean()
    loss.backward()
    _, state = step({n: p.grad for n, p in params.items()}, state, params)
    model.zero_grad()
    return state, loss.item()


@slow
@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("rounding", ["stochastic"])  # to the nearest: test_resume.py
def test_case_5_goes_on_as_if_nothing_had_happened(world: World, place: Path, rounding: str) -> None:
    for seen in world.run(case_5, str(place / f"case-5-{rounding}"), rounding):
        assert set(seen) == set(fl.formats.names())
        for uninterrupted, resumed in seen.values():
            assert resumed == uninterrupted  # parameters, state and losses


# 9: the default dtype is nobody's business.


def case_9(default: torch.dtype, when: str) -> Any:
    tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(lambda step: 0.1 / (1 + int(step)))))
    shapes = {"w": (33, 512), "columns": (9, 1000), "b": (5,)}

    def place(seed: int) -> dict[str, Tensor]:
        tree = {n: w.random(shape, seed + i) for i, (n, shape) in enumerate(shapes.items())}
        return {n: w.shard(x, w.mesh(), Shard(1 if n == "columns" else 0)) for n, x in tree.items()}

    seen = []
    for dtype in (torch.float32, default):
        params, grads = place(0), [place(10 * (k + 1)) for k in range(3)]
        try:
            if when == "before init":
                torch.set_default_dtype(dtype)
            state = tx.init(params)
            step = w.take(tx, "eager")
            for k, g in enumerate(grads):
                if k:
                    torch.set_default_dtype(dtype)
                params, state = step(g, state, params)
            norm = fl.global_norm(grads[0])
        finally:
            torch.set_default_dtype(torch.float32)
        seen.append((w.fingerprint(params), w.of_state(state), norm.dtype, norm.item()))
    return seen


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("when", ["before init", "before the second step"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_case_9_default_dtype_on_ranks(world: World, default: torch.dtype, when: str) -> None:
    for usual, other in world.run(case_9, default, when):
        assert other == usual  # dtypes of codes, scales and counters among it


# 15: small updates of bf16 params, on replicas whose generators differ.

LR, STEPS = 1e-5, 500


def case_15(shape: tuple[int, int], backend: str, mesh: tuple[int, ...] | None) -> Any:
    """A gradient of 1 everywhere, so each step is -LR but for the rounding of the moments, which keep a constant."""
    seen = {}
    for rounding in ("nearest", "stochastic"):
        start = (0.5 + 0.5 * torch.rand(shape, generator=torch.Generator().manual_seed(0))).bfloat16()
        start.clamp_(0.6, 0.9)  # so that none leaves the numbers that are 2**-8 apart
        params, grads = {"w": start.clone()}, {"w": torch.ones_like(start)}
        if mesh:
            torch.manual_seed(1000 + w.rank())
            torch.rand(w.rank())
            params, grads = ({"w": w.shard(x["w"], w.mesh(*mesh), Replicate(), Shard(0))} for x in (params, grads))
        tx = fl.adamw8bit(LR, weight_decay=0.0)
        state = tx.init(params)
        step = fl.compile(tx, backend=backend, rounding=rounding, key=7 if rounding == "stochastic" else None)
        for _ in range(STEPS):
            params, state = step(grads, state, params)
        local = fl.sharding.local_of(params["w"])
        moved = (w.whole(params["w"]).double() - start.double()).mean().item()
        seen[rounding] = w.fingerprint(params)["w"], w.of_state(state), w.digest(local), moved
    return seen


@slow_unless(lambda backend: backend == "eager")
@pytest.mark.parametrize(
    ("world", "mesh", "shape", "backend"),
    [(2, (2, 1), (4096, 512), "native"), (4, (2, 2), (33, 512), "eager")],
    indirect=["world"],
    ids=str,
)
def test_case_15_stochastic_rounding_on_replicas(
    world: World, alone: Callable[..., Any], mesh: tuple[int, ...], shape: tuple[int, int], backend: str
) -> None:
    plain = alone(case_15, shape, backend, None)
    results = world.run(case_15, shape, backend, mesh)
    shards = mesh[1]
    for rank, result in enumerate(results):
        for rounding in ("nearest", "stochastic"):
            assert result[rounding][:2] == plain[rounding][:2]
            assert result[rounding][2] == results[rank % shards][rounding][2]  # the other replica's shard
    assert plain["nearest"][3] == 0
    # A rounding moves a number of 2**-8 spacing up or down with a variance of at most LR * 2**-8; five sigma of the
    # mean over all numbers and steps.
    sigma = (STEPS * LR * 2**-8 / (shape[0] * shape[1])) ** 0.5
    assert plain["stochastic"][3] == pytest.approx(-STEPS * LR, abs=5 * sigma)
    assert 5 * sigma < 0.05 * STEPS * LR
