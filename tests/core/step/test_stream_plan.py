"""The plan of copies and kernels: nothing is overwritten that is still needed, and no wait is too much."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from functional_lowbit._core.step import staging, stream_plan
from functional_lowbit._core.step.slots import Slot
from functional_lowbit.formats._grid import grid_of

SIZES = st.lists(st.integers(0, 100), max_size=12)


def disorders(plan: stream_plan.Plan, seed: int) -> list[str]:
    """What goes wrong if each lane does its work in order, and begins and ends it whenever the waits let it."""
    chance = random.Random(seed)
    waiting = {lane: [i for i, op in enumerate(plan.ops) if op.lane == lane] for lane in stream_plan.LANES}
    running: list[int] = []
    over: set[int] = set()
    held: dict[int, int] = {}  # bundle in each buffer, from the beginning of its copy-in to the end of its copy-out
    wrong = []
    while any(waiting.values()) or running:
        busy = {plan.ops[i].lane for i in running}
        ready = [q[0] for lane, q in waiting.items() if q and lane not in busy]
        ready = [i for i in ready if plan.ops[i].after is None or plan.ops[i].after in over]
        if not ready and not running:
            return [*wrong, "nothing can go on"]
        if ready and (not running or chance.random() < 0.5):
            i = chance.choice(ready)
            op = plan.ops[i]
            waiting[op.lane].remove(i)
            running.append(i)
            if op.lane == "in":
                if op.buffer in held:
                    wrong.append(f"bundle {op.bundle} overwrites {held[op.buffer]}")
                held[op.buffer] = op.bundle
            before = {"in": None, "run": "in", "out": "run"}[op.lane]
            if before and not any(plan.ops[j][:2] == (before, op.bundle) for j in over):
                wrong.append(f"{op.lane} of {op.bundle} begins before {before} is over")
        else:
            i = running.pop(chance.randrange(len(running)))
            over.add(i)
            if plan.ops[i].lane == "out":
                held.pop(plan.ops[i].buffer, None)
    return wrong


@given(SIZES, st.integers(1, 100), st.integers(0, 2**32))
@settings(max_examples=200)
def test_a_plan_never_overwrites_what_is_still_needed(sizes, room, seed):
    plan = stream_plan.plan(sizes, room)
    assert [i for bundle in plan.bundles for i in bundle] == list(range(len(sizes)))
    assert sorted((op.lane, op.bundle) for op in plan.ops) == sorted(
        (lane, k) for lane in stream_plan.LANES for k in range(len(plan.bundles))
    )
    for k, bundle in enumerate(plan.bundles):
        total = sum(sizes[i] for i in bundle)
        assert total <= plan.buffers[k % 2]
        assert len(bundle) == 1 or total <= room
    assert plan.peak_bytes <= 2 * max([room, *sizes])  # at most two buffers, which only a larger leaf makes larger
    assert all(op.after is None or op.after < i for i, op in enumerate(plan.ops))  # so that lanes without streams work
    assert disorders(plan, seed) == []


@pytest.mark.parametrize("lane", stream_plan.LANES)
def test_each_wait_of_a_plan_is_needed(lane):
    plan = stream_plan.plan([1] * 5, 1)
    ops = tuple(op._replace(after=None) if op.lane == lane else op for op in plan.ops)
    assert any(disorders(plan._replace(ops=ops), seed) for seed in range(100))


ORDER = ["in0", "in1", "run0", "out0", "in2", "run1", "out1", "run2", "out2"]


def test_the_next_copy_is_queued_before_the_kernel():
    plan = stream_plan.plan([3, 3, 3, 9], 6)
    assert plan.bundles == (range(2), range(2, 3), range(3, 4))
    assert plan.buffers == (9, 3)
    assert [f"{op.lane}{op.bundle}" for op in plan.ops] == ORDER
    assert [op.after for op in plan.ops] == [None, None, 0, 2, 3, 1, 5, 4, 7]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 64), st.integers(1, 500), st.booleans())
@settings(max_examples=200)
def test_pieces_are_parts_of_a_leaf_and_no_larger_than_asked(shape, block_size, size, is_blocked):
    grid = grid_of(shape, block_size) if is_blocked else None
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    tensors, kinds = [x, torch.tensor(7)], ["element", "leaf"]
    if grid is not None:
        tensors.append(torch.arange(grid.n_blocks).view(-1, 1))
        kinds.append("block")
    slots = [Slot(kind, torch.int64, kind) for kind in kinds]
    pieces = list(staging.pieces(staging.Filled(grid, tuple(tensors)), slots, size))
    assert torch.equal(torch.cat([p.tensors[0].reshape(-1) for p in pieces]), x.view(-1))
    for p in pieces:
        least = 1 if grid is None else grid.block if len(shape) < 2 or grid.rows == shape[0] else x[0].numel()
        assert p.numel <= max(size, least)
        assert p.tensors[1] == 7
    if grid is not None:
        assert torch.equal(torch.cat([p.tensors[2] for p in pieces]), tensors[2])
        whole = grid.to_blocks(x)
        for p in pieces:
            assert p.grid is not None
            assert torch.equal(p.grid.to_blocks(p.tensors[0]), whole[p.tensors[2].view(-1)][:, : p.grid.block])
