"""Which operations share a kernel."""

import torch
from helpers import averaged, random_like, run_pure, run_step, same

import functional_lowbit as fl

PARAMS = {"w": torch.empty(64, 65), "b": torch.empty(3)}
ONLY_W = {"w": True, "b": False}


def kernels(step):
    """For each kernel, the names of its leaf functions, and whether it adds the update to the parameter."""
    return {(tuple(s.update_leaf.__name__ for s in key.stages), key.apply) for key in step._used}


def test_what_looks_at_some_leaves_leaves_the_others_fused():
    tx = fl.chain(fl.scale(0.5), fl.masked(fl.clip_by_global_norm(0.5), ONLY_W), fl.sgd(0.1, 0.9))
    params = random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1)]
    step = fl.compile(tx, backend="eager", donate=False)
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))
    assert kernels(step) == {
        (("_scale",), False),  # of w, whose norm is looked at
        (("_scale_down", "_heavy_ball", "_descend"), True),
        (("_scale", "_heavy_ball", "_descend"), True),  # of b
    }


def test_an_observed_or_injected_pair_of_a_user_is_called_alone():
    tx = fl.inject_hyperparams(lambda rate: fl.chain(fl.scale(0.5), averaged(), fl.sgd(rate)))(0.1)
    params = random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1)]
    step = fl.compile(tx, backend="eager", donate=False)
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))
    assert kernels(step) == {(("_scale",), False), (("_identity", "_descend"), True)}


def test_a_gate_inside_what_is_called_as_it_is_has_no_number():
    gated = fl.apply_if_finite(fl.low_bit(averaged()))
    tx, params = fl.chain(gated, fl.apply_if_finite(fl.adam(0.1))), random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1 + t) for t in range(2)]
    step = fl.compile(tx, backend="eager", donate=False)
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))


def test_a_closed_gate_holds_back_what_no_leaf_function_behind_it_sees():
    """A mask inside the gate lets other leaves pass, and their updates are zero all the same."""
    params, mask = random_like(PARAMS, seed=0), {"w": True, "b": False}
    masked = fl.masked(fl.trace(0.5), mask)
    nothing = {"w": False, "b": False}
    for inner in (masked, fl.partition({"x": masked}, "x"), fl.freeze(mask), fl.masked(fl.scale(2.0), nothing)):
        for tx in (fl.apply_if_finite(inner), fl.chain(fl.scale(-0.1), fl.apply_if_finite(inner))):
            grads = [random_like(PARAMS, seed=1 + t) for t in range(3)]
            grads[1]["b"][0] = float("nan")
            ours = run_step(fl.compile(tx, backend="eager", donate=False), params, grads, tx.init(params))
            assert all(p.isfinite().all() for p in ours[0].values())
            assert same(ours, run_pure(tx, params, grads))
