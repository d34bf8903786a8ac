"""A compiled step goes on with a transformation made anew: other numbers, the same kernels, never a stale number."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import averaged, random_like, refuses, run_pure, same
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.step.renewal import same as same_value

PARAMS = {"w": torch.empty(64, 65), "b": torch.empty(3)}


class MeanState(NamedTuple):
    mu: fl.Signed


def defined_inside(learning_rate: Any, decay: float = 0.9) -> fl.GradientTransformation:
    """A factory whose leaf functions are made at each call; `decay` is a part of one of them."""

    def helper(x: Tensor) -> Tensor:
        return decay * x

    def mean(g, s, p, c):
        mu = helper(s.mu) + g
        return mu, s._replace(mu=mu)

    def descend(g, s, p, c, sign=-1.0):
        return sign * c.learning_rate * g, s

    return fl.chain(
        fl.low_bit(fl.leafwise(mean, state=MeanState)),
        fl.leafwise(descend, hyperparams={"learning_rate": learning_rate}),
    )


def everything(t: int) -> fl.GradientTransformation:
    """All kinds of parts; each number is another at each step."""
    return fl.master_weights(
        fl.apply_if_finite(
            fl.chain(
                fl.clip_by_global_norm(0.1 + t),
                fl.masked(fl.add_decayed_weights(0.01 * t), {"w": True, "b": False}),
                fl.adamw8bit(0.1 / (1 + t), 0.9 - 0.1 * t, 0.99, 10.0 ** (-8 + t), weight_decay=0.1 * t),
            ),
            max_consecutive_errors=t,
        )
    )


def unfused(t: int) -> fl.GradientTransformation:
    """Parts that are called as they are."""
    return fl.chain(
        fl.low_bit(fl.chain(averaged(), fl.scale(1.0 + t))), fl.scale_by_trust_ratio(0.01 * t), fl.sgd(0.1 / (1 + t))
    )


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (everything, torch.float32),
        (everything, torch.bfloat16),
        (unfused, torch.float32),
        (lambda t: defined_inside(0.1 / (1 + t)), torch.float32),
    ],
    ids=["everything", "everything in bf16", "unfused", "defined inside"],
)
def test_other_numbers_at_each_step_and_no_other_graph(make, dtype):
    params = random_like(PARAMS, seed=0, dtype=dtype)
    step, state, wanted = fl.compile(make(0), donate=False), make(0).init(params), make(0).init(params)
    ours, theirs, graphs = params, params, []
    for t in range(4):
        grads = [random_like(PARAMS, seed=1 + t, dtype=torch.float32)]
        step.renew(make(t))
        ours, state = step(grads[0], state, ours)
        theirs, wanted = run_pure(make(t), theirs, grads, wanted)
        assert same((ours, state), (theirs, wanted))
        graphs.append(step.graphs)
    assert graphs == graphs[:1] * 4


def test_a_number_inside_a_leaf_function_is_compiled_anew():
    params, grads = random_like(PARAMS, seed=0), [random_like(PARAMS, seed=1)]
    step, state = fl.compile(defined_inside(0.1), donate=False), defined_inside(0.1).init(params)
    ours, _ = step(grads[0], state, params)
    before = step.graphs
    for decay in (0.5, 0.5, 0.9):
        step.renew(defined_inside(0.1, decay))
        ours, new_state = step(grads[0], state, params)
        assert same((ours, new_state), run_pure(defined_inside(0.1, decay), params, grads, state))
    assert step.graphs == 3 * before  # renewed from 0.5, the function for 0.9 is not the first one


def test_what_is_the_same_for_a_kernel():
    def make(value: Any, default: Any = 0) -> Callable[[], Any]:
        def inner(x: Any = default) -> Any:
            return value, x, inner if default == "itself" else None

        return inner

    tensor, numbers = torch.ones(()), [1.0]
    for a, b in [
        (make(0.5), make(0.5)),
        (make((1, "a", None, [0.5])), make((1, "a", None, [0.5]))),
        (make({"a": make(1)}), make({"a": make(1)})),
        (make(1, "itself"), make(1, "itself")),
        (partial(make(1), 2, x=3.0), partial(make(1), 2, x=3.0)),
        (make(torch.float32), make(torch.float32)),
        (fl.adam, fl.adam),
    ]:
        assert same_value(a, b)
    for a, b in [
        (make(0.5), make(0.25)),
        (make(0.0), make(-0.0)),
        (make(1), make(1.0)),
        (make(1), make(True)),
        (make(1, 2), make(1, 3)),
        (make((1, 2)), make((1, 3))),
        (make({"a": 1}), make({"b": 1})),
        (make(tensor), make(tensor)),
        (make(numbers), make(numbers)),
        (make(make(1)), make(make(2))),
        (partial(make(1), 2), partial(make(1), 3)),
        (make(1), lambda x=0: (1, x, None)),
        (make(object()), make(object())),
    ]:
        assert not same_value(a, b)


REFUSED = (
    "Step.renew: the transformation that the function makes must not change its structure with its hyperparameters, "
    "but {}; make another one for that"
)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (fl.adam(0.1), fl.sgd(0.1), "scale_by_adam with ScaleByAdamState became identity with EmptyState"),
        (fl.adam(0.1), fl.lion(0.1, weight_decay=0.0), "Chain had 2 parts and has 3"),
        (fl.sgd(0.1, 0.9), fl.sgd(0.1), "trace with TraceState became identity with EmptyState"),
        (fl.adam(0.1), fl.adam8bit(0.1), "Chain became LowBit"),
        (
            fl.adam8bit(0.1),
            fl.adam8bit(0.1, block_size=64),
            "LowBit had (<format companded8>, None, 4096) and has (<format companded8>, 64, 4096)",
        ),
        (fl.master_weights(fl.sgd(0.1)), fl.sgd(0.1), "MasterWeights became Chain"),
        (fl.master_weights(fl.sgd(0.1)), fl.master_weights(fl.sgd(0.1), 8), "MasterWeights had 16 and has 8"),
        (fl.chain(fl.clip(1.0)), fl.chain(averaged()), "clip became function"),
        (
            fl.inject_hyperparams(fl.clip)(0.5),
            fl.inject_hyperparams(fl.clip)(0.25),  # would have no effect: the number is in the state
            "InjectHyperparams had (('max_delta',), torch.float32, {'max_delta': 0.5}) and has (('max_delta',), "
            "torch.float32, {'max_delta': 0.25})",
        ),
        (
            fl.scale_by_learning_rate(0.1),
            fl.scale_by_learning_rate(lambda step: 0.1),
            "scale_by_learning_rate with EmptyState became scale_by_learning_rate with StepState",
        ),
    ],
)
def test_another_structure_is_refused(old, new, what):
    refuses(ValueError, REFUSED.format(what), lambda: fl.compile(old).renew(new))


def test_what_is_no_transformation_is_refused():
    refuses(
        TypeError,
        "Step.renew: tx must be a GradientTransformation, got function; call it: adam(...)",
        lambda: fl.compile(fl.adam(0.1)).renew(fl.adam),
    )


def test_a_leaf_function_that_cannot_be_tried_any_more_is_refused():
    def make(n: int) -> fl.GradientTransformation:
        def leaf(g, s, p, c):
            (factor,) = c[:n]  # of one scalar
            return factor * g, s

        return fl.leafwise(leaf if n else lambda g, s, p, c: (c.factor * g, s), hyperparams={"factor": 1.0}, name="t")

    step = fl.compile(make(0))
    message = (
        "Step.renew: the leaf function of t cannot be tried by itself any more, as it could with other "
        "hyperparameters; declare it with elementwise=False"
    )
    refuses(ValueError, message, lambda: step.renew(make(1)))
