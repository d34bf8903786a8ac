"""What a leaf function may do: whatever it returns, the fused step does as the pure update."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from helpers import leaves, random_like, refuses, run_pure, run_step, same
from tiers import slow, slow_unless
from torch import Tensor

import functional_lowbit as fl


class Two(NamedTuple):
    """Two moments."""

    step: Tensor  # int64[]; updates made so far
    a: fl.Signed
    b: fl.Signed


def _returns_its_moment(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
    return s.a, s._replace(a=g)


def _history(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
    return g - s.b, s._replace(a=g, b=s.a)


def _swaps(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
    return 0.1 * g, s._replace(a=s.b + g, b=s.a)


def _keeps_params(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
    return -0.1 * p, s._replace(a=p, b=g)


@slow_unless(lambda backend, leaf: backend == "eager" or leaf is _swaps)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("leaf", [_returns_its_moment, _history, _swaps, _keeps_params])
def test_moments_may_be_returned_as_updates_or_as_each_other(leaf, backend):
    tx = fl.low_bit(fl.leafwise(leaf, state=Two))
    params = {"dense": torch.ones(8, 16), "blocks": torch.ones(64, 96)}
    grads = [random_like(params, k) for k in range(3)]
    expected = run_pure(tx, params, grads)
    got = run_step(fl.compile(tx, backend=backend, donate=False), params, grads, tx.init(params))
    assert same(got, expected)


def _toward(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
    return -c.factor * g, s._replace(a=0.9 * s.a + g)


def _factor(updates: Any, s: Two, params: Any, h: Any) -> dict[str, Tensor]:
    return {"factor": 1 / (1 + fl.global_norm(s.a) + fl.global_norm(params))}


@pytest.mark.parametrize("mask", [None, {"w": True, "b": False}])
def test_prepare_sees_the_moments_and_only_its_own_leaves(mask):
    tx = fl.low_bit(fl.leafwise(_toward, state=Two, prepare=_factor))
    tx = tx if mask is None else fl.masked(tx, mask)
    params = {"w": torch.ones(64, 96), "b": torch.full((7,), 10.0)}
    grads = [random_like(params, k) for k in range(3)]
    expected = run_pure(tx, params, grads)
    assert same(run_step(fl.compile(tx, backend="eager", donate=False), params, grads, tx.init(params)), expected)


WRONG = {
    "a scalar update": (lambda g, s, p, c: (torch.zeros(()), s), "update: torch.float32 of shape ()"),
    "a float64 moment": (lambda g, s, p, c: (g, s._replace(a=g.double())), "a: torch.float64 of shape (4,)"),
    "no moment": (lambda g, s, p, c: (g, s._replace(b=None)), "b: NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_leaf_function_must_not_return(name):
    function, what = WRONG[name]
    tx = fl.leafwise(function, state=Two)
    params = {"w": torch.ones(4)}
    message = "leafwise: <lambda> must return float32 tensors of g's shape (4,), got for " + what
    refuses(ValueError, message, lambda: tx.update(params, tx.init(params), params))
    with pytest.raises(ValueError, match="must return float32 tensors of g's shape"):
        fl.compile(tx)(params, tx.init(params), params)


def test_misspelt_fields_are_refused():
    refuses(
        ValueError,
        "leafwise: init_shared names 'stepp', which is no shared field of Two",
        lambda: fl.leafwise(_swaps, state=Two, init_shared={"stepp": 1.0}),
    )
    tx = fl.leafwise(_swaps, state=Two, init=lambda p: {"aa": p})
    refuses(
        ValueError,
        "swaps.init: init returned 'aa', which is no moment or statistic of the state",
        lambda: tx.init(torch.ones(2)),
    )


UPDATES = {
    "another shape": (lambda u, p: {"w": u["w"].T}, "updates['w'] has shape (3, 2), but its parameter has (2, 3)"),
    "an integer": (
        lambda u, p: {"w": u["w"].int()},
        "updates['w'] must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_a_users_pair_returns_is_looked_at(name):
    function, message = UPDATES[name]
    tx = fl.chain(fl.stateless(function), fl.scale(0.5))
    params = {"w": torch.ones(2, 3)}
    kind = TypeError if name == "an integer" else ValueError
    refuses(kind, f"compile(tx): {message}", lambda: fl.compile(tx, backend="eager")(params, tx.init(params), params))


@pytest.mark.parametrize(
    "make",
    [lambda: fl.adamw(0.1, mask={"w": True, "b": False}), lambda: fl.masked(fl.adam(0.1), {"w": True, "b": False})],
)
def test_a_frozen_parameter_has_no_gradient(make):
    tx = make()
    params = {"w": torch.ones(4), "b": torch.ones(3)}
    grads = [{"w": torch.ones(4), "b": None}] * 2
    expected = run_pure(tx, params, grads)
    assert torch.equal(expected[0]["b"], params["b"])
    assert same(run_step(fl.compile(tx, backend="eager", donate=False), params, grads, tx.init(params)), expected)


def test_two_block_sizes_for_one_optimizer_are_refused():
    tx = fl.low_bit(fl.low_bit(fl.scale_by_adam(), {"mu": "companded8"}, block_size=64), {"nu": "companded8"})
    params = {"w": torch.ones(64, 256)}
    message = (
        "compile(tx): the moments of scale_by_adam at 'w' have block sizes 64 and 256; give the low_bits around it one "
        "block_size"
    )
    refuses(ValueError, message, lambda: fl.compile(tx, backend="eager")(params, tx.init(params), params))


@slow
def test_dynamic8_leaves_a_block_alone_that_did_not_change():
    """Its map has no -1, so writing the same numbers again would shrink them by 0.7% each time."""
    tx = fl.low_bit(fl.trace(1.0), "dynamic8")
    params = {"w": torch.zeros(64, 64)}
    grads = [{"w": torch.full((64, 64), -1.0)}, *[{"w": torch.zeros(64, 64)}] * 5]
    expected = run_pure(tx, params, grads)
    for backend in ("eager", "inductor"):
        got = run_step(fl.compile(tx, backend=backend, donate=False), params, grads, tx.init(params))
        assert same(got, expected)
    assert got[1].trace["w"].dequantize().max() == pytest.approx(-0.99297, abs=1e-5)  # shrunk once


def _clipped(x: Tensor) -> Tensor:
    tx = fl.clip_by_global_norm(1.0)
    return (tx.update(x, tx.init(x))[0] * torch.tensor([1.0, 2.0])).sum()


def test_meta_gradients_go_through_the_norm_and_through_apply_if_finite():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (got,) = torch.autograd.grad(_clipped(x), x)
    # d/dx of (x1 + 2 x2) / |x| at (3, 4): (1, 2) / 5 - 11 (3, 4) / 125
    torch.testing.assert_close(got, torch.tensor([0.2 - 33 / 125, 0.4 - 44 / 125]))
    torch.testing.assert_close(torch.func.grad(_clipped)(x.detach()), got)
    tx = fl.apply_if_finite(fl.scale(3.0))
    torch.testing.assert_close(
        torch.func.grad(lambda x: tx.update(x, tx.init(x))[0].sum())(x.detach()), torch.full((2,), 3.0)
    )


def test_an_ensemble_is_clipped_member_by_member():
    tx = fl.clip_by_global_norm(1.0)
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    got = torch.func.vmap(lambda x: tx.update(x, tx.init(x))[0])(x)
    torch.testing.assert_close(got, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_inference_mode_leaves_nothing_behind():
    tx = fl.chain(fl.clip(1.0), fl.adam(0.1))
    with torch.inference_mode():
        tx.update(torch.ones(2), tx.init(torch.ones(2)))
    x = torch.tensor([0.5, 0.2], requires_grad=True)
    assert torch.autograd.grad(tx.update(x, tx.init(x))[0].sum(), x)[0].isfinite().all()


def test_a_users_schedule_under_a_default_dtype_of_bfloat16():
    tx = fl.sgd(lambda step: 0.1 / (3 + step))
    torch.set_default_dtype(torch.bfloat16)
    try:
        update, _ = tx.update(torch.ones(1, dtype=torch.float32), tx.init(torch.ones(1, dtype=torch.float32)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert update.item() == pytest.approx(-0.1 / 3, rel=1e-7)


def test_the_norm_does_not_depend_on_strides():
    for seed in range(50):
        x = torch.randn(64, 300, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(fl.global_norm(x), fl.global_norm(x.t().contiguous().t()))


@pytest.mark.parametrize("tx", [fl.lion(0.1), fl.adamw(0.1), fl.chain(fl.clip_by_global_norm(1.0), fl.sgd8bit(0.1))])
def test_a_transformation_survives_pickling(tx):
    params = {"w": torch.ones(64, 64)}
    again = pickle.loads(pickle.dumps(tx))
    assert same(again.update(params, again.init(params), params), tx.update(params, tx.init(params), params))
    assert leaves(again.init(params))
