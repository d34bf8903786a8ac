"""The contract: a transformation is a pair of pure functions, and a state says which of its fields are moments."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from torch import Tensor

from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType

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


Over: TypeAlias = tuple[int, ...] | Callable[[tuple[int, ...]], tuple[int, ...] | None] | None
"""Dimensions that are reduced; None for all; or a function from the leaf's global shape to either."""


class Statistic(NamedTuple):
    """Marks a state field that holds, for each leaf, what is left of it when some dimensions are reduced.

    Its leaves are float32 and begin at 0. Reduced dimensions are kept, with size 1; a sharded leaf's statistic is
    repeated where a reduced dimension is cut, and cut as the leaf elsewhere. It always rests in float32. A leaf
    function is given it beside the moments, if it is declared with `reduces=True` or `elementwise=False`.

    Args:
        over: Dimensions that are reduced. None: all of them, one number for each leaf. Negative ones count from the
            end; those that a leaf does not have are passed over, so `(-1,)` makes a number of a vector and leaves a
            number as it is. A function of the leaf's global shape may decide for each leaf.

    Example:
        >>> from typing import Annotated, Any, NamedTuple
        >>> import torch, functional_lowbit as fl
        >>> class RowNorms(NamedTuple):
        ...     norms: Annotated[Any, fl.Statistic(over=(-1,))]
        >>> def keep_norms(g, s, p, c):
        ...     return g, s._replace(norms=fl.reduce.norm(g, dim=-1, keepdim=True))
        >>> fl.leafwise(keep_norms, state=RowNorms, reduces=True).init(torch.zeros(2, 3)).norms
        tensor([[0.],
                [0.]])
    """

    over: Over = None

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The reduced dimensions of a leaf of this global shape, not negative, in order."""
        over, n = (self.over(tuple(shape)) if callable(self.over) else self.over), len(shape)
        return tuple(range(n)) if over is None else tuple(sorted({d % n for d in over if -n <= d < n}))


class Role(NamedTuple):
    """Marks a state field that is neither a moment nor a statistic: what a checkpoint says of its leaves.

    Args:
        name: "counter" (how many updates were made, one number for all parameters), "number" (others of that kind),
            "master" (like params: what they lack of their masters), "record" (like params: what was measured of them),
            "states" (a dict of states by names of their own, which may be those of parameters).
        by_name: Whether the field is a dict, by names of its own, of what `name` says.
    """

    name: str
    by_name: bool = False


Counter: TypeAlias = Annotated[Tensor, Role("counter")]
"""int64[]; how many updates were made. A field `step` is one without this, since `leafwise` counts there."""


Number: TypeAlias = Annotated[Any, Role("number")]
"""A number for all parameters, or a dict of them."""


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
    by_word = {"Signed": Moment(True), "NonNegative": Moment(False)}
    found: dict[str, Moment] = {}
    for name, hint in _hints(state_class).items():
        moment = by_word.get(hint.rsplit(".", 1)[-1]) if isinstance(hint, str) else _marked(hint, Moment)
        if moment is not None:
            found[name] = moment
    return found


def statistics_of(state_class: type) -> dict[str, Statistic]:
    """Fields of a state class that are declared with a `Statistic`, in order."""
    found: dict[str, Statistic] = {}
    for name, hint in _hints(state_class).items():
        if isinstance(hint, str) and "Statistic" in hint:
            raise WrongType(
                f"the annotation {hint!r} cannot be resolved; define the class at the top of its module, or without "
                "`from __future__ import annotations`",
                speaker=f"{state_class.__name__}.{name}",
            )
        statistic = _marked(hint, Statistic)
        if statistic is not None:
            found[name] = statistic
    return found


def roles_of(state_class: type) -> dict[str, Role]:
    """Fields of a state class that are declared with a `Role`, and `step`, in order."""
    found: dict[str, Role] = {}
    for name, hint in _hints(state_class).items():
        role = _marked(hint, Role) or (Role("counter") if name == "step" else None)
        if role is not None:
            found[name] = role
    return found


def _hints(state_class: type) -> dict[str, Any]:
    """Annotations; as text where they cannot be resolved."""
    try:
        return _resolved(state_class)
    except NameError:
        hints = getattr(state_class, "__annotations__", {})
        return {name: getattr(hint, "__forward_arg__", hint) for name, hint in hints.items()}  # NamedTuple wraps text


@lru_cache(maxsize=1024)
def _resolved(state_class: type) -> dict[str, Any]:
    return get_type_hints(state_class, include_extras=True)


def _marked(hint: Any, kind: type) -> Any:
    """The mark of a kind that an annotation carries, or None."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


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
