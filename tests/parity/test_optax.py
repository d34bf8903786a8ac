"""Same names, same arguments, same defaults, same numbers as optax 0.2.8.

Each case is one function of a library: called with `functional_lowbit` and with `optax`, it makes the two
transformations that are compared, so a case that runs at all proves that names and arguments agree.

float32: what is measured is the largest absolute difference of any parameter after any of 20 steps. optax computes bias
corrections in float32, where 1 - 0.999 is off by 1.3e-5 of itself; the root of that moves each Adam step by 7e-6 lr, 20
steps by 1.3e-6. The order of float32 operations adds at most 20 roundings of parameters below 4 on either side (2.4e-7
each): 1e-5. The bound of 2e-5 is twice the sum of both. Measured: 2.5e-6 at most (adamw_decay_schedule), 7.2e-7 without
Adam; against optax in float64 everything is below 1e-6, so most of the difference is optax's rounding.

bfloat16: optax keeps the moments in bfloat16 too, we in float32, so the two walk apart by design. Steps are therefore
compared one by one, both from our parameters (moments run on). They may differ by the rounding of the new parameter,
one bfloat16 ulp, and by 4% of the leaf's largest step so far: a bfloat16 momentum of decay 0.9 collects up to 10
roundings of 2**-9, a second moment 20 of half that weight. Where a sign is taken (Lion), a rounding of the momentum can
turn it: then the step differs by 2 lr. Measured: 1.2 of 1000 elements at most; the bound is 3.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import functional_lowbit as fl

STEPS = 20


LR = 1e-2


SHAPES = {"layer": {"w": (33, 64), "b": (64,)}, "conv": (7, 5, 3), "gain": ()}


MASK = {"layer": {"w": True, "b": False}, "conv": True, "gain": False}


def matrices(params: Any) -> Any:
    """A mask as a function of params, in the words of both libraries."""
    return {
        "layer": {name: x.ndim > 1 for name, x in params["layer"].items()},
        "conv": params["conv"].ndim > 1,
        "gain": params["gain"].ndim > 1,
    }


LABELS = {"layer": {"w": "clipped", "b": "plain"}, "conv": "clipped", "gain": "frozen"}


MASK_LABELS = {"layer": "a", "conv": "b", "gain": "a"}


def groups(o: Any) -> dict[str, Any]:
    """Three groups; the norm in one is that of its own leaves."""
    return {
        "clipped": o.chain(o.clip_by_global_norm(1.0), o.adamw(LR, weight_decay=0.1)),
        "plain": o.sgd(LR, momentum=0.9),
        "frozen": o.set_to_zero(),
    }


def warmup(o: Any) -> Any:
    return o.schedules.warmup_cosine_decay_schedule(0.0, LR, 5, 15, 1e-3)


def float32_of(o: Any) -> dict[str, Any]:
    """What ours does by default, and optax by request."""
    return {"hyperparam_dtype": jnp.float32} if o is optax else {}


def multi_steps(o: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """optax's is a class."""
    return (
        o.MultiSteps(tx, *args, **kwargs).gradient_transformation()
        if o is optax
        else fl.multi_steps(tx, *args, **kwargs)
    )


