"""A step with stochastic rounding: the noise of apply_updates, whatever the backend, the grid or the cut."""

import pytest
import torch
from helpers import clone, random_like, refuses, same
from tiers import slow_unless

import functional_lowbit as fl

SHAPES = {
    "w": (64, 300),
    "odd": (33, 257),
    "b": (7,),
    "scalar": (),
    "tall": (5000, 1),
    "empty": (0, 3),
    "4d": (8, 4, 3, 3),
}


def _params(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return random_like({name: torch.empty(shape) for name, shape in SHAPES.items()}, seed=0, dtype=dtype)


def _pure(tx, params, grads, key):
    state = tx.init(params)
    for g in grads:
        step_key = fl.rounding.fold_in(key, state[0].step)
        updates, state = tx.update(fl.tree.map(lambda x: x.float(), g), state, params)
        params = fl.apply_updates(params, updates, rounding="stochastic", key=step_key)
    return params, state


@slow_unless(lambda format, dtypes: format == "companded8" or dtypes == "bfloat16")
@pytest.mark.parametrize("backend", ["native", "eager", "inductor"])
@pytest.mark.parametrize("dtypes", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", ["companded8", "float32"])
def test_the_step_rounds_as_apply_updates_does(format, dtypes, backend):
    tx = fl.adamw8bit(1e-3, weight_decay=0.1, format=format)
    params = _params(getattr(torch, dtypes))
    grads = [random_like(params, seed=t) for t in range(3)]
    expected = _pure(tx, params, grads, key=5)
    step = fl.compile(tx, rounding="stochastic", key=5, backend=backend)
    got, state = clone(params), tx.init(params)
    for g in grads:
        got, state = step(g, state, got)
    assert same((got, state), expected)
    nearest, _ = fl.compile(tx, backend="eager", donate=False)(grads[0], tx.init(params), params)
    assert not torch.equal(nearest["w"], step(grads[0], tx.init(params), clone(params))[0]["w"])


def test_float32_params_have_nothing_to_round():
    tx, params = fl.adamw8bit(1e-3), _params(torch.float32)
    grads = random_like(params, seed=1)
    expected = fl.compile(tx, donate=False)(grads, tx.init(params), params)
    step = fl.compile(tx, donate=False, rounding="stochastic", key=1)
    assert same(step(grads, tx.init(params), params), expected)


def test_a_key_may_be_a_tensor_that_is_read_anew():
    tx, params = fl.sgd(1e-3, momentum=0.9), _params(torch.bfloat16)
    tx = fl.chain(tx, fl.scale_by_schedule(lambda step: torch.ones(())))
    grads = random_like(params, seed=1)
    key = torch.tensor(3)
    step = fl.compile(tx, donate=False, rounding="stochastic", key=key)
    first = step(grads, tx.init(params), params)
    assert same(first, fl.compile(tx, donate=False, rounding="stochastic", key=3)(grads, tx.init(params), params))
    key.fill_(4)
    second = step(grads, tx.init(params), params)
    assert same(second, fl.compile(tx, donate=False, rounding="stochastic", key=4)(grads, tx.init(params), params))
    assert not same(first[0], second[0])


def test_small_updates_arrive_on_average():
    """Updates of a 40th of a unit in the last place are lost to the nearest, and arrive stochastically."""
    params = {"w": torch.ones(400, 100, dtype=torch.bfloat16)}
    tx = fl.chain(fl.scale_by_schedule(lambda step: torch.ones(())), fl.scale(2.0**-7 / 40))
    grads = {"w": torch.ones(400, 100, dtype=torch.bfloat16)}
    means = {}
    for rounding in ("nearest", "stochastic"):
        step = fl.compile(tx, rounding=rounding, key=0)
        p, state = clone(params), tx.init(params)
        for _ in range(80):
            p, state = step(grads, state, p)
        means[rounding] = (p["w"].double().mean().item() - 1) * 2**7
    assert means["nearest"] == 0
    assert means["stochastic"] == pytest.approx(2.0, abs=5 * (80 / 40 / 40_000) ** 0.5)


def test_what_it_needs():
    message = "compile: rounding='stochastic' needs a key, an int or a 0-d int64 tensor"
    refuses(ValueError, message, lambda: fl.compile(fl.adam(0.1), rounding="stochastic"))
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    tx = fl.scale(-1.0)
    message = (
        "compile: rounding='stochastic' needs a state that counts steps, so that each has noise of its own; put a "
        "transformation with a step into the chain, for instance scale_by_schedule"
    )
    step = fl.compile(tx, rounding="stochastic", key=0)
    refuses(ValueError, message, lambda: step(params, tx.init(params), params))
