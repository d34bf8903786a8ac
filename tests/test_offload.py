"""offload: the plan of the copies, and a step through staging buffers against the same step without them."""

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import clone, leaves, random_like, refuses, run_pure, run_step, same
from hypothesis import given, settings, strategies as st
from threads import Threads

import functional_lowbit as fl
from functional_lowbit._core.state.lanes import InOrder
from functional_lowbit._core.step import staging, stream_plan
from functional_lowbit._core.step.program import LeafOp
from functional_lowbit.formats._grid import grid_of
from functional_lowbit.transforms._offload import offloaded

SIZE = 30_000  # bytes of a buffer: w, of 98304 elements, takes seven and more in every format but the smallest
SIZES = st.lists(st.integers(0, 100), max_size=12)


# The plan


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
    tensors, shaped = [x, torch.tensor(7)], [True, False]
    if grid is not None:
        tensors.append(torch.arange(grid.n_blocks).view(-1, 1))
        shaped.append(False)
    pieces = list(staging.pieces(staging.Leaf(grid, tuple(tensors)), shaped, size))
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


# The step


def make_params(dtype: torch.dtype = torch.float32) -> Any:
    shapes = {"w": torch.empty(256, 384), "v": torch.empty(33, 257), "b": torch.empty(3), "t": torch.empty(20_000)}
    return {**random_like(shapes, 0, dtype), "column": random_like(torch.empty(384, 40), 5, dtype).t()}


def make_grads(params: Any, missing: str = "") -> list[Any]:
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    return [{**g, missing: None} for g in grads] if missing else grads


def staged(tx: fl.GradientTransformation, seed: int = 0) -> fl.GradientTransformation:
    """Offloaded, from one part of the CPU's memory to another, by threads."""
    return offloaded(tx, SIZE, lambda device: Threads(seed))


def check(plain: Any, tx: Any, params: Any, grads: list[Any], **options: Any) -> None:
    """The step and the pure update give the bits of the plain step, in place and not."""
    wanted = run_step(fl.compile(plain, donate=False, **options), params, grads, plain.init(params))
    given = clone((params, tx.init(params)))
    found = run_step(fl.compile(tx, donate=False, **options), given[0], grads, given[1])
    assert same(found, wanted)
    assert same(given, (params, tx.init(params)))  # donate=False touches nothing
    places = [x.data_ptr() for x in leaves(given)]
    found = run_step(fl.compile(tx, **options), given[0], grads, given[1])
    assert same(found, wanted)
    assert [x.data_ptr() for x in leaves(found)] == places


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("format", fl.formats.names())
def test_every_format_gives_the_bits_of_the_plain_step(format, backend):
    plain, params = fl.adamw8bit(0.01, format=format), make_params()
    check(plain, staged(plain), params, make_grads(params), backend=backend)


def test_inductor_gives_the_bits_of_the_plain_step():
    plain, params = fl.adamw8bit(0.01), make_params()
    check(plain, staged(plain), params, make_grads(params), backend="inductor")