CASES: dict[str, Callable[[Any], Any]] = {
    **{name: case.optax for name, case in cases.CASES.items() if case.optax},
    "adam_betas": lambda o: o.adam(LR, b1=0.8, b2=0.95, eps=1e-6),
    "adam_eps_root": lambda o: o.adam(LR, eps=1e-8, eps_root=1e-6),
    "adam_nesterov": lambda o: o.adam(LR, nesterov=True),
    "adam_schedule": lambda o: o.adam(warmup(o)),
    "adamw": lambda o: o.adamw(LR),
    "adamw_decay": lambda o: o.adamw(LR, weight_decay=0.1),
    "adamw_mask_tree": lambda o: o.adamw(LR, weight_decay=0.5, mask=MASK),
    "adamw_mask_function": lambda o: o.adamw(LR, weight_decay=0.5, mask=matrices),
    "adamw_eps_root": lambda o: o.adamw(LR, eps_root=1e-6, weight_decay=0.1),
    "adamw_nesterov": lambda o: o.adamw(LR, weight_decay=0.1, nesterov=True),
    "adamw_schedule": lambda o: o.adamw(warmup(o), weight_decay=0.1),
    "adamw_decay_schedule": lambda o: o.adamw(LR, weight_decay=o.schedules.linear_schedule(0.5, 0.0, 15)),
    "sgd_momentum": lambda o: o.sgd(LR, momentum=0.9),
    "sgd_nesterov": lambda o: o.sgd(LR, momentum=0.9, nesterov=True),
    "lion_mask": lambda o: o.lion(LR, b1=0.95, b2=0.98, weight_decay=0.1, mask=MASK),
    "trace": lambda o: o.chain(o.trace(0.9), o.scale(-LR)),
    "trace_nesterov": lambda o: o.chain(o.trace(0.8, nesterov=True), o.scale(-LR)),
    "clip": lambda o: o.chain(o.clip(0.1), o.scale(-LR)),
    "clip_by_global_norm": lambda o: o.chain(o.clip_by_global_norm(1.0), o.scale(-LR)),
    "clip_by_global_norm_loose": lambda o: o.chain(o.clip_by_global_norm(1e4), o.scale(-LR)),
    "add_decayed_weights": lambda o: o.chain(o.add_decayed_weights(0.5), o.scale(-LR)),
    "add_decayed_weights_mask": lambda o: o.chain(o.add_decayed_weights(0.5, MASK), o.scale(-LR)),
    "scale_by_schedule": lambda o: o.chain(o.scale_by_schedule(warmup(o)), o.scale(-1.0)),
    "scale_by_learning_rate": lambda o: o.chain(o.identity(), o.scale_by_learning_rate(warmup(o))),
    "scale_by_learning_rate_up": lambda o: o.scale_by_learning_rate(LR, flip_sign=False),
    "masked": lambda o: o.chain(o.masked(o.scale_by_adam(), MASK), o.scale(-LR)),
    "masked_function": lambda o: o.chain(o.masked(o.trace(0.9), matrices), o.scale(-LR)),
    "chain": lambda o: o.chain(o.clip_by_global_norm(1.0), o.adamw(warmup(o), weight_decay=0.1, mask=matrices)),
    "chain_of_all": lambda o: o.chain(
        o.clip(1.0), o.trace(0.5), o.scale_by_lion(), o.add_decayed_weights(0.1), o.scale_by_learning_rate(LR)
    ),
    "centralize": lambda o: o.chain(o.centralize(), o.scale(-LR)),
    "scale_by_trust_ratio": lambda o: o.chain(o.scale_by_trust_ratio(), o.scale(-LR)),
    "scale_by_trust_ratio_bounds": lambda o: o.chain(o.scale_by_trust_ratio(2.0, 0.5, 0.1), o.scale(-LR)),
    "scale_by_factored_rms": lambda o: o.chain(o.scale_by_factored_rms(min_dim_size_to_factor=4), o.scale(-LR)),
    "scale_by_factored_rms_whole": lambda o: o.chain(o.scale_by_factored_rms(factored=False), o.scale(-LR)),
    "apply_if_finite": lambda o: o.apply_if_finite(o.adamw(LR, weight_decay=0.1), 2),
    "named_chain": lambda o: o.named_chain(("clip", o.clip_by_global_norm(1.0)), ("adamw", o.adamw(LR))),
    "freeze": lambda o: o.chain(o.adam(LR), o.freeze(MASK)),
    "selective_transform": lambda o: o.selective_transform(
        o.chain(o.clip_by_global_norm(1.0), o.adamw(LR)), freeze_mask=MASK
    ),
    "partition": lambda o: o.partition(groups(o), LABELS),
    "multi_transform": lambda o: o.multi_transform({**groups(o), "unused": o.adam(LR)}, lambda params: LABELS),
    "partition_nested": lambda o: o.chain(
        o.partition({"a": o.partition(groups(o), LABELS), "b": o.set_to_zero()}, MASK_LABELS), o.clip(1.0)
    ),
    "inject_hyperparams": lambda o: o.inject_hyperparams(o.adamw, **float32_of(o))(
        warmup(o), b1=o.schedules.linear_schedule(0.9, 0.8, 15), weight_decay=0.1
    ),
    "inject_hyperparams_derived": lambda o: o.inject_hyperparams(
        lambda learning_rate, ratio: o.adamw(learning_rate, weight_decay=ratio * learning_rate), **float32_of(o)
    )(warmup(o), ratio=10.0),
    "inject_hyperparams_static": lambda o: o.inject_hyperparams(o.adamw, "mask", **float32_of(o))(
        LR, weight_decay=0.5, mask=matrices
    ),
    "multi_steps": lambda o: multi_steps(o, o.adamw(LR, weight_decay=0.1), 3),
    "multi_steps_sum": lambda o: multi_steps(o, o.adamw(LR), 2, use_grad_mean=False),
    "multi_steps_of_1": lambda o: multi_steps(o, o.adamw(LR), 1),
    "multi_steps_schedule": lambda o: multi_steps(
        o, o.chain(o.clip_by_global_norm(1.0), o.sgd(LR, momentum=0.9)), lambda step: 1 + step % 3
    ),
    "multi_steps_in_a_chain": lambda o: o.chain(multi_steps(o, o.sgd(LR), 2), o.add_decayed_weights(LR)),
}


