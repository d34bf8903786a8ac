"""CASES that broke other libraries, those that need ranks; each test covers the kind and not only the input."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import world as w
from tiers import slow, slow_unless
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from world import World

import functional_lowbit as fl

_, _, four = (pytest.mark.parametrize("world", [n], indirect=True, ids=[f"W={n}"]) for n in (2, 3, 4))


def steps(
    shapes: tuple[tuple[int, ...], ...],
    cut: Callable[[Tensor], Tensor],
    n: int = 2,
    way: str = "native",
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Any], Any]:
    """`n` steps of a clipped 8-bit AdamW on leaves "0", "1", …: params and state."""
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1))
    params = {str(i): cut(w.random(shape, i, dtype)) for i, shape in enumerate(shapes)}
    state = tx.init(params)
    step = w.take(tx, way)
    for k in range(n):
        grads = {str(i): cut(w.random(shape, 100 * (k + 1) + i, dtype)) for i, shape in enumerate(shapes)}
        params, state = step(grads, state, params)
    return params, state


def plain_bits(*args: Any) -> Any:
    params, state = steps(args[0], lambda x: x, *args[1:])
    return w.fingerprint(params), w.of_state(state)


def kinds(state: Any) -> list[str]:
    """Path and storage of each leaf of a state, as `describe` tells it."""
    return [f"{row.path} {row.format} {row.shape}" for row in fl.describe(state).rows]


# 1: the mesh must not choose the algorithm.

CASE_1 = ((6, 1024), (6, 1000), (3, 4, 512), (8,))


def case_1(*mesh_shape: int) -> Any:
    params, state = steps(CASE_1, lambda x: w.shard(x, w.mesh(*mesh_shape), Replicate(), Shard(0)))
    return kinds(state), w.fingerprint(params), w.of_state(state)


def case_1_plain() -> Any:
    params, state = steps(CASE_1, lambda x: x)
    return kinds(state), w.fingerprint(params), w.of_state(state)


@pytest.mark.parametrize(
    ("world", "mesh"), [(1, (1, 1)), (2, (2, 1)), (2, (1, 2)), (4, (2, 2))], indirect=["world"], ids=str
)
def test_case_1_replicated_and_sharded_are_one_algorithm(
    world: World, alone: Callable[..., Any], mesh: tuple[int, ...]
) -> None:
    plain = alone(case_1_plain)
    assert "1.0.mu.0 companded8 (6, 1024)" in plain[0]
    for result in world.run(case_1, *mesh):
        assert result == plain


# 2: all ranks agree on the type of each leaf, and the pieces are the whole.

CASE_2 = ((15, 512), (33, 640))


def case_2() -> Any:
    params, state = steps(CASE_2, w.shard)
    return [type(x).__name__ for x in fl.tree._optree.leaves(state)], w.fingerprint(params), w.of_state(state)


def test_case_2_uneven_rows_are_quantized_alike(world: World, alone: Callable[..., Any]) -> None:
    plain = alone(plain_bits, CASE_2)
    results = world.run(case_2)
    for types, params, state in results:
        assert types == results[0][0]
        assert params == plain[0]
        assert state == plain[1]
        assert state["1.0.mu.0.codes"][:3] == (torch.int8, (15, 512), (512, 1))
        assert state["1.0.mu.1.scales"][:3] == (torch.float32, (33, 4), (4, 1))


# 3: the global shape cannot be told from a local one.

CASE_3 = ((1601, 1280), (10, 2), (5, 10), (3, 2, 5))
CASE_3_ROWS = [(401, 401, 401, 398), (3, 3, 3, 1), (2, 2, 1, 0), (1, 1, 1, 0)]


def case_3(dtype: torch.dtype) -> Any:
    params, state = steps(CASE_3, w.shard, 2, "native", dtype)
    saved = {k: x for k, x in fl.state_dict(state).items() if isinstance(x, DTensor)}
    return {
        "params": {k: (tuple(x.shape), x.stride(), x.placements) for k, x in params.items()},
        "state": {k: (tuple(x.shape), x.stride(), x.placements) for k, x in saved.items()},
        "rows": [params[str(i)].to_local().shape[0] for i in range(len(CASE_3))],
        "code_rows": saved["1.0.mu.0.codes"].to_local().shape[0],
        "full": {k: tuple(x.full_tensor().shape) for k, x in {**params, **saved}.items()},
        "bits": (w.fingerprint(params), w.of_state(state)),
        "moment": tuple(state[1][0].mu["0"].dequantize().full_tensor().shape),
    }


@four
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_3_global_shape_and_stride(world: World, alone: Callable[..., Any], dtype: torch.dtype) -> None:
    plain = alone(plain_bits, CASE_3, 2, "native", dtype)
    results = world.run(case_3, dtype)
    for rank, result in enumerate(results):
        assert result["rows"] == [rows[rank] for rows in CASE_3_ROWS]
        assert result["code_rows"] == CASE_3_ROWS[0][rank]
        assert result["params"] == results[0]["params"]
        assert result["state"] == results[0]["state"]
        for i, shape in enumerate(CASE_3):
            assert result["params"][str(i)] == (shape, torch.empty(shape).stride(), (Shard(0),))
            if i:  # too small to be quantized, so the moments look like the parameter
                assert result["state"][f"1.0.mu.{i}"] == result["params"][str(i)]
        assert result["state"]["1.0.nu.0.codes"] == ((1601, 1280), (1280, 1), (Shard(0),))
        assert result["state"]["1.0.nu.0.scales"] == ((1601, 5), (5, 1), (Shard(0),))
        assert result["full"] == {k: shape for k, (shape, *_) in {**result["params"], **result["state"]}.items()}
        assert result["moment"] == (1601, 1280)
        assert result["bits"] == plain


# 4: a rank without a row of the last leaf.

CASE_4 = ((64, 64), (3, 2048), (5,), (1,))


def case_4(way: str, leaves: tuple[tuple[int, ...], ...]) -> Any:
    params, state = steps(leaves, w.shard, 3, way)
    local = {k: x.to_local().clone() for k, x in params.items()}
    start = {str(i): w.shard(w.random(shape, i)).to_local() for i, shape in enumerate(leaves)}
    return {
        "changed": {k: bool((local[k] != start[k]).all()) for k in local},
        "held": {k: x.numel() for k, x in local.items()},
        "keys": list(fl.state_dict(state)),
        "step": int(state[1][0].step),
        "bits": (w.fingerprint(params), w.of_state(state)),
    }


@slow_unless(lambda way: way != "inductor")
@four
@pytest.mark.parametrize("way", ["native", "inductor", "eager", "pure"])
@pytest.mark.parametrize("leaves", [CASE_4, ((1,), (1, 8192)), ((0, 5000),)], ids=str)
def test_case_4_an_empty_last_shard_stops_nothing(
    world: World, alone: Callable[..., Any], way: str, leaves: tuple[tuple[int, ...], ...]
) -> None:
    plain = alone(plain_bits, leaves, 3, way)
    results = world.run(case_4, way, leaves)
    for result in results:
        assert set(result["changed"].values()) == {True}
        assert result["keys"] == results[0]["keys"]
        assert result["step"] == 3
        assert result["bits"] == plain
    assert results[3]["held"][str(len(leaves) - 1)] == 0


# 12: one rank's compiled code must not be another's.

CASE_12 = Path(__file__).parent / "support" / "case_12.py"


@slow
@pytest.mark.parametrize("backend", ["native", "inductor"])
def test_case_12_the_same_job_twice_with_one_compile_cache(place: Path, backend: str) -> None:
    """The whole job in fresh processes, as torchrun starts them; the second time with a warm cache on disk."""
    outputs = [_torchrun(place / f"case-12-{backend}", place / f"meeting-{backend}-{i}", backend) for i in range(2)]
    assert outputs[0] == outputs[1]
    first, second = outputs[0]
    assert (first["rows"], second["rows"]) == (17, 16)
    assert first["digests"] == second["digests"]
    assert first["graphs"] == second["graphs"] == 2
    assert first["losses"][-1] < first["losses"][0]


def _torchrun(cache: Path, meeting: Path, backend: str) -> list[Any]:
    # The cache of a second run must be of use, so the kernels' C++ is compiled into the same directory.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment["FUNCTIONAL_LOWBIT_CACHE"] = str(cache / "native")
    root = str(CASE_12.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CASE_12), str(meeting), backend],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in texts]


# 13: one NaN, on one rank.


def case_13(way: str, guarded: bool) -> Any:
    shape = (1024, 256)
    tx: Any = fl.adamw8bit(1e-2)
    if guarded:
        tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), tx))
    params = {"w": w.shard(w.random(shape, 0)), "b": w.shard(w.random((5,), 1))}
    state = tx.init(params)
    step = w.take(tx, way)
    history = []
    for k in range(3):
        grads = {"w": w.random(shape, 10 + k), "b": w.random((5,), 20 + k)}
        if k == 1:
            grads["w"][1000, 7] = float("nan")  # a row of the last rank
        params, state = step({n: w.shard(g) for n, g in grads.items()}, state, params)
        history.append((w.fingerprint(params), w.of_state(state)))
    inner = state.inner_state[1] if guarded else state
    return {
        "history": history,
        "counters": [int(x) for x in state[:3]] if guarded else None,
        "nan": [w.whole(x).isnan().nonzero().tolist() for x in (params["w"], inner[0].mu["w"].dequantize())],
        "finite_b": bool(w.whole(params["b"]).isfinite().all()),
        "step": int(inner[0].step),
    }


@pytest.mark.parametrize(("world", "way"), [(2, "native"), (2, "pure"), (4, "eager")], indirect=["world"], ids=str)
def test_case_13_a_nan_on_one_rank_spoils_its_own_element(world: World, way: str) -> None:
    for result in world.run(case_13, way, False):
        assert result["nan"] == [[[1000, 7]], [[1000, 7]]]
        assert result["finite_b"]
        assert result["step"] == 3


@pytest.mark.parametrize(("world", "way"), [(2, "native"), (2, "pure"), (4, "eager")], indirect=["world"], ids=str)
def test_case_13_apply_if_finite_skips_the_step_on_every_rank(world: World, way: str) -> None:
    results = world.run(case_13, way, True)
    for result in results:
        assert result == results[0]
        assert result["nan"] == [[], []]
        assert result["step"] == 2
        assert result["counters"] == [0, 1, 1]  # none in a row now, the last was finite, one in all
        first, second, third = result["history"]
        assert second[0] == first[0]
        assert {k for k in second[1] if second[1][k] != first[1][k]} == {
            "last_finite",
            "notfinite_count",
            "total_notfinite",
        }
        assert third[0]["w"] != second[0]["w"]
