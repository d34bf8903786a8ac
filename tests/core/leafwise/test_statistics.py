"""Statistics: what is kept of a reduction has the shape of what is left, and is a part of the state."""

from typing import Annotated, Any, NamedTuple

import pytest
import torch
from helpers import leaves, random_like, refuses, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl


class Rows(NamedTuple):
    """A number for each row."""

    row: Annotated[Any, fl.Statistic(over=(-1,))]


def _by_rows(g: Tensor, s: Rows, p: Tensor, c: Any) -> Any:
    return g - s.row, s._replace(row=fl.reduce.mean(g, -1, keepdim=True) if g.ndim else g)


SHAPES = {"matrix": (3, 5), "cube": (2, 3, 4), "vector": (5,), "scalar": ()}


def test_statistics_have_the_shape_of_what_is_left():
    params = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    state = fl.leafwise(_by_rows, state=Rows, reduces=True).init(params)
    assert {k: tuple(x.shape) for k, x in state.row.items()} == {
        "matrix": (3, 1), "cube": (2, 3, 1), "vector": (1,), "scalar": ()
    }  # fmt: skip
    assert all(x.dtype == torch.float32 and not x.any() for x in state.row.values())
    assert fl.Statistic().dims((2, 3)) == (0, 1)
    assert fl.Statistic((5, 1, -2)).dims((2, 3)) == (0, 1)
    assert fl.Statistic(lambda shape: (len(shape) - 1,)).dims((2, 3)) == (1,)
    tx = fl.leafwise(_by_rows, state=Rows, reduces=True, over={"row": None})
    assert tx.init(params).row["cube"].shape == (1, 1, 1)


@pytest.mark.parametrize("wrap", [lambda tx: tx, fl.low_bit, lambda tx: fl.masked(tx, {"w": True, "b": False})])
def test_statistics_are_a_part_of_the_state(wrap):
    tx = fl.chain(wrap(fl.leafwise(_by_rows, state=Rows, reduces=True)), fl.sgd8bit(0.1))
    params = {"w": torch.ones(64, 96), "b": torch.ones(7)}
    grads = [random_like(params, k) for k in range(4)]
    wanted = run_pure(tx, params, grads)
    state = tx.init(params)
    places = [x.data_ptr() for x in leaves(state)]
    donated = {k: x.clone() for k, x in params.items()}
    got = run_step(fl.compile(tx), donated, grads[:2], state)
    assert [x.data_ptr() for x in leaves(got[1])] == places
    loaded = fl.load_state_dict(tx.init(params), fl.state_dict(got[1]))
    assert same(run_step(fl.compile(tx), got[0], grads[2:], loaded), wanted)
    why = {row.path: row.why for row in fl.describe(state).rows}
    assert next(v for k, v in why.items() if k.endswith("row.w")) == "a statistic of its leaf"


def test_what_statistics_must_be():
    refuses(
        ValueError,
        "leafwise: by_rows has the statistic 'row', which an elementwise function cannot be given; declare it with "
        "reduces=True or elementwise=False",
        lambda: fl.leafwise(_by_rows, state=Rows),
    )
    refuses(
        ValueError,
        "leafwise: over names 'rows', which is no statistic of Rows",
        lambda: fl.leafwise(_by_rows, state=Rows, reduces=True, over={"rows": None}),
    )
    refuses(
        ValueError,
        "leafwise: by_rows is declared with reduces=True and elementwise=False; the first is given parts of leaves and "
        "uses fl.reduce, the second whole leaves, so choose one",
        lambda: fl.leafwise(_by_rows, reduces=True, elementwise=False),
    )
    tx, params = fl.leafwise(_by_rows, state=Rows, reduces=True), {"w": torch.ones(2, 3)}
    refuses(
        ValueError,
        "by_rows.update: state.row['w'] must be a statistic, float32 of shape (2, 1), got float32 of shape (2, 3); "
        "make the state with init(params) after the parameters are sharded",
        lambda: tx.update(params, Rows(params), params),
    )
    tx = fl.leafwise(lambda g, s, p, c: (g, s._replace(row=g)), state=Rows, reduces=True)
    refuses(
        ValueError,
        "leafwise: <lambda> must return float32 tensors of the statistic 'row''s shape (2, 1), got for row: "
        "torch.float32 of shape (2, 3)",
        lambda: tx.update(params, tx.init(params), params),
    )
    tx = fl.leafwise(_by_rows, state=Rows, reduces=True, init=lambda p: {"row": p})
    refuses(
        ValueError,
        "by_rows.init: init returned 'row' of shape (2, 3) for 'w', but the statistic's shape is (2, 1)",
        lambda: tx.init(params),
    )


class Postponed(NamedTuple):
    """As a module with postponed annotations has it."""

    row: "Annotated[Any, fl.Statistic(), not_there]"  # noqa: F821


def test_a_statistic_that_cannot_be_read_is_not_taken_for_a_number():
    refuses(
        TypeError,
        "Postponed.row: the annotation 'Annotated[Any, fl.Statistic(), not_there]' cannot be resolved; define the "
        "class at the top of its module, or without `from __future__ import annotations`",
        lambda: fl.leafwise(_by_rows, state=Postponed, reduces=True),
    )
