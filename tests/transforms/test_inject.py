"""Hyperparameters in the state: changed at any time, whatever is computed from them, without another graph."""

import io
import math
from typing import Any

import pytest
import torch
from helpers import averaged, clone, leaves, random_like, refuses, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl

PARAMS = {"w": torch.empty(64, 65), "b": torch.empty(3)}

DTYPES = {"tensor": torch.float32, "float64": torch.float64}


def clipped(learning_rate: Any, max_norm: Any, b1: Any = 0.9, eps: Any = 1e-8, ratio: Any = 0.1) -> Any:
    """What a user would write, with numbers that follow from others."""
    return fl.chain(
        fl.clip_by_global_norm(max_norm),
        fl.masked(fl.add_decayed_weights(0.5 * ratio * learning_rate), {"w": True, "b": False}),
        fl.adamw8bit(learning_rate, b1, b2=1 - 0.01 * ratio, eps=eps, weight_decay=ratio * learning_rate),
    )


def values(t: int) -> dict[str, float]:
    return {
        "learning_rate": 0.1 / (1 + t),
        "max_norm": 0.1 + 0.05 * t,
        "b1": 0.95 - 0.01 * t,
        "eps": (1e-8, 1e-3, 1e-2)[t % 3],
        "ratio": 0.02 + 0.02 * t,
    }


def as_float32(numbers: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in numbers.items()}


@pytest.mark.parametrize("how", ["fill", "float", "tensor", "float64"])
def test_case_7_every_number_changes_at_every_step(how):
    params = random_like(PARAMS, seed=0)
    tx = fl.inject_hyperparams(clipped)(**values(0))
    step, ours, theirs, state = fl.compile(tx), clone(params), params, tx.init(params)
    pure, wanted_state, graphs = tx.init(params), clipped(**values(0)).init(params), []
    wanted = params
    for t in range(6):
        grads = random_like(PARAMS, seed=1 + t)
        for name, value in values(t).items():
            if how == "fill":
                state.hyperparams[name].fill_(value)
                pure.hyperparams[name].fill_(value)
            else:
                number = value if how == "float" else torch.tensor(value, dtype=DTYPES[how])
                state.hyperparams[name] = pure.hyperparams[name] = number
        ours, state = step(grads, state, ours)
        updates, pure = tx.update(grads, pure, theirs)
        theirs = fl.apply_updates(theirs, updates)
        wanted, wanted_state = run_pure(clipped(**as_float32(values(t))), wanted, [grads], wanted_state)
        assert same(ours, wanted)
        assert same(theirs, wanted)
        assert same(state, pure)
        assert same(state.hyperparams, as_float32(values(t)))
        assert same(state.inner_state, wanted_state)
        assert int(state.step) == t + 1
        graphs.append(step.graphs)
    assert graphs == graphs[:1] * 6


def test_schedules_are_counted_from_0_and_cannot_be_overridden():
    tx = fl.inject_hyperparams(fl.sgd)(lambda step: 1.0 / (step + 1), momentum=lambda step: 0.5)
    for update in ("pure", "compiled"):
        params, state = torch.zeros(1), tx.init(torch.zeros(1))
        assert same(state.hyperparams, as_float32({"learning_rate": 1.0, "momentum": 0.5}))
        step, places = fl.compile(tx, backend="eager"), [x.data_ptr() for x in leaves(state)]
        moved = []
        for t in range(3):
            before = params.clone()
            state.hyperparams["learning_rate"].fill_(7.0)
            if update == "pure":
                params, state = run_pure(tx, params, [torch.ones(1)], state)
            else:
                params, state = step(torch.ones(1), state, params)
                assert [x.data_ptr() for x in leaves(state)] == places
            moved.append(float(before - params))
            assert float(state.hyperparams["learning_rate"]) == pytest.approx(1 / (1 + t))  # rounded to float32
        assert moved == pytest.approx([1.0, 1.5 / 2, 1.75 / 3])  # sums of few float32


def test_golden_values():
    """By hand: Adam's first step is the learning rate, on a constant gradient all are."""
    tx = fl.inject_hyperparams(fl.adam)(0.25)
    params, state = torch.zeros(2), tx.init(torch.zeros(2))
    moved = []
    for rate in (0.25, 0.5, 0.125):
        state.hyperparams["learning_rate"] = rate
        updates, state = tx.update(torch.tensor([1.0, -2.0]), state, params)
        moved.append(updates)
    # eps of 1e-8 and roundings of moments: a few ulp of 1
    assert torch.allclose(torch.stack(moved), torch.tensor([[-0.25, 0.25], [-0.5, 0.5], [-0.125, 0.125]]), rtol=1e-6)


