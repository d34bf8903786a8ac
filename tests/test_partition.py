"""Groups of parameters: each behaves as if it were alone, whatever is inside, outside or beside it."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import averaged, clone, leaves, random_like, refuses, run_pure, run_step, same
from torch import Tensor, nn

import functional_lowbit as fl

LABELS = {"embed": "embed", "layer": {"w": "matrix", "b": "rest"}, "norm": "rest"}
PATHS = {"embed": ["embed"], "matrix": ["layer.w"], "rest": ["layer.b", "norm"]}
STEPS = 3


def by_path(path: str, leaf: Tensor) -> str:
    return "embed" if path == "embed" else "matrix" if leaf.ndim > 1 else "rest"


def make_params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    shapes = {
        "embed": torch.empty(70, 64),
        "layer": {"w": torch.empty(64, 65), "b": torch.empty(65)},
        "norm": torch.empty(64),
    }
    return random_like(shapes, seed=0, dtype=dtype)


def make_grads(params: Any) -> list[Any]:
    return [random_like(params, seed=1 + t) for t in range(STEPS)]


def transforms() -> dict[str, fl.GradientTransformation]:
    """Another optimizer, format and learning rate for each group, with a norm inside two of them."""
    return {
        "embed": fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(1e-2)),
        "matrix": fl.chain(fl.clip_by_global_norm(2.0), fl.adamw4bit(fl.schedules.linear_schedule(0.1, 0.0, 5))),
        "rest": fl.sgd(0.1, 0.9),
    }


def flat(tree: Any) -> dict[str, Any]:
    return {"embed": tree["embed"], "layer.w": tree["layer"]["w"], "layer.b": tree["layer"]["b"], "norm": tree["norm"]}


def run_each(tx: fl.GradientTransformation, params: Any, grads: list[Any]) -> list[Any]:
    """(params, state) of the pure update, and of the step: the first rounds updates to the gradients' dtype."""
    step = fl.compile(tx, backend="eager", donate=False)
    return [run_pure(tx, params, grads), run_step(step, params, grads, tx.init(params))]


