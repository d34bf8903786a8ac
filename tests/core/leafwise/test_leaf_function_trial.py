"""Leaf functions that cannot be tried, that go behind torch's back, or that write: watched, refused, said by name."""

from typing import Any

import pytest
import torch
from helpers import clone, refuses, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl

WAY_OUT = (
    "use fl.reduce.sum, mean, norm or max and declare the function with leafwise(..., reduces=True), or have it given "
    "whole leaves with elementwise=False"
)
# Each fails in the trial, which knows neither the names of `c` nor the leaf's shape, and takes a statistic of a shard.
UNTRIABLE = {
    "unpacks c": (lambda g, s, p, c: ((lambda x: g - x * g.mean())(*c), s), "aten.mean"),
    "takes c by number": (lambda g, s, p, c: (g - c[0] * g.mean(), s), "aten.mean"),
    "takes c as a dict": (lambda g, s, p, c: (g - c._asdict()["x"] * g.mean(), s), "aten.mean"),
    "groups of 8": (lambda g, s, p, c: (g / g.unflatten(0, (8, 8)).norm(), s), "aten.linalg_vector_norm"),
}


def _params() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 2, 64 * 64).view(64, 64)}


@pytest.mark.parametrize("name", UNTRIABLE)
def test_what_could_not_be_tried_is_watched(name):
    function, op = UNTRIABLE[name]
    tx = fl.leafwise(function, hyperparams={"x": 0.5}, name="rule")
    params = _params()
    for call in (
        lambda: tx.update(params, tx.init(params), params),
        lambda: fl.compile(tx)(params, tx.init(params), params),
    ):
        refuses(
            ValueError,
            f"rule.update: at 'w', the leaf function <lambda> calls {op}, which combines elements or moves them, where "
            f"a rank holds only a part of them; {WAY_OUT}",
            call,
        )


def test_what_could_not_be_tried_and_is_right_runs_between_kernels():
    tx = fl.chain(fl.leafwise(lambda g, s, p, c: (c[0] * g, s), hyperparams={"x": 0.5}, name="rule"), fl.adam8bit(0.1))
    params, grads = _params(), [_params()]
    step = fl.compile(tx, donate=False, backend="eager")
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))


SOMETIMES = {
    "large leaves": lambda g, s, p, c: (g - g.mean() if g.numel() > 100 else g, s),
    "some hyperparameters": lambda g, s, p, c: (g - g.mean() if c.x > 1 else g, s),
}


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_statistic_that_is_taken_sometimes_is_found(name):
    tx = fl.leafwise(SOMETIMES[name], hyperparams={"x": 0.5}, name="rule")
    message = (
        "rule: the leaf function <lambda> is elementwise by its declaration, but calls aten.mean, which combines "
        f"elements or moves them, where a rank holds only a part of them; {WAY_OUT}"
    )
    refuses(ValueError, message, lambda: fl.compile(tx))
    refuses(ValueError, message, lambda: tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)})))


def test_a_statistic_of_one_shape_is_found_where_it_is_taken():
    tx = fl.leafwise(lambda g, s, p, c: (g - g.mean() if g.shape[0] == 7 else g, s), name="rule")
    tx.update({"w": torch.ones(6)}, tx.init({"w": torch.ones(6)}))
    with pytest.raises(ValueError, match=r"rule.update: at 'w', the leaf function <lambda> calls aten\.mean"):
        tx.update({"w": torch.ones(7)}, tx.init({"w": torch.ones(7)}))


def test_a_first_value_is_made_once_for_each_leaf():
    seen = []

    def init(p: Tensor) -> Any:
        seen.append(tuple(p.shape))
        return {"mu": p, "nu": p * p}

    rule = fl.leafwise(lambda g, s, p, c: (g, s), state=fl.ScaleByAdamState, init=init, name="rule")
    params = {"a": torch.full((3,), 2.0), "b": torch.full((64, 64), 3.0)}
    state = fl.low_bit(rule).init(params)
    assert seen == [(3,), (64, 64)]
    assert state.nu["a"].tolist() == [4.0] * 3
    assert torch.equal(state.nu["b"].dequantize(), torch.full((64, 64), 9.0))