SCHEDULE = fl.schedules.cosine_decay_schedule(0.1, 10)
MASK = {"w": True, "v": False, "b": True, "t": True, "column": False}
AROUND: dict[str, Callable[[Any], Any]] = {
    "clip": lambda tx: fl.chain(fl.clip_by_global_norm(0.5), tx),
    "schedule": lambda tx: fl.chain(tx, fl.scale_by_schedule(SCHEDULE)),
    "mask": lambda tx: fl.masked(tx, MASK),
    "gate": lambda tx: fl.apply_if_finite(tx),
    "steps": lambda tx: fl.multi_steps(tx, 2),
    "mixed formats": lambda tx: fl.chain(tx, fl.low_bit(fl.trace(0.9), "dynamic4")),
    "low_bit": lambda tx: fl.low_bit(tx, {"mu": "e4m3"}),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_with_other_transformations(name, where):
    tx = fl.adamw8bit(SCHEDULE)
    plain = AROUND[name](tx)
    params = make_params()
    check(
        plain,
        AROUND[name](staged(tx)) if where == "inside" else staged(plain),
        params,
        make_grads(params, "v"),
        backend="eager",
    )


@pytest.mark.parametrize("name", AROUND)
def test_the_pure_update_gives_the_bits_of_the_plain_one(name):
    plain, params = AROUND[name](fl.adamw8bit(SCHEDULE)), make_params()
    grads = make_grads(params, "v")
    wanted = run_pure(plain, params, grads)
    assert same(run_pure(staged(plain), params, grads), wanted)
    assert same(run_pure(AROUND[name](staged(fl.adamw8bit(SCHEDULE))), params, grads), wanted)


def test_a_step_that_is_left_out_keeps_the_state():
    tx, params = staged(fl.apply_if_finite(fl.adamw8bit(0.1))), make_params()
    state = tx.init(params)
    before = clone((params, state.inner_state))
    grads = {**make_grads(params)[0], "b": torch.tensor([1.0, float("nan"), 1.0])}
    params, state = fl.compile(tx, backend="eager")(grads, state, params)
    assert same((params, state.inner_state), before)
    assert state.total_notfinite == 1


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_stochastic_rounding_has_the_same_noise(backend):
    plain, params = fl.adamw8bit(0.01), make_params(torch.bfloat16)
    check(plain, staged(plain), params, make_grads(params), backend=backend, rounding="stochastic", key=7)


@pytest.mark.parametrize("bits", [8, 16])
def test_master_weights(bits):
    plain, params = fl.master_weights(fl.adamw8bit(0.01), bits), make_params(torch.bfloat16)
    check(plain, staged(plain), params, make_grads(params), backend="eager")
    assert same(run_pure(staged(plain), params, make_grads(params)), run_pure(plain, params, make_grads(params)))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_numbers_in_the_state(where):
    def of_numbers(wrap: Any) -> fl.GradientTransformation:
        return fl.inject_hyperparams(lambda learning_rate: wrap(fl.adamw8bit(learning_rate)))(learning_rate=SCHEDULE)

    params = make_params()
    plain = of_numbers(lambda tx: tx)
    tx = of_numbers(staged) if where == "inside" else staged(plain)
    grads = make_grads(params)
    found = run_step(fl.compile(tx, donate=False, backend="eager"), params, grads, tx.init(params))
    pure = run_pure(tx, params, grads)
    wanted = run_step(fl.compile(plain, donate=False, backend="eager"), params, grads, plain.init(params))
    for one in (found, pure):
        assert same((one[0], one[1].inner_state), (wanted[0], wanted[1].inner_state))


def test_two_that_are_fused_share_the_smaller_buffers():
    params = make_params()
    plain = fl.chain(fl.scale_by_adam(), fl.low_bit(fl.trace(0.9)), fl.scale(-0.1))
    parts = [(fl.scale_by_adam(), 50_000), (fl.low_bit(fl.trace(0.9)), 20_000)]
    tx = fl.chain(*[offloaded(part, size, lambda device: Threads()) for part, size in parts], fl.scale(-0.1))
    check(plain, tx, params, make_grads(params), backend="eager")


def test_a_step_that_is_renewed_goes_on_streaming():
    params = make_params()
    grads = make_grads(params)
    plain, tx = fl.adamw8bit(0.01), staged(fl.adamw8bit(0.01))
    steps = [fl.compile(x, donate=False, backend="eager") for x in (plain, tx)]
    found = [run_step(step, params, grads[:1], x.init(params)) for step, x in zip(steps, (plain, tx), strict=True)]
    steps[0].renew(fl.adamw8bit(0.1))
    steps[1].renew(staged(fl.adamw8bit(0.1)))
    a, b = (run_step(step, p, grads[1:], s) for step, (p, s) in zip(steps, found, strict=True))
    assert same(a, b)
    resting = [op.behind.resting for op in steps[1]._program.ops() if isinstance(op, LeafOp) and op.rule.moments]
    assert len(resting) == 1
    assert resting[0] is not None


def test_the_errors_of_master_weights_go_through_the_buffers():
    tx, params = staged(fl.master_weights(fl.sgd(0.1))), make_params(torch.bfloat16)
    state, pieces = tx.init(params), []
    before = clone(state.error)
    submit = Threads.submit

    def counted(self: Any, lane: str, job: Any, after: Any) -> Any:
        pieces.append(lane)
        return submit(self, lane, job, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threads, "submit", counted)
        fl.compile(tx, backend="eager")(make_grads(params)[0], state, params)
    assert pieces.count("run") >= 2 * sum(p.numel() for p in params.values()) // SIZE
    assert not same(state.error, before)


def test_what_cannot_be_taken_apart_goes_through_the_pure_update():
    params = {"w": make_params()["w"]}
    grads = make_grads(params)
    for plain in (fl.low_bit(fl.scale_by_muon()), fl.scale_by_trust_ratio(), fl.low_bit(fl.scale_by_factored_rms())):
        check(plain, staged(plain), params, grads, backend="eager")


@pytest.mark.parametrize("params", [{}, {"a": None}, {"a": torch.zeros(0, 4)}], ids=["empty", "none", "no elements"])
def test_trees_that_hold_nothing(params):
    tx = staged(fl.adamw8bit(0.1))
    grads = fl.tree.map(torch.zeros_like, params)
    assert run_step(fl.compile(tx, backend="eager"), params, [grads], tx.init(params))[1][0].step == 1
    assert tx.update(grads, tx.init(params), params)[1][0].step == 1


def test_a_state_on_the_meta_device_can_be_looked_at():
    params = {"w": torch.empty(1 << 20, 1 << 12, device="meta")}
    state = fl.offload(fl.adamw8bit(0.1)).init(params)
    assert state[0].mu["w"].codes.device.type == "meta"
    assert fl.describe(state).total_bytes == fl.describe(fl.adamw8bit(0.1).init(params)).total_bytes


def test_at_most_two_buffers_of_state_are_on_the_device(monkeypatch: pytest.MonkeyPatch):
    """Counted where they are made: the state takes 8 bytes for each of 155 thousand elements, the buffers 60 kB."""
    made: list[int] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> Any:
        if options.get("dtype") is torch.uint8:
            made.append(size[0])
        return empty(*size, **options)

    params = make_params()
    tx = staged(fl.adamw(0.1))
    state, grads, step = tx.init(params), make_grads(params)[0], fl.compile(tx, backend="eager")
    monkeypatch.setattr(torch, "empty", counted)
    step(grads, state, params)
    monkeypatch.undo()
    assert len(made) == 2
    assert sum(made) <= 2 * SIZE < fl.describe(state).total_bytes / 10


def test_a_state_dict_is_that_of_the_plain_state_and_is_loaded_by_either():
    plain, params = fl.adamw8bit(0.01), make_params()
    grads = make_grads(params)
    tx = staged(plain)
    middle = run_pure(tx, params, grads[:1])
    file = io.BytesIO()
    torch.save(fl.state_dict(middle[1]), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    wanted = run_pure(plain, params, grads)
    for other in (plain, tx):
        state = fl.load_state_dict(other.init(params), saved)
        assert same(run_step(fl.compile(other, donate=False), middle[0], grads[1:], state), wanted)
    assert str(fl.describe(middle[1])) == str(fl.describe(run_pure(plain, params, grads[:1])[1]))


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    tx, params = staged(fl.adamw8bit(0.01)), make_params()
    grads = make_grads(params)
    wanted = run_step(fl.compile(tx, donate=False), params, grads, tx.init(params))
    params, state = run_step(fl.compile(tx, donate=False), params, grads[:1], tx.init(params))
    fl.checkpoint.save(tmp_path / "last", {"params": params, "state": state})
    loaded = fl.checkpoint.load(tmp_path / "last", {"params": params, "state": tx.init(params)})
    assert same(run_step(fl.compile(tx), loaded["params"], grads[1:], loaded["state"]), wanted)


def test_as_a_torch_optimizer():
    def trained(tx: Any, reload: bool) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 40)
        optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
        for t in range(3):
            model(random_like(torch.empty(5, 300), t)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if reload:
                saved = clone(optimizer.state_dict())
                optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
                optimizer.load_state_dict(saved)
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]

    plain = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01))
    wanted = trained(plain, False)
    assert same(trained(staged(plain), False), wanted)
    assert same(trained(staged(plain), True), wanted)