def run_both(tx: fl.GradientTransformation, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Params and state of the pure update, to which the step's are bit-equal in float32."""
    pure, stepped = run_each(tx, params, grads)
    assert same(stepped, pure)
    return pure


# Values ---------------------------------------------------------------------------------------------------------------


def small(numbers: Any) -> dict[str, Any]:
    embed, w, b, norm = numbers
    as_tensor = torch.tensor
    return {"embed": as_tensor(embed), "layer": {"w": as_tensor(w), "b": as_tensor(b)}, "norm": as_tensor(norm)}


MASK = {"embed": True, "layer": {"w": False, "b": True}, "norm": False}
# optax 0.2.8: `make(optax)` on the same trees of jnp arrays, three times `updates, state = tx.update(grads, state, params)`
# and `params = optax.apply_updates(params, updates)`, then `[round(float(x), 7) for x in leaf]` of each leaf.
GOLDEN = {
    "partition": (
        lambda o: o.partition(
            {
                "embed": o.chain(o.clip_by_global_norm(1.0), o.sgd(0.1, 0.9)),
                "matrix": o.chain(o.clip_by_global_norm(2.0), o.adamw(0.05, weight_decay=0.1)),
                "rest": o.lion(0.02),
                "frozen": o.set_to_zero(),
            },
            {**LABELS, "norm": "frozen"},
        ),
        ([0.4527271, -0.4413874], [0.8431397, -1.8901647, 2.8132896], [0.3099838], [-0.75]),
    ),
    "freeze": (
        lambda o: o.chain(o.adam(0.1), o.freeze(MASK)),
        ([0.5, -1.0], [0.7000021, -1.84273, 2.700002], [0.25], [-0.9820215]),
    ),
    "selective_transform": (
        lambda o: o.selective_transform(o.chain(o.clip_by_global_norm(1.0), o.adam(0.1)), freeze_mask=MASK),
        ([0.5, -1.0], [0.711619, -1.8396618, 2.7116189], [0.25], [-0.9860851]),
    ),
    "named_chain": (
        lambda o: o.named_chain(
            ("clip", o.clip_by_global_norm(1.0)), ("momentum", o.trace(0.9, nesterov=True)), ("lr", o.scale(-0.1))
        ),
        ([0.4748686, -0.6831733], [0.5247599, -1.6283975, 2.9207933], [0.297524], [-0.8947194]),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    make, numbers = GOLDEN[name]
    params = small(([0.5, -1.0], [1.0, -2.0, 3.0], [0.25], [-0.75]))
    grads = [small(([0.1 * (t + 1), -2.0], [3.0, -4.0 * t, 0.5], [-0.3], [1.5 - t])) for t in range(STEPS)]
    got, _ = run_both(make(fl), params, grads)
    for x, y in zip(leaves(got), leaves(small(numbers)), strict=True):
        # optax's bias corrections in float32 move an Adam step by 7e-6 of itself; the rest is 3 roundings below 4.
        assert torch.allclose(x, y, rtol=0, atol=STEPS * (7e-6 * 0.1 + 2.4e-7))


# A group by itself ----------------------------------------------------------------------------------------------------


def only(label: str, tree: Any) -> dict[str, Any]:
    """The leaves of a label."""
    return {path: flat(tree)[path] for path in PATHS[label]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_bits_that_it_has_alone(dtype):
    """A clip inside it takes the norm of its own leaves."""
    params = make_params(dtype)
    grads = make_grads(params)
    together = run_each(fl.partition(transforms(), LABELS), params, grads)
    for label, tx in transforms().items():
        alone = run_each(tx, only(label, params), [only(label, g) for g in grads])
        for (new, state), (own, own_state) in zip(together, alone, strict=True):
            assert same(only(label, new), own)
            assert same(leaves(state.inner_states[label].inner_state), leaves(own_state))


def test_compiled_natively_and_once():
    tx, params = fl.partition(transforms(), by_path), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    step, state = fl.compile(tx), tx.init(params)
    places = [x.data_ptr() for x in leaves((params, state))]
    new = step(grads[0], state, params)
    graphs = step.graphs
    new = run_step(step, new[0], grads[1:], new[1])
    assert same(new, wanted)
    assert step.graphs == graphs
    assert [x.data_ptr() for x in leaves(new)] == places


def test_nothing_is_stored_for_the_leaves_of_others():
    params = make_params()
    state = fl.partition(transforms(), LABELS).init(params)
    assert isinstance(state, fl.PartitionState)
    assert list(state.inner_states) == ["embed", "matrix", "rest"]
    rows = {row.path: row for row in fl.describe(state).rows}
    moments = {path: row.format for path, row in rows.items() if row.shape}
    assert moments == {
        "inner_states.embed.inner_state.1.0.mu.embed": "companded8",
        "inner_states.embed.inner_state.1.0.nu.embed": "companded8",
        "inner_states.matrix.inner_state.1.0.mu.layer.w": "root4",
        "inner_states.matrix.inner_state.1.0.nu.layer.w": "root4",
        "inner_states.rest.inner_state.0.trace.layer.b": "float32",
        "inner_states.rest.inner_state.0.trace.norm": "float32",
    }
    alone = [fl.describe(tx.init(only(label, params))).total_bytes for label, tx in transforms().items()]
    assert fl.describe(state).total_bytes == sum(alone)


def test_meta_tensors():
    params = fl.tree.map(lambda x: x.to("meta"), make_params())
    state = fl.partition(transforms(), by_path).init(params)
    assert (
        fl.describe(state).total_bytes
        == fl.describe(fl.partition(transforms(), by_path).init(make_params())).total_bytes
    )


# Forms of labels and of trees -----------------------------------------------------------------------------------------


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


# What is around, inside and beside ------------------------------------------------------------------------------------


def recipes() -> dict[str, fl.GradientTransformation]:
    return {"embed": fl.adamw(1e-2), "matrix": fl.lion(1e-2), "rest": fl.sgd(0.1, 0.9)}


@pytest.mark.parametrize("format", ["companded8", "root4"])
def test_low_bit_outside_is_low_bit_inside(format):
    params = make_params()
    grads = make_grads(params)
    wanted = run_both(fl.partition({k: fl.low_bit(tx, format) for k, tx in recipes().items()}, LABELS), params, grads)
    assert same(run_both(fl.low_bit(fl.partition(recipes(), LABELS), format), params, grads), wanted)


def test_low_bit_outside_with_where_and_formats_by_field():
    params = make_params()
    grads = make_grads(params)
    tx = fl.partition(recipes(), by_path)
    where = fl.low_bit(tx, where=lambda path, leaf: "root4" if path == "layer.w" else path == "embed")
    _, state = run_both(where, params, grads)
    assert _formats(state) == {
        "inner_states.embed.inner_state.0.mu.embed": "companded8",
        "inner_states.embed.inner_state.0.nu.embed": "companded8",
        "inner_states.matrix.inner_state.0.mu.layer.w": "root4",
    }
    _, state = run_both(fl.low_bit(tx, {"mu": "e4m3"}), params, grads)
    assert _formats(state) == {
        "inner_states.embed.inner_state.0.mu.embed": "e4m3",
        "inner_states.matrix.inner_state.0.mu.layer.w": "e4m3",
    }


def _formats(state: Any) -> dict[str, str]:
    formats = fl.formats.names()
    return {
        row.path: row.format for row in fl.describe(state).rows if row.format in formats and row.format != "float32"
    }


def test_partitions_inside_each_other():
    params = make_params()
    grads = make_grads(params)
    wanted, wanted_state = run_both(fl.partition(transforms(), LABELS), params, grads)
    rest = {"embed": transforms()["embed"], "rest": transforms()["rest"]}
    inner = fl.partition(rest, {"embed": "embed", "layer": "rest", "norm": "rest"})
    outer = {"matrix": transforms()["matrix"], "others": inner}
    for inside in ("others", lambda path, leaf: "matrix" if path == "layer.w" else "others"):
        labels = (
            inside if callable(inside) else {"embed": inside, "layer": {"w": "matrix", "b": inside}, "norm": inside}
        )
        new, state = run_both(fl.partition(outer, labels), params, grads)
        assert same(new, wanted)
        nested = state.inner_states["others"].inner_state.inner_states
        assert same(nested["embed"], wanted_state.inner_states["embed"])


def test_the_same_transformation_for_all_is_that_transformation():
    """Whatever the step does besides: master weights, noise by path, a gate around it, a chain in front of it."""
    params = make_params(torch.bfloat16)
    grads = make_grads(params)
    wraps = [
        lambda tx: fl.master_weights(tx, bits=8),
        lambda tx: fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(1.0), tx)),
        lambda tx: fl.named_chain(("clip", fl.clip(0.5)), ("inner", tx)),
        lambda tx: fl.masked(tx, lambda path, leaf: "layer" in path),
    ]
    for wrap in wraps:
        groups = fl.partition({label: fl.adamw8bit(1e-2) for label in PATHS}, by_path)
        wanted = run_each(wrap(fl.adamw8bit(1e-2)), params, grads)
        for (new, _), (own, _) in zip(run_each(wrap(groups), params, grads), wanted, strict=True):
            assert same(new, own)
    options = {"backend": "eager", "donate": False, "rounding": "stochastic", "key": 3}
    plain, groups = (fl.compile(tx, **options) for tx in (fl.adamw8bit(1e-2), groups))
    wanted = run_step(plain, params, grads, fl.adamw8bit(1e-2).init(params))
    state = fl.partition({label: fl.adamw8bit(1e-2) for label in PATHS}, by_path).init(params)
    assert same(run_step(groups, params, grads, state)[0], wanted[0])


def test_a_users_pair_a_rule_of_whole_leaves_and_a_gate_inside():
    params = make_params()
    grads = make_grads(params)
    grads[1]["layer"]["w"][3, 4] = torch.nan
    inside = {
        "embed": fl.chain(averaged(), fl.sgd(0.1)),
        "matrix": fl.apply_if_finite(fl.adamw8bit(1e-2)),
        "rest": fl.chain(fl.scale_by_trust_ratio(), fl.scale(-0.1)),
    }
    for tx in (fl.partition(inside, LABELS), fl.low_bit(fl.partition(inside, LABELS))):
        new, state = run_both(tx, params, grads)
        assert all(x.isfinite().all() for x in leaves(new))
        gate = state.inner_states["matrix"].inner_state
        assert (gate.total_notfinite, gate.inner_state[0].step) == (1, STEPS - 1)
        wanted = run_pure(inside["matrix"], only("matrix", params), [only("matrix", g) for g in grads])
        assert same(only("matrix", new), wanted[0])


def test_a_gradient_of_none():
    params = make_params()
    grads = [{**g, "norm": None, "layer": {**g["layer"], "w": None}} for g in make_grads(params)]
    tx = fl.partition(transforms(), by_path)
    new, state = run_both(tx, params, grads)
    start = tx.init(params)
    for path in ("norm", "layer.w"):
        assert torch.equal(flat(new)[path], flat(params)[path])
    assert same(
        state.inner_states["rest"].inner_state[0].trace["norm"], start.inner_states["rest"].inner_state[0].trace["norm"]
    )
    assert state.inner_states["matrix"].inner_state[1][0].step == STEPS
    assert not torch.equal(new["embed"], params["embed"])


def test_extra_arguments_reach_the_groups_that_take_them():
    seen: dict[str, Any] = {}

    def takes(label: str) -> fl.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None, *, value: Any = None, tags: Any = None) -> Any:
            seen[label] = value, tags
            return updates, state

        return fl.GradientTransformation(lambda params: (), update)

    params = {"w": torch.ones(2), "b": torch.ones(3)}
    tags = {"w": "w's", "b": "b's"}
    rules = {"a": takes("a"), "b": fl.chain(takes("b"), fl.sgd(0.1))}
    for narrows in (False, True):
        tx = fl.partition(rules, {"w": "a", "b": "b"}, mask_compatible_extra_args=narrows)
        for step in (tx.update, fl.compile(tx, backend="eager", donate=False)):
            seen.clear()
            step(params, tx.init(params), params, value=1.5, tags=tags)
            hidden = fl.MaskedNode()
            wanted = ({"w": "w's", "b": hidden}, {"w": hidden, "b": "b's"}) if narrows else (tags, tags)
            assert seen == {"a": (1.5, wanted[0]), "b": (1.5, wanted[1])}
    tx = fl.masked(takes("m"), {"w": False, "b": True}, mask_compatible_extra_args=True)
    tx.update(params, tx.init(params), value=[1, 2], tags=tags)
    assert seen["m"] == ([1, 2], {"w": hidden, "b": "b's"})


# Frozen parameters ----------------------------------------------------------------------------------------------------


def test_set_to_zero_makes_zeros_of_anything():
    params = {"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}
    grads = {"w": torch.tensor([5.0, torch.nan, torch.inf, -torch.inf])}
    new, _ = run_both(fl.set_to_zero(), params, [grads])
    assert same(new, params)
    updates, _ = fl.set_to_zero().update({"w": grads["w"].bfloat16()}, fl.EmptyState())
    assert same(updates, {"w": torch.zeros(4, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    "mask",
    [
        {"embed": True, "layer": True, "norm": False},
        lambda params: {"embed": True, "layer": True, "norm": False},
        lambda path, leaf: path != "norm",
    ],
    ids=["prefix", "params", "path"],
)
def test_frozen_leaves_stay_and_hold_nothing(mask):
    params = make_params()
    grads = make_grads(params)
    grads[1]["embed"][0, 0] = torch.nan
    new, state = run_both(fl.selective_transform(fl.adamw8bit(0.1, weight_decay=0.5), freeze_mask=mask), params, grads)
    assert same({**new, "norm": params["norm"]}, params)
    own = {"norm": params["norm"]}
    alone, alone_state = run_pure(fl.adamw8bit(0.1, weight_decay=0.5), own, [{"norm": g["norm"]} for g in grads])
    assert same(new["norm"], alone["norm"])
    assert fl.describe(state).total_bytes == fl.describe(alone_state).total_bytes
    frozen, state = run_both(fl.chain(fl.adamw(0.1, weight_decay=0.5), fl.freeze(mask)), params, grads)
    assert same(frozen, new)
    assert fl.describe(state).total_bytes > fl.describe(alone_state).total_bytes


@pytest.mark.parametrize("is_frozen", [True, False])
def test_one_bool_for_all(is_frozen):
    params = make_params()
    grads = make_grads(params)
    wanted = params if is_frozen else run_pure(fl.adam(0.1), params, grads)[0]
    assert same(run_both(fl.selective_transform(fl.adam(0.1), freeze_mask=is_frozen), params, grads)[0], wanted)
    assert same(run_both(fl.chain(fl.adam(0.1), fl.freeze(is_frozen)), params, grads)[0], wanted)


def test_a_mask_of_path_and_leaf_decides_what_decays():
    params = make_params()
    grads = make_grads(params)
    tree = {"embed": False, "layer": {"w": True, "b": False}, "norm": False}
    wanted = run_both(fl.adamw(0.1, weight_decay=0.5, mask=tree), params, grads)
    assert same(
        run_both(
            fl.adamw(0.1, weight_decay=0.5, mask=lambda path, leaf: leaf.ndim > 1 and path != "embed"), params, grads
        ),
        wanted,
    )


# State ----------------------------------------------------------------------------------------------------------------

STATES = {
    "partition": lambda: fl.partition(transforms(), by_path),
    "partition in few bits": lambda: fl.low_bit(fl.partition(recipes(), by_path), "root4"),
    "named_chain": lambda: fl.named_chain(("clip", fl.clip(1.0)), ("adam", fl.scale_by_adam()), ("lr", fl.scale(-0.1))),
}


@pytest.mark.parametrize("name", STATES)
def test_state_through_a_dict_and_through_files(name, tmp_path: Path):
    tx, params = STATES[name](), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    params, state = run_pure(tx, params, grads[:1])
    saved = clone(fl.state_dict(state))
    fl.checkpoint.save(tmp_path / "saved", state)
    for loaded in (fl.load_state_dict(tx.init(params), saved), fl.checkpoint.load(tmp_path / "saved", tx.init(params))):
        assert same(loaded, state)
        assert same(run_pure(tx, params, grads[1:], loaded), wanted)


def test_a_named_state():
    tx = STATES["named_chain"]()
    state = tx.init(make_params())
    assert list(state) == ["clip", "adam", "lr"]
    assert state["adam"].step == 0
    assert [row.path for row in fl.describe(state).rows][:2] == ["adam.step", "adam.mu.embed"]
    assert fl.named_chain().init(make_params()) == {}


@pytest.mark.parametrize("labels", ["of their own", "the parameters' names", "names, crossed"])
def test_as_a_torch_optimizer(labels):
    model = nn.Linear(64, 65)
    names = {"of their own": "ab", "the parameters' names": ("weight", "bias"), "names, crossed": ("bias", "weight")}
    matrix, vector = names[labels]
    tx = fl.partition(
        {matrix: fl.adamw8bit(1e-2), vector: fl.sgd(0.1, 0.9)},
        lambda path, leaf: matrix if path == "weight" else vector,
    )
    params = clone(dict(model.named_parameters()))
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    for g in grads[:2]:
        model.weight.grad, model.bias.grad = g["weight"], g["bias"]
        optimizer.step()
    path = "inner_states.{}.inner_state.0.{}".format
    shared = {path(matrix, "step"), path(vector, "step"), "schema"}
    own = {path(matrix, f"{m}.{part}") for m in ("mu", "nu") for part in ("codes", "scales")}
    assert set(optimizer.state[model.weight]) == own | shared
    assert set(optimizer.state[model.bias]) == {path(vector, "trace")} | shared
    again = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    again.load_state_dict(optimizer.state_dict())
    model.weight.grad, model.bias.grad = grads[2]["weight"], grads[2]["bias"]
    again.step()
    assert same(dict(model.named_parameters()), wanted[0])


# What is refused ------------------------------------------------------------------------------------------------------


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