LEAKS = {
    "numpy": lambda x: float(x.numpy().mean()),
    "tolist": lambda x: sum(x.flatten().tolist()),
    "asarray": lambda x: float(__import__("numpy").asarray(x).mean()),
    "dlpack": lambda x: float(torch.from_dlpack(x.__dlpack__()).mean()),
    "equal": lambda x: float(torch.equal(x, x)),
}


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("name", LEAKS)
def test_numbers_taken_out_behind_torchs_back_are_refused(name, reduces):
    tx = fl.leafwise(lambda g, s, p, c: (g - LEAKS[name](g), s), reduces=reduces, name="rule")
    params = _params()
    with pytest.raises(ValueError, match=r"rule.*calls (Tensor|aten)\."):
        tx.update(params, tx.init(params), params)


def _writes(which: str) -> Any:
    def function(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
        {"g": g, "p": p, "mu": s.trace}[which].mul_(2.0)
        return g * 1.0, s._replace(trace=s.trace * 1.0)

    return function


@pytest.mark.parametrize("declared", [{}, {"reduces": True}, {"elementwise": False}], ids=str)
@pytest.mark.parametrize("which", ["g", "p", "mu"])
def test_a_function_that_writes_into_its_arguments_is_refused(which, declared):
    tx = fl.leafwise(_writes(which), state=fl.TraceState, name="rule", **declared)
    params = _params()
    given = (params, tx.init(params), params)
    before = clone(given)
    at = "" if not declared else "rule.update: the leaf function function writes into one of its arguments at 'w'"
    start = at or (
        "rule: the leaf function function is elementwise by its declaration, but calls an operation that writes into "
        "one of its arguments"
    )
    refuses(ValueError, f"{start}; it must be pure: clone what it writes to", lambda: tx.update(*given))
    if not declared:
        assert same(given, before)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda g, s, p, c: g, "Tensor"),
        (lambda g, s, p, c: None, "NoneType"),
        (lambda g, s, p, c: (g, g), "['Tensor', 'Tensor']"),
    ],
    ids=["forgot s", "forgot return", "no state"],
)
def test_what_a_leaf_function_must_return(function, got):
    tx = fl.leafwise(function, state=fl.TraceState, name="rule")
    params = _params()
    name = "<lambda>"
    message = f"leafwise: {name} must return (update, state), with a state of class TraceState, got {got}"
    refuses(TypeError, message, lambda: tx.update(params, tx.init(params), params))
    refuses(TypeError, message, lambda: fl.compile(tx, backend="eager")(params, tx.init(params), params))


def test_counters_are_on_the_cpu_whatever_the_default_device():
    tx = fl.apply_if_finite(fl.adam(0.1))
    params = _params()
    with torch.device("meta"):
        state = tx.init(params)
    assert same(tx.update(params, state, params), tx.update(params, tx.init(params), params))


def test_steps_go_on_whatever_the_default_device():
    """Numbers are not sent there and back: on "meta", they would be lost."""
    schedule = fl.schedules.warmup_cosine_decay_schedule(0.0, 0.1, 1, 5)
    parts = fl.clip_by_global_norm(1.0), fl.inject_hyperparams(fl.adamw)(schedule), fl.scale_by_schedule(schedule)
    tx = fl.multi_steps(fl.apply_if_finite(fl.chain(*parts)), 2)
    params = _params()
    grads = [fl.tree.map(torch.ones_like, params)] * 4
    step = fl.compile(tx, backend="eager", donate=False)
    wanted = run_pure(tx, params, grads)
    with torch.device("meta"):
        ours, state = params, tx.init(params)
        for g in grads:
            ours, state = step(g, state, ours)
        pure = run_pure(tx, params, grads)
    assert same((ours, state), wanted)
    assert same(pure, wanted)


def test_the_largest_zero_has_no_sign():
    for zeros in ([-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]):
        assert not torch.signbit(fl.reduce.max(torch.tensor(zeros)))


def test_codes_of_masters_of_transposed_parameters_stay_contiguous():
    tx = fl.master_weights(fl.sgd(0.01), bits=8)
    params = {"w": torch.linspace(-1, 1, 2560).view(640, 4).half().t()}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": torch.ones(4, 640)}, state, params)
        params = fl.apply_updates(params, updates)