def test_which_arguments_are_numbers():
    seen = {}

    def factory(a, b=1.0, c=2, d=True, e="x", f=None, g=(0.5,), h=None, **rest):
        seen.update(a=a, b=b, c=c, d=d, e=e, f=f, g=g, h=h, **rest)
        return fl.sgd(a)

    mask = lambda params: params  # noqa: E731
    tx = fl.inject_hyperparams(factory, static_args="h")(
        torch.tensor(0.5, dtype=torch.float64), 3, h=mask, extra=0.25, word="y", many=torch.ones(2)
    )
    assert list(tx.init(PARAMS).hyperparams) == ["a", "b", "extra"]
    assert same(tx.init(PARAMS).hyperparams, as_float32({"a": 0.5, "b": 3.0, "extra": 0.25}))
    assert (seen["c"], seen["d"], seen["e"], seen["f"], seen["g"], seen["word"]) == (2, True, "x", None, (0.5,), "y")
    assert seen["h"] is mask
    assert seen["many"].shape == (2,)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_case_14_and_9_numbers_stay_float32(default):
    torch.set_default_dtype(default)
    try:
        params = {"w": torch.ones(4, dtype=torch.bfloat16)}
        tx = fl.inject_hyperparams(fl.adamw)(fl.schedules.linear_schedule(0.1, 0.0, 10), b2=0.999)
        state = tx.init(params)
        grads = {"w": torch.full((4,), 0.5, dtype=torch.bfloat16)}
        params, state = run_step(fl.compile(tx, backend="eager"), params, [grads] * 2, state)
        assert {x.dtype for x in state.hyperparams.values()} == {torch.float32}
        assert state.hyperparams["b2"] == torch.tensor(0.999, dtype=torch.float32)
        assert state.hyperparams["learning_rate"] == torch.tensor(0.09, dtype=torch.float32)
        b2 = float(torch.tensor(0.999, dtype=torch.float32))  # what follows from it is computed in float64
        nu = torch.tensor((1 - b2) * 0.25, dtype=torch.float32)
        nu = torch.tensor(b2, dtype=torch.float32) * nu + torch.tensor(1 - b2, dtype=torch.float32) * 0.25
        assert torch.equal(state.inner_state[0].nu["w"], nu.expand(4))
    finally:
        torch.set_default_dtype(torch.float32)


INJECTED = fl.inject_hyperparams(fl.adamw)
COMPOSED = {
    "low_bit outside": lambda: fl.low_bit(INJECTED(0.1)),
    "low_bit inside": lambda: fl.inject_hyperparams(fl.adamw4bit)(0.1),
    "chain": lambda: fl.chain(fl.clip_by_global_norm(0.5), INJECTED(0.1), fl.scale(0.5)),
    "masked": lambda: fl.masked(INJECTED(fl.schedules.linear_schedule(0.1, 0.0, 5)), {"w": True, "b": False}),
    "a gate outside": lambda: fl.apply_if_finite(INJECTED(fl.schedules.linear_schedule(0.1, 0.0, 5))),
    "a gate inside": lambda: fl.inject_hyperparams(lambda rate: fl.apply_if_finite(fl.adam8bit(rate)))(0.1),
    "master_weights": lambda: fl.master_weights(INJECTED(fl.schedules.linear_schedule(0.1, 0.0, 5))),
    "a user's pair": lambda: fl.inject_hyperparams(lambda rate: fl.chain(averaged(), fl.sgd(rate)))(0.1),
    "a user's pair in few bits": lambda: fl.low_bit(
        fl.inject_hyperparams(lambda rate: fl.chain(averaged(), fl.sgd(rate)))(0.1)
    ),
    "two of them": lambda: fl.chain(fl.inject_hyperparams(fl.trace)(0.9), fl.inject_hyperparams(fl.scale)(-0.1)),
    "one in the other": lambda: fl.inject_hyperparams(
        lambda rate: fl.chain(fl.inject_hyperparams(fl.trace)(0.9), fl.scale(-rate))
    )(lambda step: 0.1 / (step + 1)),
}