BROKEN_STEPS = (3, 8, 9)  # of apply_if_finite: an Inf or a NaN in one element, at most as often in a row as it allows


def draw(seed: int, scale: float) -> Any:
    """A tree of float32 numpy arrays."""
    rng = np.random.default_rng(seed)
    return _map(lambda shape: (scale * rng.standard_normal(shape)).astype(np.float32), SHAPES)


def gradients(case: str, start: float = 0.5) -> list[Any]:
    """One tree for each step: a common direction, so that moments grow, and noise."""
    direction = draw(1, start)
    trees = [_map(lambda a, b: a + b, direction, draw(100 + t, 1.0)) for t in range(STEPS)]
    if case == "apply_if_finite":
        for t in BROKEN_STEPS:
            trees[t]["layer"]["w"][2, 3] = np.nan if t == 3 else np.inf
    return trees


def _map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _map(f, tree[k], *(o[k] for o in others)) for k in sorted(tree)}
    return f(tree, *others)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for k in sorted(tree):  # jax's order
            yield from _leaves(tree[k])
    else:
        yield tree


def to_torch(tree: Any, dtype: str = "float32") -> Any:
    return _map(lambda x: torch.from_numpy(np.asarray(x)).to(getattr(torch, dtype)), tree)


def to_jax(tree: Any, dtype: str = "float32") -> Any:
    return _map(lambda x: jnp.asarray(x, dtype), tree)


def to_numpy(tree: Any) -> Any:
    def one(x: Any) -> np.ndarray:
        return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x.astype("float32"), np.float64)

    return _map(one, tree)


