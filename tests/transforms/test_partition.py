"""Groups of parameters: each behaves as if it were alone, whatever is inside, outside or beside it."""

from typing import Any

import pytest
import torch
from groups import (
    LABELS,
    PATHS,
    STEPS,
    by_path,
    flat,
    make_grads,
    make_params,
    only,
    recipes,
    run_both,
    run_each,
    transforms,
)
from helpers import averaged, leaves, run_pure, run_step, same

import functional_lowbit as fl


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