def test_schedulers_of_torch_move_its_numbers():
    def trained(around: Any) -> Any:
        def recipe(lr: float, betas: Any) -> Any:
            return fl.chain(fl.clip_by_global_norm(1.0), around(fl.adamw8bit(lr, *betas)))

        torch.manual_seed(0)
        model, rates = torch.nn.Linear(300, 40), []
        numbers = {"lr": 1.0, "betas": (0.9, 0.999)}
        optimizer = fl.optim.Optimizer(model.named_parameters(), recipe, numbers, backend="eager")
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        for t in range(5):
            model(random_like(torch.empty(5, 300), t)).square().sum().backward()
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
            optimizer.step()
            schedule.step() if t < 4 else None
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"], rates

    wanted, found = trained(lambda tx: tx), trained(staged)
    assert len(set(wanted[2])) == 5
    assert same(found[:2], wanted[:2])
    assert found[2] == wanted[2]


class Torn(InOrder):
    """Lanes of a device that fails in the middle."""

    def submit(self, lane: str, job: Any, after: Any) -> None:
        if lane == "out":
            raise OSError("the link is down")
        job()


def test_a_failure_in_the_middle_is_told_and_the_state_refused():
    tx, params = offloaded(fl.adamw8bit(0.1), SIZE, lambda device: Torn(device)), make_params()
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    with pytest.raises(OSError, match="the link is down"):
        step(make_grads(params)[0], state, params)
    with pytest.raises(RuntimeError, match="an earlier step in place was interrupted"):
        step(make_grads(params)[0], state, params)


