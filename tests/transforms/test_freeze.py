"""optax's values for groups and frozen leaves; what is frozen stays and holds nothing."""

from typing import Any

import pytest
import torch
from groups import LABELS, STEPS, make_grads, make_params, run_both
from helpers import leaves, run_pure, same

import functional_lowbit as fl


def small(numbers: Any) -> dict[str, Any]:
    embed, w, b, norm = numbers
    as_tensor = torch.tensor
    return {"embed": as_tensor(embed), "layer": {"w": as_tensor(w), "b": as_tensor(b)}, "norm": as_tensor(norm)}


MASK = {"embed": True, "layer": {"w": False, "b": True}, "norm": False}
# optax 0.2.8: `tx = make(optax)` on the same trees of jnp arrays; three times
# `updates, state = tx.update(grads, state, params)` and `params = optax.apply_updates(params, updates)`;
# then `[round(float(x), 7) for x in leaf]` of each leaf.
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
