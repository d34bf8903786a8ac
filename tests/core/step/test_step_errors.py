"""What does not fit a step is refused in these words, and nothing has been written by then."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import clone, refuses, same

import functional_lowbit as fl

FLOATS = "must be float16, bfloat16, float32 or float64, got"


def _params() -> dict[str, Any]:
    return {"enc": {"w": torch.ones(64, 64)}, "b": torch.ones(3)}


GRADS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "sparse": (
        lambda g: {**g, "b": torch.ones(3).to_sparse()},
        TypeError,
        "updates['b'] is sparse (torch.sparse_coo); only dense gradients are supported, call .to_dense() first",
    ),
    "complex": (
        lambda g: {**g, "b": torch.ones(3, dtype=torch.complex64)},
        TypeError,
        f"updates['b'] {FLOATS} torch.complex64",
    ),
    "not a tensor": (lambda g: {**g, "b": 1.0}, TypeError, "updates['b'] must be a tensor or None, got float"),
    "another shape": (
        lambda g: {**g, "enc": {"w": torch.ones(64)}},
        ValueError,
        "updates['enc.w'] has shape (64,), but its parameter has (64, 64)",
    ),
}
AGAIN = "if the model changed, make a new state with init(params)"
STRUCTURES: dict[str, tuple[Any, str]] = {
    "a leaf less": ({"enc": {"w": torch.ones(64, 64)}}, "'b' is missing"),
    "a leaf more": ({**_params(), "c": torch.ones(1)}, "'c' is unexpected"),
    "another name": ({"enc": {"v": torch.ones(64, 64)}, "b": torch.ones(3)}, "'enc.w' is missing"),
    "another node": ({"enc": [torch.ones(64, 64)], "b": torch.ones(3)}, "a dict was expected at 'enc', got list"),
    "a leaf for a node": ({"enc": torch.ones(64, 64), "b": torch.ones(3)}, "a dict was expected at 'enc', got Tensor"),
    "nothing": (None, "a dict was expected, got None"),
}


def _refuses_and_writes_nothing(tx: Any, given: tuple[Any, Any, Any], kind: type[Exception], rest: str) -> None:
    """Both the compiled step and the pure update, the donated params and state untouched."""
    before = clone(given[1:])
    refuses(kind, f"compile(tx){rest}", lambda: fl.compile(tx, backend="eager")(*given))
    assert same(given[1:], before)


@pytest.mark.parametrize("make", [lambda: fl.adamw8bit(0.1), lambda: fl.chain(fl.clip(1.0), fl.sgd(0.1))])
@pytest.mark.parametrize("name", GRADS)
def test_wrong_gradients(name, make):
    change, kind, message = GRADS[name]
    tx, params = make(), _params()
    state, grads = tx.init(params), change(_params())
    _refuses_and_writes_nothing(tx, (grads, state, params), kind, f": {message}")
    speaker = "clip" if isinstance(state[0], fl.EmptyState) else "scale_by_adam"
    refuses(kind, f"{speaker}.update: {message}", lambda: tx.update(grads, state, params))
    refuses(kind, f"apply_updates: {message}", lambda: fl.apply_updates(params, grads))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_tree_of_another_structure(name):
    other, difference = STRUCTURES[name]
    tx, params = fl.adam8bit(0.1), _params()
    state = tx.init(params)
    rest = f"must have the structure of the parameters, but {difference}; {AGAIN}"
    _refuses_and_writes_nothing(tx, (other, state, params), ValueError, f": grads {rest}")
    refuses(
        ValueError, f"scale_by_adam.update: updates {rest}", lambda: tx.update(other, fl.adam(0.1).init(params), params)
    )
    refuses(ValueError, f"apply_updates: updates {rest}", lambda: fl.apply_updates(params, other))


def _state_of(make: Callable[[], fl.GradientTransformation], params: Any) -> Any:
    return make().init(params)


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str | None, str, type[Exception]]] = {
    "other shapes": (
        lambda: fl.adam(0.1),
        lambda: _state_of(lambda: fl.adam(0.1), {**_params(), "b": torch.ones(4)}),
        "scale_by_adam.update",
        ": state.mu['b'] has shape (4,), but its parameter has (3,); the state was made for other parameters",
        ValueError,
    ),
    "other structure": (
        lambda: fl.adam(0.1),
        lambda: _state_of(lambda: fl.adam(0.1), {"b": torch.ones(3)}),
        "scale_by_adam.update",
        f": state.mu must have the structure of the parameters, but 'enc' is missing; {AGAIN}",
        ValueError,
    ),
    "other transformation": (
        lambda: fl.adam(0.1),
        lambda: _state_of(lambda: fl.sgd(0.1, 0.9), _params()),
        "scale_by_adam.update",
        ": the state must be a ScaleByAdamState, got TraceState; it was made for another transformation",
        ValueError,
    ),
    "cast": (
        lambda: fl.adam(0.1),
        lambda: fl.tree.cast(_state_of(lambda: fl.adam(0.1), _params()), torch.bfloat16),
        "scale_by_adam.update",
        ": state.mu['b'] must be float32 for every dtype of parameters, got torch.bfloat16; to store it in fewer bits, "
        "use fl.low_bit",
        TypeError,
    ),
    "other mask": (
        lambda: fl.masked(fl.trace(0.9), True),
        lambda: _state_of(lambda: fl.masked(fl.trace(0.9), {"enc": True, "b": False}), _params()),
        None,
        ": state.trace['b'] must be a moment, got MaskedNode; the state was made for other parameters or with another "
        "mask",
        ValueError,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_something_else(name):
    make, make_state, speaker, message, kind = STATES[name]
    tx, params = make(), _params()
    _refuses_and_writes_nothing(tx, (_params(), make_state(), params), kind, message)
    if speaker:
        refuses(kind, speaker + message, lambda: tx.update(_params(), make_state(), params))


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("what", ["grads", "state", "params"])
@pytest.mark.parametrize(
    ("make", "speaker", "field"),
    [
        (lambda: fl.adamw8bit(0.1), "scale_by_adam", "mu"),
        (lambda: fl.sgd(0.1, 0.9), "trace", "trace"),
        (lambda: fl.master_weights(fl.sgd(0.1)), "master_weights", "error"),
    ],
    ids=["adamw8bit", "sgd", "master_weights"],
)
def test_tensors_on_another_device(make, speaker, field, what, backend):
    """As meta tensors are: a native kernel must not be given their addresses."""
    tx, half = make(), fl.tree.cast(_params(), torch.bfloat16)
    params = {"grads": half, "state": half, "params": fl.tree.map(lambda x: x.to("meta"), half)}[what]
    grads = fl.tree.map(lambda x: x.to("meta" if what == "grads" else "cpu"), half)
    state = tx.init(fl.tree.map(lambda x: x.to("meta"), half) if what == "state" else half)
    if what == "state":
        rest = (
            f": state.{field}['b'] is on meta, but its parameter is on cpu; make the state with init(params) after the "
        )
        rest += "parameters are moved"
    else:
        places = ("meta", "cpu") if what == "grads" else ("cpu", "meta")
        rest = f": updates['b'] is on {places[0]}, but its parameter is on {places[1]}; move it there"
    refuses(ValueError, f"compile(tx){rest}", lambda: fl.compile(tx, backend=backend)(grads, state, params))
    refuses(ValueError, f"{speaker}.update{rest}", lambda: tx.update(grads, state, params))


MADE = "it was made for another transformation"
CONTAINERS: list[tuple[Callable[[], fl.GradientTransformation], Any, str]] = [
    (
        lambda: fl.chain(fl.clip(1.0)),
        (),
        f"chain.update: the state must be a tuple of 1 states, got tuple of 0; {MADE}",
    ),
    (lambda: fl.chain(fl.clip(1.0)), [1], f"chain.update: the state must be a tuple of 1 states, got list; {MADE}"),
    (lambda: fl.masked(fl.clip(1.0), True), (), f"masked.update: the state must be a MaskedState, got tuple; {MADE}"),
    (
        lambda: fl.apply_if_finite(fl.clip(1.0)),
        (),
        f"apply_if_finite.update: the state must be an ApplyIfFiniteState, got tuple; {MADE}",
    ),
]


@pytest.mark.parametrize(("make", "state", "message"), CONTAINERS)
def test_the_state_of_another_wrapper(make, state, message):
    tx = make()
    refuses(ValueError, message, lambda: tx.update(_params(), state, _params()))
    refuses(ValueError, message, lambda: fl.compile(tx, backend="eager")(_params(), state, _params()))


def test_a_state_in_few_bits_outside_low_bit():
    message = (
        "scale_by_adam.update: state.mu['enc.w'] must be a tensor, got QuantizedTensor; a state in few bits belongs to "
        "the low_bit transformation that made it"
    )
    state = fl.adam8bit(0.1).init(_params())
    refuses(ValueError, message, lambda: fl.adam(0.1).update(_params(), state, _params()))


def test_params_are_needed():
    message = "add_decayed_weights.update: params are needed; call update(updates, state, params)"
    for tx in (fl.add_decayed_weights(0.1), fl.adamw8bit(0.1), fl.lion(0.1)):
        refuses(ValueError, message, lambda tx=tx: tx.update(_params(), tx.init(_params())))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["tensor", "schedule", "schedule of floats"])
def test_a_hyperparameter_that_is_not_finite_at_its_step(kind, value):
    box = torch.tensor(0.1)
    hyper = {"tensor": box, "schedule": lambda step: box, "schedule of floats": lambda step: float(box)}[kind]
    tx, params = fl.chain(fl.trace(0.9), fl.clip(1.0), fl.adamw8bit(0.1, weight_decay=hyper)), _params()
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    params, state = step(_params(), state, params)
    box.fill_(value)
    before = clone((params, state))
    message = f"add_decayed_weights: weight_decay must be finite at each step, got {value}"
    refuses(ValueError, message, lambda: step(_params(), state, params))
    assert same((params, state), before)
    refuses(ValueError, message, lambda: tx.update(_params(), state, params))


def test_a_schedule_that_returns_a_vector():
    tx = fl.sgd(lambda step: torch.ones(2))
    message = "scale_by_learning_rate: learning_rate must be 0-d at each step, got shape (2,)"
    refuses(ValueError, message, lambda: tx.update(_params(), tx.init(_params())))