def _break(grads: list[Any]) -> list[Any]:
    grads[1]["b"][0] = math.nan
    return grads


@pytest.mark.parametrize("name", COMPOSED)
def test_it_composes(name):
    tx, params = COMPOSED[name](), random_like(PARAMS, seed=0)
    grads = [random_like(PARAMS, seed=1 + t) for t in range(3)]
    grads = _break(grads) if "gate" in name else grads
    grads[2]["b"] = grads[2]["b"] if "pair" in name else None  # that pair knows no None
    wanted = run_pure(tx, params, grads)
    state = tx.init(params)
    places = [x.data_ptr() for x in leaves(state)]
    got = run_step(fl.compile(tx, backend="eager"), clone(params), grads, state)
    assert same(got, wanted)
    assert [x.data_ptr() for x in leaves(got[1])] == places
    if name == "a gate outside":
        assert int(got[1].inner_state.step) == 2  # the left out step is none of the schedule's
        assert got[1].inner_state.hyperparams["learning_rate"] == torch.tensor(0.08, dtype=torch.float32)


def test_a_closed_gate_keeps_a_number_that_was_set():
    tx, params = fl.apply_if_finite(INJECTED(0.1)), torch.zeros(2)
    state = tx.init(params)
    state.inner_state.hyperparams["learning_rate"] = 0.5
    grads = torch.full((2,), math.nan)
    _, state = fl.compile(tx, backend="eager")(grads, state, params)
    assert same(state.inner_state.hyperparams["learning_rate"], torch.tensor(0.5))
    assert int(state.inner_state.step) == 0


def test_two_states_of_one_step_keep_their_own_numbers():
    tx, params, grads = fl.inject_hyperparams(fl.sgd)(0.5), torch.zeros(1), torch.ones(1)
    step, states = fl.compile(tx, backend="eager", donate=False), [tx.init(params), tx.init(params)]
    step(grads, states[0], params)
    states[0].hyperparams["learning_rate"].fill_(2.0)  # the step has seen this tensor with 0.5 in it
    assert [float(step(grads, s, params)[0]) for s in states] == [-2.0, -0.5]


def test_a_tensor_in_a_leaf_function_is_not_kept_in_the_kernel():
    def factory(rate):
        def descend(g, s, p, c):
            return -rate * g, s

        return fl.leafwise(descend)

    tx, params = fl.inject_hyperparams(factory)(0.5), torch.zeros(1)
    step, state = fl.compile(tx, donate=False), tx.init(params)
    for rate in (0.5, 0.25, 2.0):
        state.hyperparams["rate"].fill_(rate)
        assert float(step(torch.ones(1), state, params)[0]) == -rate


def test_gradients_with_respect_to_a_number():
    tx, params, grads = fl.inject_hyperparams(fl.adamw)(0.1), torch.tensor([1.0]), torch.tensor([2.0])
    state = tx.init(params)

    def loss(rate: Tensor) -> Tensor:
        numbers = {**state.hyperparams, "learning_rate": rate}
        updates, _ = tx.update(grads, state._replace(hyperparams=numbers), params)
        return fl.apply_updates(params, updates).sum()

    # The step is -rate * (1 + 1e-4 * 1), up to float32.
    assert float(torch.func.grad(loss)(torch.tensor(0.1))) == pytest.approx(-1.0001, rel=1e-6)


def test_names_in_a_state_dict_and_back_from_a_file():
    tx, params = INJECTED(0.1), random_like(PARAMS, seed=0)
    state = tx.init(params)
    state.hyperparams["learning_rate"].fill_(0.5)
    file = io.BytesIO()
    saved = fl.state_dict(state)
    assert {"step", "hyperparams.learning_rate", "hyperparams.b2", "inner_state.0.mu.w"} <= set(saved)
    torch.save(saved, file)
    file.seek(0)
    assert same(fl.load_state_dict(tx.init(params), torch.load(file, weights_only=True)), state)


