"""Arguments have optax's names, order and defaults; each difference is listed with its reason."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import optax

import functional_lowbit as fl

DIFFERENCES: dict[tuple[str, str], str] = {
    ("adam", "mu_dtype"): "how a moment rests is low_bit's matter, for any moment of any optimizer",
    ("adamw", "mu_dtype"): "as for adam",
    ("scale_by_adam", "mu_dtype"): "as for adam",
    ("lion", "mu_dtype"): "as for adam",
    ("scale_by_lion", "mu_dtype"): "as for adam",
    ("sgd", "accumulator_dtype"): "as for adam",
    ("trace", "accumulator_dtype"): "as for adam",
    ("scale_by_lion", "mode"): "optax's variants of Lion that are not the paper's: not built",
    ("scale_by_lion", "smooth_beta"): "belongs to mode",
    ("apply_if_finite", "max_consecutive_errors"): "optax has no default; ours is the 5 of its documentation",
    ("scale_by_learning_rate", "learning_rate"): "optax lets it be left out, and then returns the identity",
    ("inject_hyperparams", "hyperparam_dtype"): "float32, whatever the parameters are",
    ("scale_by_factored_rms", "decay_rate_fn"): "a function of two numbers beside schedules: not built",
    ("apply_updates", "rounding"): "ours: stochastic rounding of low-precision parameters",
    ("apply_updates", "key"): "belongs to rounding",
}


POSITIONAL = {  # only ever given by position, and called otherwise
    "chain": ("transformations", "args"),
    "named_chain": ("transformations", "args"),
    "global_norm": ("tree", "updates"),
    "stateless": ("update", "f"),
}


def shared_functions() -> Iterator[tuple[str, Any, Any]]:
    """(name, ours, optax's) of every public function that both have."""
    for mine, other in ((fl, optax), (fl.schedules, optax.schedules)):
        for name, function in vars(mine).items():
            if isinstance(function, types.FunctionType) and hasattr(other, name) and not name.startswith("_"):
                yield name, function, getattr(other, name)


def test_signatures_agree_with_optax():
    found: set[tuple[str, str]] = set()
    names = []
    for name, mine, other in shared_functions():
        names.append(name)
        p, q = (dict(inspect.signature(f).parameters) for f in (mine, other))
        for ours, theirs in [POSITIONAL[name]] if name in POSITIONAL else []:
            q[ours] = q.pop(theirs)
        found |= {(name, argument) for argument in p.keys() ^ q.keys()}
        shared = [argument for argument in p if argument in q]
        found |= {(name, a) for a in shared if p[a].default != q[a].default or p[a].kind != q[a].kind}
        assert shared == [argument for argument in q if argument in p], f"{name}: another order"
    assert len(names) >= 22, names
    assert found == set(DIFFERENCES)
