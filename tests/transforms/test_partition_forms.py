"""What labels may look like, and the trees that they are for."""

from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
from groups import LABELS, PATHS, STEPS, by_path, make_grads, make_params, run_both, transforms
from helpers import run_pure, same
from torch import Tensor

import functional_lowbit as fl


class Layer(NamedTuple):
    w: Any
    b: Any


class Labeller:
    """A function in a class's clothes."""

    def __call__(self, path: str, leaf: Tensor, *, unused: int = 0) -> str:
        return by_path(path, leaf)


def of_params(params: Any, unused: int = 0) -> Any:
    return {
        "embed": "embed",
        "layer": fl.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params["layer"]),
        "norm": "rest",
    }


@pytest.mark.parametrize(
    "labels",
    [
        by_path,
        Labeller(),
        of_params,
        lambda params: LABELS,
        OrderedDict(norm="rest", layer=OrderedDict(w="matrix", b="rest"), embed="embed"),
    ],
    ids=["path", "object", "params", "constant", "another kind of dict"],
)
def test_forms_of_labels(labels):
    params = make_params()
    grads = make_grads(params)
    wanted = run_pure(fl.partition(transforms(), LABELS), params, grads)
    assert same(run_both(fl.multi_transform(transforms(), labels), params, grads), wanted)
    tx = fl.partition({label: fl.adam(0.1) for label in PATHS}, labels)
    assert same(tx.update(grads[0], tx.init(params)), tx.update(grads[0], tx.init(params), params))


def test_a_prefix_an_unused_label_and_an_empty_group():
    params = make_params()
    grads = make_grads(params)
    used = {"matrix": fl.adam8bit(0.1), "rest": fl.sgd(0.1)}
    wanted = run_both(
        fl.partition(used, {"embed": "rest", "layer": {"w": "matrix", "b": "matrix"}, "norm": "rest"}), params, grads
    )
    unused = {
        **used,
        "none": fl.low_bit(fl.chain(fl.clip_by_global_norm(1.0), fl.adam(1.0)), where=lambda path, leaf: True),
    }
    new, state = run_both(fl.partition(unused, {"embed": "rest", "layer": "matrix", "norm": "rest"}), params, grads)
    assert same(new, wanted[0])
    assert state.inner_states["none"].inner_state[1][0].step == STEPS


@pytest.mark.parametrize(
    "labels", [Layer("a", "b"), lambda params: Layer("a", "b"), lambda path, leaf: "ab"["b" in path]]
)
def test_a_namedtuple(labels):
    params = Layer(torch.ones(3), [torch.ones(2), None])
    new, _ = run_both(fl.partition({"a": fl.sgd(1.0), "b": fl.sgd(0.5)}, labels), params, [params])
    assert same(new, Layer(torch.zeros(3), [torch.full((2,), 0.5), None]))


@pytest.mark.parametrize("labels", [["a", "b"], lambda path, leaf: "ab"[int(path)]])
def test_a_list(labels):
    params = [torch.ones(3), torch.ones(2)]
    new, _ = run_both(fl.partition({"a": fl.sgd(1.0), "b": fl.sgd(0.5)}, labels), params, [params])
    assert same(new, [torch.zeros(3), torch.full((2,), 0.5)])


@pytest.mark.parametrize("labels", ["b", lambda params: "b", lambda path, leaf: "b" if path == "" else "a"])
def test_a_bare_tensor(labels):
    params = torch.ones(3)
    new, _ = run_both(fl.partition({"a": fl.sgd(1.0), "b": fl.adam(0.5)}, labels), params, [params])
    assert same(new, run_pure(fl.adam(0.5), params, [params])[0])


@pytest.mark.parametrize("params", [{}, (), {"a": {}, "b": [None]}])
def test_no_leaves(params):
    tx = fl.partition({"a": fl.chain(fl.clip_by_global_norm(1.0), fl.adam(1.0))}, lambda path, leaf: "a")
    new, state = run_both(tx, params, [params])
    assert new == params
    assert state.inner_states["a"].inner_state[1][0].step == 1


def test_labels_of_any_hashable_kind():
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    rules = {("in", 1): fl.sgd(0.5), 7: fl.sgd(1.0)}
    new, state = run_both(fl.partition(rules, lambda path, leaf: ("in", 1) if path == "w" else 7), params, [params])
    assert same(new, {"w": torch.full((2,), 0.5), "b": torch.zeros(2)})
    assert list(state.inner_states) == [("in", 1), 7]


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Module:
    """A module that is a tree, and can be called."""

    w: Any
    b: Any

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


def test_a_tree_that_can_be_called_is_a_tree():
    params = Module(torch.ones(2), torch.ones(3))
    tx = fl.partition({"a": fl.sgd(1.0), "b": fl.sgd(0.5)}, Module("a", "b"))
    stepped, _ = fl.compile(tx, backend="eager", donate=False)(params, tx.init(params), params)
    for new in (run_pure(tx, params, [params])[0], stepped):
        assert same([new.w, new.b], [torch.zeros(2), torch.full((3,), 0.5)])
    updates, _ = fl.scale(2.0).update(params, fl.EmptyState())
    masked, _ = fl.masked(fl.scale(2.0), Module(True, False)).update(params, fl.MaskedState(fl.EmptyState()))
    assert same([masked.w, masked.b], [updates.w, params.b])
