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
