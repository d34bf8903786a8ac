"""A wrapper that looks on sees what its inner transformation is given, costs nothing when it does not look."""

from typing import Any, NamedTuple

import pytest
import torch
from helpers import clone, leaves, random_like, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.state.observing import Observing
from functional_lowbit._core.state.parts import init_with
from functional_lowbit._core.state.resting import rest_in_float32

PARAMS = {"w": torch.empty(64, 65), "b": torch.empty(3)}


class SeenState(NamedTuple):
    step: Tensor  # int64[]
    norms: Any  # float32[] for each leaf; of what the inner transformation was given
    means: Any  # float32[] for each leaf; the sum of parameter and first moment
    inner_state: Any


class Seen(Observing):
    """Keeps norms of updates, at every second step."""

    def __init__(self, inner: fl.GradientTransformation):
        self.inner = (inner,)
        self.looks = 0

    def init(self, params):
        return self.init_state(params, rest_in_float32)

    def init_state(self, params, rest):
        zeros = fl.tree.map(lambda p: torch.zeros(()), params)
        inner_state = init_with(self.inner[0], params, rest)
        return SeenState(torch.zeros((), dtype=torch.int64), zeros, clone(zeros), inner_state)

    def split(self, state):
        return (state.inner_state,)

    def join(self, state, states):
        return state._replace(inner_state=states[0])

    def wants(self, state):
        return int(state.step) % 2 == 1

    def pass_by(self, state):
        return state._replace(step=state.step + 1)

    def observe(self, updates, state, params, extra):
        self.looks += 1
        norms = fl.tree.map(lambda u, p: u.norm() * extra.get("factor", 1.0), updates, params)
        mu = state.inner_state[0].mu
        means = {
            k: p.sum() + (mu[k].dequantize() if hasattr(mu[k], "codes") else mu[k]).sum() for k, p in params.items()
        }
        return state._replace(step=state.step + 1, norms=norms, means=means)


def seen(inner: fl.GradientTransformation) -> fl.GradientTransformation:
    part = Seen(inner)
    return fl.GradientTransformation(part.init, part)


@pytest.mark.parametrize("donate", [True, False])
def test_it_is_transparent_and_sees_what_comes_in(donate):
    params = random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1 + t) for t in range(4)]
    inner = fl.chain(fl.scale(0.5), fl.adam8bit(0.01))
    tx = fl.chain(fl.scale(0.5), seen(fl.adam8bit(0.01)))
    wanted = run_pure(tx, clone(params), grads)
    assert same(wanted[0], run_pure(inner, clone(params), grads)[0])
    state = tx.init(params)
    places = [x.data_ptr() for x in leaves(state)]
    step = fl.compile(tx, backend="eager", donate=donate)
    got = run_step(step, clone(params), grads, state)
    assert same(got, wanted)
    assert int(got[1][1].step) == 4
    assert torch.equal(got[1][1].norms["w"], (0.5 * grads[3]["w"]).norm())
    assert ([x.data_ptr() for x in leaves(got[1])] == places) == donate
    assert tx.update.inner[1].update.looks == 4  # two steps by each way


def test_a_step_without_a_look_is_one_kernel():
    params = random_like(PARAMS, seed=0)
    tx = fl.chain(fl.clip(0.5), seen(fl.adam8bit(0.01)))
    step, plain = fl.compile(tx, donate=False), fl.compile(fl.chain(fl.clip(0.5), fl.adam8bit(0.01)), donate=False)
    _, state = step(params, tx.init(params), params)
    plain(params, (tx.init(params)[0], tx.init(params)[1].inner_state), params)
    assert step.graphs == plain.graphs
    step(params, state, params)
    assert step.graphs > plain.graphs  # the clip by itself


def test_a_closed_gate_keeps_what_was_seen():
    params, tx = random_like(PARAMS, seed=0), fl.apply_if_finite(seen(fl.adam8bit(0.01)))
    grads = [random_like(PARAMS, seed=1 + t) for t in range(4)]
    grads[1]["b"][0] = float("nan")
    wanted = run_pure(tx, params, grads)
    got = run_step(fl.compile(tx, backend="eager", donate=False), params, grads, tx.init(params))
    assert same(got, wanted)
    assert int(got[1].inner_state.step) == 3
    assert torch.equal(got[1].inner_state.norms["w"], grads[2]["w"].norm())


def test_extra_arguments_and_missing_gradients():
    params, tx = random_like(PARAMS, seed=0), seen(fl.adam8bit(0.01))
    state = tx.init(params)._replace(step=torch.ones((), dtype=torch.int64))
    _, state = fl.compile(tx, backend="eager")(random_like(PARAMS, seed=1), state, params, factor=0.0)
    assert [float(x) for x in state.norms.values()] == [0.0, 0.0]
