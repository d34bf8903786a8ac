"""Each optimizer against a naive loop in float64, and against torch.optim where torch has it."""

import math

import pytest
import torch
from cases import CASES
from helpers import random_like, run_pure, run_step
from torch import Tensor

import functional_lowbit as fl

STEPS = 20

# Each of the STEPS sums rounds the parameter by 2**-24 of itself at most. An update is LR times about ten roundings of
# numbers of order 1, which is less. torch's own loop rounds as often: twice that.
ROUNDING = 2 * STEPS * 2.0**-24


def _problem() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    params = random_like({"w": torch.empty(40, 30), "b": torch.empty(7), "s": torch.empty(())}, seed=0)
    return params, [random_like(params, seed=1 + t) for t in range(STEPS)]


def _close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(bool(((a[k].double() - b[k].double()).abs() <= ROUNDING * (1 + b[k].abs())).all()) for k in b)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.naive])
def test_against_a_naive_loop_in_float64(name):
    make, naive = CASES[name].make, CASES[name].naive
    assert naive is not None
    params, grads = _problem()
    wanted = {k: p.double() for k, p in params.items()}
    loops = {k: naive(p) for k, p in wanted.items()}
    for t, g in enumerate(grads, start=1):
        wanted = {k: p + loops[k](g[k].double(), p, t) for k, p in wanted.items()}
    tx = make()
    assert _close(run_pure(tx, params, grads)[0], wanted)
    assert _close(run_step(fl.compile(tx, backend="eager"), params, grads, tx.init(params))[0], wanted)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.torch])
def test_against_torch(name):
    make, peer = CASES[name].make, CASES[name].torch
    assert peer is not None
    params, grads = _problem()
    theirs = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    optimizer = peer(list(theirs.values()))
    for g in grads:
        for k, p in theirs.items():
            p.grad = g[k].clone()
        optimizer.step()
    assert _close(run_pure(make(), params, grads)[0], {k: p.detach() for k, p in theirs.items()})


def test_adam_survives_a_step_count_at_which_float32_would_not():
    """1 - b2**t needs float64: 1 - float32(0.999999) is off by 5%."""
    tx = fl.scale_by_adam(b1=0.9, b2=0.999999, eps=0.0)
    updates, state = tx.update(torch.ones(3), tx.init(torch.zeros(3)))
    assert torch.allclose(updates, torch.ones(3), rtol=1e-6, atol=0)  # five roundings of float32
    state = state._replace(step=torch.tensor(2**31), nu=torch.ones(3), mu=torch.ones(3))
    updates, state = tx.update(torch.ones(3), state)
    assert torch.allclose(updates, torch.ones(3), rtol=1e-6, atol=0)
    assert state.step == 2**31 + 1


@pytest.mark.parametrize("bound", [0.0, 0.5, 1e9], ids=["to nothing", "down", "not at all"])
def test_clip_by_global_norm_against_torch(bound):
    _, (grads, *_) = _problem()
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for p, g in zip(theirs, grads.values(), strict=True):
        p.grad = g.double().float().clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, bound)
    tx = fl.clip_by_global_norm(bound)
    updates, _ = tx.update(grads, tx.init(grads))
    assert torch.allclose(fl.global_norm(grads), norm, rtol=1e-6)  # the order of the sum
    for u, p in zip(updates.values(), theirs, strict=True):
        # torch divides by norm + 1e-6, which is 3e-8 of this norm; the rest is the order of the sum
        assert torch.allclose(u, p.grad, rtol=1e-6, atol=0)


def test_global_norm_is_exact():
    tree = {"a": random_like(torch.empty(300, 513), 0), "b": random_like(torch.empty(1000), 1) * 1e-6, "c": None}
    wanted = math.sqrt(math.fsum(float(x) ** 2 for k in ("a", "b") for x in tree[k].double().flatten()))
    # blocks of 256 are summed in float32 by pairs: at most 8 * 2**-24 off, and these errors average out
    assert abs(float(fl.global_norm(tree)) / wanted - 1) < 5e-7
    assert float(fl.global_norm({})) == 0.0
    assert float(fl.global_norm({"a": torch.empty(0, 3), "b": torch.empty(3, 0)})) == 0.0


@pytest.mark.parametrize("magnitude", [1e-15, 1e15])  # their squares are still float32 numbers
def test_global_norm_over_thirty_decades(magnitude):
    assert math.isclose(float(fl.global_norm(torch.full((4, 512), magnitude))), magnitude * 2048**0.5, rel_tol=1e-6)


def test_global_norm_passes_on_what_is_not_finite():
    assert math.isnan(float(fl.global_norm([torch.tensor([1.0, math.nan])])))
    assert math.isinf(float(fl.global_norm([torch.tensor([1.0, -math.inf]), torch.ones(3, 3)])))
    updates, _ = fl.clip_by_global_norm(1.0).update(torch.tensor([1.0, math.nan]), fl.EmptyState())
    assert updates.isnan().all()


def test_clip_is_elementwise():
    updates, _ = fl.clip(1.0).update(torch.tensor([-3.0, -0.5, 0.0, 2.0, math.inf]), fl.EmptyState())
    assert updates.tolist() == [-1.0, -0.5, 0.0, 1.0, 1.0]


def test_schedule_counts_from_zero_and_once_per_update():
    seen = []
    tx = fl.sgd(lambda step: (seen.append(int(step)), 0.5)[1])
    state = tx.init(torch.zeros(1))
    for _ in range(3):
        _, state = tx.update(torch.ones(1), state)
    assert seen == [0, 1, 2]