def test_a_failure_before_anything_is_written_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """Where the device has no memory for the buffers, the step may be tried again."""
    tx, params = staged(fl.adamw8bit(0.1)), make_params()
    state, step, grads = tx.init(params), fl.compile(tx, backend="eager"), make_grads(params)[0]
    before = clone((params, state))
    empty = torch.empty

    def failing(*size: Any, **options: Any) -> Any:
        if options.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("no memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        step(grads, state, params)
    monkeypatch.undo()
    assert same((params, state), before)
    wanted = run_step(fl.compile(fl.adamw8bit(0.1), backend="eager", donate=False), params, [grads], clone(state))
    assert same(step(grads, state, params), wanted)


# Errors


def test_errors_of_offload():
    refuses(
        ValueError,
        "offload: device must be 'cpu', where the state is to rest, got 'gpu'",
        lambda: fl.offload(fl.adam(0.1), "gpu"),
    )
    refuses(
        ValueError,
        "offload: device must be 'cpu', where the state is to rest, got 'cuda:0'",
        lambda: fl.offload(fl.adam(0.1), torch.device("cuda", 0)),
    )
    refuses(
        TypeError,
        "offload: buffer_size must be an int, in bytes, got float",
        lambda: fl.offload(fl.adam(0.1), buffer_size=1e6),  # type: ignore[arg-type]
    )
    refuses(
        ValueError,
        "offload: buffer_size must be at least 1 byte, got 0",
        lambda: fl.offload(fl.adam(0.1), buffer_size=0),
    )
    refuses(
        TypeError,
        "offload: tx must be a GradientTransformation, got function; call it: adam(...)",
        lambda: fl.offload(fl.adam),  # type: ignore[arg-type]
    )


def test_a_state_on_another_device_is_refused():
    tx, params = fl.offload(fl.scale_by_adam()), {"w": torch.ones(3)}
    state = tx.init({"w": torch.ones(3, device="meta")})
    text = (
        "state.mu['w'] is on meta, but fl.offload keeps it on the CPU; make the state with init(params) of the "
        "offloaded transformation"
    )
    refuses(ValueError, f"compile(tx): {text}", lambda: fl.compile(tx)(params, state, params))
    refuses(ValueError, f"offload.update: {text}", lambda: tx.update(params, state, params))
    refuses(ValueError, f"offload.update: {text}", lambda: tx.update(params, state))


# A second device


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator: its streams are not run")
@pytest.mark.parametrize("backend", ["eager", None])
def test_parameters_on_an_accelerator(backend):
    device = torch.accelerator.current_accelerator()
    params = fl.tree.map(lambda p: p.to(device), make_params())
    grads = fl.tree.map(lambda g: g.to(device), make_grads(params))
    plain = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01))
    tx = fl.offload(plain, buffer_size=SIZE)
    wanted, state = run_step(fl.compile(plain, donate=False, backend=backend), params, grads, plain.init(params))
    found, rested = run_step(fl.compile(tx, backend=backend), params, grads, tx.init(params))
    to_cpu = lambda tree: torch.utils._pytree.tree_map(lambda x: x.cpu(), tree)  # noqa: E731
    assert all(x.device.type == "cpu" for x in leaves(rested))
    assert same(to_cpu(found), to_cpu(wanted))
    assert same(rested, to_cpu(state))


def test_parameters_on_a_second_device():
    """Real numbers, on a device that refuses to meet the CPU: see `second_device.py`."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, here / "second_device_case.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