SPEAKER = "inject_hyperparams"
SETTINGS = [
    (lambda h: h.update(b1=math.inf), ValueError, "state.hyperparams['b1'] must be finite at each step, got inf"),
    (lambda h: h["b1"].fill_(math.nan), ValueError, "state.hyperparams['b1'] must be finite at each step, got nan"),
    (
        lambda h: h.update(b1=torch.ones(2)),
        ValueError,
        "state.hyperparams['b1'] must be 0-d at each step, got shape (2,)",
    ),
    (lambda h: h.update(b1="1"), TypeError, "state.hyperparams['b1'] must be a number or a 0-d tensor, got str"),
    (lambda h: h.update(b1=True), TypeError, "state.hyperparams['b1'] must be a number or a 0-d tensor, got bool"),
    (
        lambda h: h.update(b1=torch.tensor(1)),
        TypeError,
        "state.hyperparams['b1'] must be a float or a float tensor, got torch.int64",
    ),
    (lambda h: h.pop("b1"), ValueError, "state.hyperparams has no 'b1'; set a number again"),
    (
        lambda h: h.update(lr=0.1),
        ValueError,
        "state.hyperparams has 'lr', but the numbers are 'learning_rate', 'b1', 'b2'",
    ),
    (
        lambda h: h.update(weight_decay=0.1),
        ValueError,
        "state.hyperparams has 'weight_decay', but the numbers are 'learning_rate', 'b1', 'b2'; it was given as one "
        "that stays as it is",
    ),
]


@pytest.mark.parametrize(("spoil", "kind", "message"), SETTINGS)
def test_a_wrong_number_is_refused_before_anything_is_written(spoil, kind, message):
    tx = fl.inject_hyperparams(fl.lion, static_args=["weight_decay", "mask"])(0.1)
    params = {"w": torch.ones(2)}
    state = tx.init(params)
    spoil(state.hyperparams)
    before = clone((params, state))
    refuses(kind, f"{SPEAKER}: {message}", lambda: tx.update(params, state, params))
    refuses(kind, f"{SPEAKER}: {message}", lambda: fl.compile(tx, backend="eager")({"w": torch.ones(2)}, state, params))
    assert same((params, state), before)


def test_what_cannot_be_made_is_refused():
    refuses(
        TypeError,
        f"{SPEAKER}: inner_factory must be a function that makes a transformation, got GradientTransformation",
        lambda: fl.inject_hyperparams(fl.sgd(0.1)),
    )
    refuses(
        TypeError,
        f"{SPEAKER}: inner_factory must take its arguments by name, but has *transformations: "
        "functional_lowbit._core.contract.base.GradientTransformation; wrap it in a function that does",
        lambda: fl.inject_hyperparams(fl.chain),
    )
    refuses(
        ValueError,
        f"{SPEAKER}: static_args has 'maks', but the arguments of inner_factory are 'max_delta'",
        lambda: fl.inject_hyperparams(fl.clip, static_args="maks"),
    )
    refuses(
        TypeError,
        f"{SPEAKER}: inner_factory(...) must be a GradientTransformation, got tuple",
        lambda: fl.inject_hyperparams(lambda rate: (rate,))(0.1),
    )
    refuses(
        TypeError,
        f"{SPEAKER}: mask is a function, and taken for a schedule of numbers, but returned dict; if it is none, name "
        "it in static_args",
        lambda: INJECTED(0.1, mask=lambda params: {"w": True}),
    )
    refuses(
        TypeError,
        f"{SPEAKER}: mask is a function, and taken for a schedule of numbers, but is not one of the step alone; if it "
        "is none, name it in static_args",
        lambda: INJECTED(0.1, mask=lambda path, leaf: leaf.ndim > 1),
    )
    refuses(ValueError, "scale_by_adam: b2 must be in [0, 1), got 1.0", lambda: INJECTED(0.1, b2=1.0))
    refuses(
        ValueError,
        f"{SPEAKER}.update: the state must be an InjectHyperparamsState, got tuple; it was made for another "
        "transformation",
        lambda: INJECTED(0.1).update(torch.ones(1), (), torch.ones(1)),
    )


def test_a_structure_that_follows_from_a_number_is_refused():
    def factory(rate):
        return fl.sgd(rate, momentum=0.9 if rate > 0.2 else None)

    tx, params = fl.inject_hyperparams(factory)(0.5), torch.zeros(1)
    step, state = fl.compile(tx, backend="eager"), tx.init(params)
    state.hyperparams["rate"].fill_(0.1)
    refuses(
        ValueError,
        "compile(tx): the transformation that the function makes must not change its structure with its "
        "hyperparameters, but trace with TraceState became identity with EmptyState; make another one for that",
        lambda: step(torch.ones(1), state, params),
    )
