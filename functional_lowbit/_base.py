"""The contract: a transformation is a pair of pure functions, and a state says which of its fields are moments."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from torch import Tensor

Tree: TypeAlias = Any
"""Any pytree of tensors: dict, list, tuple, NamedTuple, registered class, a bare tensor, None."""

Schedule: TypeAlias = Callable[[Tensor], Tensor | float]
"""A function of the 0-d int64 step tensor, counted from 0."""

Hyper: TypeAlias = float | Tensor | Schedule
"""A hyperparameter: a float, a 0-d tensor that is read anew at each step, or a schedule."""


class Moment(NamedTuple):
    """Marks a state field that mirrors the parameters, and may therefore rest in few bits."""

    signed: bool


Signed: TypeAlias = Annotated[Tree, Moment(signed=True)]
"""A moment of either sign: float32 leaves like params."""

NonNegative: TypeAlias = Annotated[Tree, Moment(signed=False)]
"""A moment that is never below zero: float32 leaves like params."""


class GradientTransformation(NamedTuple):
    """A pair of pure functions that together make an optimizer, or a part of one.

    Neither writes to its arguments. Trees may be any pytree of tensors, DTensors included.

    Args:
        init: `init(params) -> state`.
        update: `update(updates, state, params=None, **extra) -> (updates, state)`. Updates have the
            structure, shapes and dtypes that came in.

    References:
        The contract is optax's, https://optax.readthedocs.io/en/latest/api/transformations.html.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> halve = fl.GradientTransformation(
        ...     init=lambda params: (),
        ...     update=lambda updates, state, params=None: (fl.tree.scale(0.5, updates), state),
        ... )
        >>> halve.update({"w": torch.ones(2)}, halve.init({}))
        ({'w': tensor([0.5000, 0.5000])}, ())
    """

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


class StepState(NamedTuple):
    """The state of a transformation that remembers only how often it was applied."""

    step: Tensor  # int64[]; updates made so far


def moments_of(state_class: type) -> dict[str, Moment]:
    """Fields of a state class that are declared `Signed` or `NonNegative`, in order.

    Works on NamedTuples and dataclasses. An annotation that cannot be resolved (a class local to a function
    of a module with postponed annotations) is read by its last word.
    """
    try:
        hints: dict[str, Any] = get_type_hints(state_class, include_extras=True)
    except NameError:
        hints = dict(getattr(state_class, "__annotations__", {}))
    by_word = {"Signed": Moment(True), "NonNegative": Moment(False)}
    found: dict[str, Moment] = {}
    for name, hint in hints.items():
        if isinstance(hint, str):
            moment = by_word.get(hint.rsplit(".", 1)[-1])
        elif get_origin(hint) is Annotated:
            moment = next((a for a in get_args(hint)[1:] if isinstance(a, Moment)), None)
        else:
            moment = None
        if moment is not None:
            found[name] = moment
    return found


def accepted(update: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the extra arguments that `update` takes: all with `**extra`, else the keyword-only ones by name."""
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):
        return {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return extra
    named = {name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {name: value for name, value in extra.items() if name in named}


def call_update(update: Callable[..., Any], updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Any:
    """Call an update function with those of the extra arguments that it takes."""
    return update(updates, state, params, **(accepted(update, extra) if extra else {}))
