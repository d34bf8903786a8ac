"""Wrong labels, masks, names and states are refused, in these words, before anything is written."""

import pytest
import torch
from helpers import clone, refuses, same

import functional_lowbit as fl


def two() -> dict[str, fl.GradientTransformation]:
    return {"a": fl.sgd(0.1), "b": fl.adam(0.1)}


MADE = "it was made for another transformation"
BEGIN = "must begin like params, but in params"
ARGUMENTS = [
    (
        lambda: fl.partition([fl.sgd(0.1)], "a"),
        TypeError,
        "partition: transforms must be a dict from label to transformation, got list",
    ),
    (
        lambda: fl.partition({"a": fl.adam}, "a"),
        TypeError,
        "partition: transforms['a'] must be a GradientTransformation, got function; call it: adam(...)",
    ),
    (
        lambda: fl.partition(two(), lambda: "a"),
        TypeError,
        "partition: param_labels must be a function of params, or of (path, leaf), got one of ()",
    ),
    (
        lambda: fl.masked(fl.sgd(0.1), lambda path, leaf, step: True),
        TypeError,
        "masked: mask must be a function of params, or of (path, leaf), got one of (path, leaf, step)",
    ),
    (
        lambda: fl.selective_transform(fl.adam, freeze_mask=True),
        TypeError,
        "selective_transform: optimizer must be a GradientTransformation, got function; call it: adam(...)",
    ),
    (
        lambda: fl.named_chain(fl.sgd(0.1)),
        TypeError,
        "named_chain: argument 0 must be a pair (name, transformation), got GradientTransformation",
    ),
    (
        lambda: fl.named_chain(("a", fl.sgd(0.1)), "b"),
        TypeError,
        "named_chain: argument 1 must be a pair (name, transformation), got str",
    ),
    (
        lambda: fl.named_chain((1, fl.sgd(0.1))),
        TypeError,
        "named_chain: the name of argument 0 must be a string, got int",
    ),
    (
        lambda: fl.named_chain(("a", 3)),
        TypeError,
        "named_chain: 'a' must be a GradientTransformation, got int",
    ),
    (
        lambda: fl.named_chain(("a", fl.sgd(0.1)), ("a", fl.sgd(0.1))),
        ValueError,
        "named_chain: names must differ, got 'a' twice",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), ARGUMENTS, ids=[message[:60] for *_, message in ARGUMENTS])
def test_a_wrong_argument(call, kind, message):
    refuses(kind, message, call)


LEAVES = [
    (
        lambda: fl.partition(two(), {"w": "a", "b": "c"}),
        ValueError,
        "partition: param_labels at 'b' must be a label of transforms ('a', 'b'), got 'c'",
    ),
    (
        lambda: fl.partition(two(), lambda path, leaf: {"w": "a"}.get(path)),
        ValueError,
        "partition: param_labels('b', leaf) must be a label of transforms ('a', 'b'), got None",
    ),
    (lambda: fl.partition(two(), {"w": "a"}), ValueError, f"partition: param_labels {BEGIN} 'b' is unexpected"),
    (
        lambda: fl.partition(two(), {"w": "a", "b": "a", "c": "a"}),
        ValueError,
        f"partition: param_labels {BEGIN} 'c' is missing",
    ),
    (
        lambda: fl.partition(two(), lambda params: {"w": "a", "b": None}),
        ValueError,
        f"partition: param_labels {BEGIN} None was expected at 'b', got Tensor",
    ),
    (
        lambda: fl.partition(two(), lambda path, leaf: ["a"]),
        TypeError,
        "partition: param_labels('b', leaf) must be hashable, got ['a']",
    ),
    (
        lambda: fl.partition(two(), {"w": "a", "b": {"a"}}),
        TypeError,
        "partition: param_labels at 'b' must be hashable, got {'a'}",
    ),
    (
        lambda: fl.selective_transform(fl.sgd(0.1), freeze_mask={"w": True}),
        ValueError,
        f"selective_transform: freeze_mask {BEGIN} 'b' is unexpected",
    ),
    (
        lambda: fl.selective_transform(fl.sgd(0.1), freeze_mask=lambda path, leaf: 1),
        TypeError,
        "selective_transform: freeze_mask('b', leaf) must be a bool, got int",
    ),
    (lambda: fl.freeze(1), TypeError, "masked: mask at 'b' must be a bool, got int"),
]


@pytest.mark.parametrize(("make", "kind", "message"), LEAVES, ids=[message[:70] for *_, message in LEAVES])
def test_wrong_labels_and_masks(make, kind, message):
    """At init, at update and at a step; nothing has been written then."""
    tx = make()
    params = {"w": torch.ones(2), "b": torch.ones(3)}
    good = fl.partition(two(), "a").init(params)
    refuses(kind, message, lambda: tx.init(params))
    state = fl.MaskedState(fl.EmptyState()) if "masked" in message else good
    if "selective" in message:
        state = fl.selective_transform(fl.sgd(0.1), freeze_mask=True).init(params)
    refuses(kind, message, lambda: tx.update(params, state, params))
    before = clone((params, state))
    refuses(kind, message, lambda: fl.compile(tx, backend="eager")(params, state, params))
    assert same((params, state), before)


CONTAINERS = [
    (
        lambda: fl.partition(two(), "a"),
        lambda params: (),
        [f"partition.update: the state must be a PartitionState, got tuple; {MADE}"],
    ),
    (
        lambda: fl.partition(two(), "a"),
        lambda params: fl.partition({"a": fl.sgd(0.1), "c": fl.sgd(0.1)}, "a").init(params),
        [f"partition.update: the state must have the labels of transforms ('a', 'b'), got 'a', 'c'; {MADE}"],
    ),
    (
        lambda: fl.named_chain(("x", fl.clip(1.0)), ("y", fl.clip(1.0))),
        lambda params: (1, 2),
        [f"named_chain.update: the state must be a dict of x, y, got tuple; {MADE}"],
    ),
    (
        lambda: fl.named_chain(("x", fl.clip(1.0)), ("y", fl.clip(1.0))),
        lambda params: {"x": 1, "z": 2},
        [f"named_chain.update: the state must be a dict of x, y, got one of x, z; {MADE}"],
    ),
    (
        lambda: fl.partition(two(), {"w": "a", "b": "b"}),
        lambda params: fl.partition(two(), {"w": "b", "b": "a"}).init(params),
        [
            "scale_by_adam.update: state.mu must have the structure of the parameters, but a MaskedNode was expected "
            "at 'w', got Tensor; if the model changed, make a new state with init(params)",
            "compile(tx): state.mu['b'] must be a moment, got MaskedNode; the state was made for other parameters or "
            "with another mask",
        ],
    ),
]


@pytest.mark.parametrize(("make", "make_state", "message"), CONTAINERS)
def test_the_state_of_something_else(make, make_state, message):
    tx, params = make(), {"w": torch.ones(2), "b": torch.ones(3)}
    state = make_state(params)
    refuses(ValueError, message[0], lambda: tx.update(params, state, params))
    refuses(ValueError, message[-1], lambda: fl.compile(tx, backend="eager")(params, state, params))
