"""The one walk: places with paths and marks, a quantized tensor as one leaf, and trees made anew."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit import _optree
from functional_lowbit._core.contract.masked_node import MaskedNode
from functional_lowbit._core.state.parts import moments_in
from functional_lowbit._core.state.quantized import QuantizedTensor


class State(NamedTuple):
    step: Tensor
    mu: fl.Signed
    inner: Any


def make_state() -> State:
    moment = {"w": fl.quantize(torch.ones(4, 4), "companded8"), "b": torch.zeros(4)}
    return State(torch.zeros((), dtype=torch.int64), moment, ({"x": None}, [torch.ones(2), MaskedNode()]))


def test_a_quantized_tensor_is_one_leaf():
    found = {at.path: type(at.node) for at in _optree.stored_leaves(make_state())}
    assert found == {"step": Tensor, "mu.b": Tensor, "mu.w": QuantizedTensor, "inner.1.0": Tensor}
    assert len(_optree.leaves(make_state())) == 5


def test_nodes_come_before_what_is_below_them():
    places = list(_optree.nodes(make_state()))
    paths = [at.path for at in places]
    assert paths == [
        "",
        "step",
        "mu",
        "mu.b",
        "mu.w",
        "inner",
        "inner.0",
        "inner.0.x",
        "inner.1",
        "inner.1.0",
        "inner.1.1",
    ]
    assert [at.name for at in places[:4]] == ["", "step", "mu", "b"]
    assert [at.path for at in places if at.is_leaf] == ["step", "mu.b", "mu.w", "inner.1.0"]


def test_dicts_are_passed_as_they_were_filled_if_asked():
    tree = {"w": torch.ones(1), "b": {2: torch.ones(1), 1: torch.ones(1)}}
    assert [at.path for at in _optree.nodes(tree, as_filled=True)] == ["", "w", "b", "b.2", "b.1"]
    assert [at.path for at in _optree.stored_leaves(tree)] == ["b.1", "b.2", "w"]


def test_a_marked_child_is_passed_whole():
    marked = [at for at in _optree.stored_leaves(make_state(), moments_in) if at.mark is not None]
    assert [(at.path, at.mark.signed, sorted(at.node)) for at in marked] == [("mu", True, ["b", "w"])]


def test_a_tree_is_made_anew():
    state = make_state()
    new = _optree.map_stored(lambda at: at.path, state)
    assert new == State("step", {"b": "mu.b", "w": "mu.w"}, ({"x": None}, ["inner.1.0", MaskedNode()]))
    assert _optree.map_stored(lambda at: at.path, 1.0) == ""
    assert state.mu["w"].format.name == "companded8"


def test_others_are_handed_on_with_it():
    tree, other = {"a": 1, "b": [2]}, {"a": (3, 4), "b": [5]}
    assert _optree.map_stored(lambda at, x: (at.node, x), tree, other) == {"a": (1, (3, 4)), "b": [(2, 5)]}
    with pytest.raises(ValueError, match="the trees differ in structure: list against int"):
        _optree.map_stored(lambda at, x: x, tree, {"a": 3, "b": 5})
    with pytest.raises(ValueError, match="the trees differ in structure: dict against dict"):
        _optree.map_stored(lambda at, x: x, tree, {"a": 3})