def distance(ours: Any, theirs: Any) -> float:
    """The largest absolute difference of any element of any leaf."""
    pairs = zip(_leaves(to_numpy(ours)), _leaves(to_numpy(theirs)), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


class Ours:
    """Our side: by the pure update, or by the compiled step's path without a compiler."""

    def __init__(self, tx: Any, params: Any, dtype: str, engine: str):
        self.tx, self.dtype = tx, dtype
        self.params = to_torch(params, dtype)
        self.state = tx.init(self.params)
        self.compiled = fl.compile(tx, backend="eager", donate=False) if engine == "compile" else None

    def step(self, grads: Any) -> None:
        grads = to_torch(grads, self.dtype)
        if self.compiled is not None:
            self.params, self.state = self.compiled(grads, self.state, self.params)
            return
        updates, self.state = self.tx.update(grads, self.state, self.params)
        self.params = fl.apply_updates(self.params, updates)


@cache
def optax_step(case: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init, jitted step) of optax's side."""
    tx = CASES[case](optax)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, jax.jit(step)


class Theirs:
    """optax's side, under jax.jit."""

    def __init__(self, case: str, params: Any, dtype: str):
        init, self.jitted = optax_step(case)
        self.dtype = dtype
        self.params = to_jax(params, dtype)
        self.state = init(self.params)

    def step(self, grads: Any) -> None:
        self.params, self.state = self.jitted(to_jax(grads, self.dtype), self.state, self.params)


@pytest.mark.parametrize("engine", ["update", "compile"])
@pytest.mark.parametrize("case", CASES)
def test_params_after_20_steps(case, engine):
    ours = Ours(CASES[case](fl), draw(0, 1.0), "float32", engine)
    theirs = Theirs(case, draw(0, 1.0), "float32")
    worst = 0.0
    for grads in gradients(case):
        ours.step(grads)
        theirs.step(grads)
        worst = max(worst, distance(ours.params, theirs.params))
    print(f"{case}: {worst:.2e}")
    assert worst <= 2e-5
    assert distance(ours.params, to_torch(draw(0, 1.0))) > LR / 2  # they went somewhere


@pytest.mark.parametrize("arguments", [{}, {"nesterov": False}, {"ns_steps": 3, "beta": 0.8, "eps": 1e-3}])
def test_muon(arguments):
    """Matrices only, so apart from `CASES`. The bound is that of the other cases, 2e-5 after 20 steps."""
    params = {"wide": draw(0, 1.0)["layer"]["w"], "tall": draw(1, 1.0)["layer"]["w"].T.copy()}
    ours = fl.chain(fl.scale_by_muon(**arguments), fl.scale(-LR))
    axes = {"wide": optax.contrib.MuonDimensionNumbers(), "tall": optax.contrib.MuonDimensionNumbers()}
    theirs = optax.chain(optax.contrib.scale_by_muon(**arguments, weight_dimension_numbers=axes), optax.scale(-LR))
    mine, other = to_torch(params), to_jax(params)
    state, other_state, update = ours.init(mine), theirs.init(other), jax.jit(theirs.update)
    for t in range(STEPS):
        w = draw(100 + t, 1.0)["layer"]["w"]
        grads = {"wide": w + 0.3, "tall": w.T - 0.3}
        updates, state = ours.update(to_torch(grads), state, mine)
        mine = fl.apply_updates(mine, updates)
        updates, other_state = update(to_jax(grads), other_state, other)
        other = optax.apply_updates(other, updates)
    worst = distance(mine, other)
    print(f"muon {arguments}: {worst:.2e}")
    assert worst <= 2e-5
    assert distance(mine, to_torch(params)) > LR / 2


@pytest.mark.parametrize("case", ["adam", "adam_nesterov", "adamw_decay", "chain", "trace_nesterov"])
def test_params_against_optax_in_float64(case):
    """What is left when optax does not round: our own 20 roundings of parameters below 4, 2.4e-7 at most each."""
    ours = Ours(CASES[case](fl), draw(0, 1.0), "float32", "update")
    with jax.enable_x64(True):
        theirs = Theirs(case, draw(0, 1.0), "float64")
        for grads in gradients(case):
            ours.step(grads)
            theirs.step(grads)
        reference = _map(lambda x: torch.from_numpy(np.asarray(x).copy()), theirs.params)
    worst = distance(ours.params, reference)
    print(f"{case}: {worst:.2e}")
    assert all(x.dtype == torch.float64 for x in _leaves(reference))
    assert worst <= STEPS * 2.4e-7


@pytest.mark.parametrize("engine", ["update", "compile"])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_step_by_step(case, engine):
    ours = Ours(CASES[case](fl), draw(0, 1.0), "bfloat16", engine)
    theirs = Theirs(case, draw(0, 1.0), "bfloat16")
    largest = [LR] * len(list(_leaves(SHAPES)))  # step so far, for each leaf
    worst, outside, total = 0.0, 0, 0
    for grads in gradients(case):
        before = to_numpy(ours.params)
        theirs.params = _map(lambda x: jnp.asarray(x.float().numpy(), jnp.bfloat16), ours.params)
        ours.step(grads)
        theirs.step(grads)
        steps = zip(_leaves(before), _leaves(to_numpy(ours.params)), _leaves(to_numpy(theirs.params)), strict=True)
        for i, (old, a, b) in enumerate(steps):
            largest[i] = max(largest[i], float(np.abs(a - old).max()))
            ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(a), np.abs(b)).clip(1e-30))) - 7)
            excess = (np.abs(a - b) - ulp) / largest[i]
            worst = max(worst, float(excess.max()))
            outside += int((excess > 0.04).sum())
            total += a.size
            assert a.dtype == b.dtype
    assert all(x.dtype == torch.bfloat16 for x in _leaves(ours.params))
    print(f"{case}: {worst:.3f} of a step beyond one ulp, {outside} of {total} above 4%")
    if case in ("lion", "lion_mask", "chain_of_all"):
        assert outside <= 3e-3 * total
        assert worst <= 2.1
    else:
        assert outside == 0


