"""offload: a step through staging buffers against the same step without them."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import clone, leaves, random_like, run_pure, run_step, same
from offload_trees import SIZE, make_grads, make_params, staged
from threads import Threads
from tiers import slow

import functional_lowbit as fl
from functional_lowbit._core.step.program import LeafOp
from functional_lowbit.transforms._offload import offloaded


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
    "names": lambda tx: fl.named_chain(("clip", fl.clip(0.5)), ("optimizer", tx)),
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


@slow
def test_parameters_on_a_second_device():
    """Real numbers, on a device that refuses to meet the CPU: see `second_device.py`."""
    here = Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, here / "second_device_case.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
