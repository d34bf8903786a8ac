"""Donated buffers are written in place, so what shares memory is refused; without donation it is right."""

from typing import Any, NamedTuple

import numpy
import pytest
import torch
from helpers import clone, refuses, same
from torch import Tensor

import functional_lowbit as fl


def test_one_tensor_under_two_names():
    shared = torch.ones(64, 64)
    params = {"head": shared, "tok": shared}
    grads = {"head": torch.ones(64, 64), "tok": -torch.ones(64, 64)}
    tx = fl.sgd(0.1)
    message = (
        "compile(tx): params['head'] and params['tok'] are one tensor, and donated buffers are written in place; leave "
        "one out (named_parameters does), or compile with donate=False"
    )
    refuses(ValueError, message, lambda: fl.compile(tx, backend="eager")(grads, tx.init(params), params))
    assert torch.equal(shared, torch.ones(64, 64))
    new, _ = fl.compile(tx, backend="eager", donate=False)(grads, tx.init(params), params)
    assert torch.equal(new["head"], torch.full((64, 64), 0.9))
    assert torch.equal(new["tok"], torch.full((64, 64), 1.1))


class Anchor(NamedTuple):
    """Where the parameters began."""

    first: Any


def _pull_back() -> fl.GradientTransformation:
    """A user's pair whose init keeps the parameters themselves."""

    def update(updates: Any, state: Anchor, params: Any) -> tuple[Any, Anchor]:
        return fl.tree.map(lambda u, p, a: u + (a - p), updates, params, state.first), state

    return fl.GradientTransformation(lambda params: Anchor(params), update)


def test_a_state_that_holds_the_parameters():
    tx = fl.chain(_pull_back(), fl.scale(0.5))
    params = {"w": torch.ones(4)}
    grads = {"w": torch.full((4,), 2.0)}
    message = (
        "compile(tx): the state shares memory with the parameters, which are donated; copy them in init, or compile "
        "with donate=False"
    )
    refuses(ValueError, message, lambda: fl.compile(tx, backend="eager")(grads, tx.init(params), params))
    step = fl.compile(tx, backend="eager", donate=False)
    state, before = tx.init(params), clone(params)
    new, state = step(grads, state, params)
    new, state = step(grads, state, new)
    assert same(params, before)
    assert torch.equal(new["w"], torch.full((4,), 2.5))  # 1 + 2/2 = 2; 2 + (2 + (1 - 2))/2 = 2.5


def test_keyword_arguments_reach_the_pairs_that_name_them():
    def update(updates: Any, state: tuple[()], params: Any = None, *, loss: Tensor) -> tuple[Any, tuple[()]]:
        return fl.tree.scale(loss, updates), state

    by_loss = fl.GradientTransformation(lambda params: (), update)
    tx = fl.chain(by_loss, fl.trace(0.0), fl.stateless(lambda updates, params: updates))
    params = {"w": torch.zeros(2)}
    extra = {"loss": torch.tensor(3.0), "other": 1}
    updates, _ = tx.update({"w": torch.ones(2)}, tx.init(params), params, **extra)
    assert torch.equal(updates["w"], torch.full((2,), 3.0))
    new, _ = fl.compile(tx, backend="eager")({"w": torch.ones(2)}, tx.init(params), params, **extra)
    assert torch.equal(new["w"], torch.full((2,), 3.0))


def test_one_low_bit_inside_another():
    tx = fl.low_bit(fl.low_bit(fl.scale_by_adam(), {"mu": "companded8"}), {"nu": "bfloat16"})
    state = tx.init({"w": torch.zeros(64, 64)})
    assert state.mu["w"].format.name == "companded8"
    assert state.nu["w"].format.name == "bfloat16"
    params = {"w": torch.zeros(64, 64)}
    pure, _ = tx.update({"w": torch.ones(64, 64)}, state, params)
    new, _ = fl.compile(tx, backend="eager")({"w": torch.ones(64, 64)}, state, params)
    assert torch.equal(new["w"], pure["w"])


class Factored(NamedTuple):
    """A statistic for each row, declared as if it mirrored the parameter."""

    rows: fl.NonNegative


def test_a_moment_of_another_shape_cannot_be_stored():
    pair = fl.GradientTransformation(
        lambda params: Factored(fl.tree.map(lambda p: p.new_zeros(p.shape[0]), params)), lambda u, s, p=None: (u, s)
    )
    message = (
        "low_bit: state.rows['w'] has shape (64,), but a moment must have its parameter's, (64, 64); do not declare it "
        "Signed or NonNegative"
    )
    refuses(ValueError, message, lambda: fl.low_bit(pair).init({"w": torch.zeros(64, 64)}))


@pytest.mark.parametrize("kind", ["float32", "float64", "int32"])
def test_numpys_numbers_are_numbers(kind):
    tx = fl.scale(getattr(numpy, kind)(2))
    assert torch.equal(tx.update(torch.ones(2), tx.init(torch.ones(2)))[0], torch.full((2,), 2.0))