# What the state means ------------------------------------------------------------------------------------------------

RENAMED = {"count": "step"}  # a NamedTuple's field `count` would hide tuple's method of that name


def fields(state: Any) -> dict[str, Any]:
    """The fields of all NamedTuples in a state, under our names."""
    found: dict[str, Any] = {}
    for name in getattr(state, "_fields", ()):
        value = getattr(state, name)
        found[RENAMED.get(name, name)] = value
        found |= fields(value)
    if isinstance(state, dict) or (isinstance(state, tuple) and not hasattr(state, "_fields")):
        for part in state.values() if isinstance(state, dict) else state:
            found |= fields(part)
    return found


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("adam", {"step", "mu", "nu"}),
        ("adamw_nesterov", {"step", "mu", "nu"}),
        ("lion", {"step", "mu"}),
        ("sgd_nesterov", {"trace"}),
        ("trace", {"trace"}),
        ("scale_by_schedule", {"step"}),
        ("named_chain", {"step", "mu", "nu"}),
        ("apply_if_finite", {"notfinite_count", "last_finite", "total_notfinite", "step", "mu", "nu"}),
        ("multi_steps", {"mini_step", "gradient_step", "acc_grads", "step", "mu", "nu"}),
        ("multi_steps_schedule", {"mini_step", "gradient_step", "acc_grads", "trace"}),
        ("inject_hyperparams", {"step", "mu", "nu"}),
    ],
)
def test_state_means_the_same(case, names):
    """Moments to 1e-6 of the largest (float32 sums of 20 terms), counters exactly, at every step."""
    ours = Ours(CASES[case](fl), draw(0, 1.0), "float32", "update")
    theirs = Theirs(case, draw(0, 1.0), "float32")
    for grads in gradients(case):
        ours.step(grads)
        theirs.step(grads)
        mine, other = fields(ours.state), fields(theirs.state)
        assert names <= set(mine)
        assert names <= set(other)
        for name in names:
            if isinstance(mine[name], dict):
                size = max(float(np.abs(x).max()) for x in _leaves(to_numpy(other[name])))
                assert distance(mine[name], other[name]) <= 1e-6 * size
            else:
                assert mine[name].item() == other[name].item()


def test_state_classes_have_optax_names():
    shared = [n for n, c in vars(fl).items() if n.endswith("State") and hasattr(optax, n) and hasattr(c, "_fields")]
    assert {"ScaleByAdamState", "ScaleByLionState", "TraceState", "MaskedState", "ApplyIfFiniteState"} <= set(shared)
    for name in shared:
        theirs = tuple(RENAMED.get(field, field) for field in getattr(optax, name)._fields)
        # Every moment has a step beside it, so that any hyperparameter may be a schedule.
        assert getattr(fl, name)._fields in (theirs, ("step", *theirs))
