"""Lift a function of one leaf to a transformation of trees."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import (
    EmptyState,
    GradientTransformation,
    Hyper,
    Over,
    Statistic,
    StepState,
    moments_of,
    statistics_of,
)
from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._refused import WrongType, WrongValue, speaking


@speaking("leafwise")
def leafwise(
    update: Callable[..., tuple[Tensor, Any]],
    *,
    state: Any = None,
    hyperparams: Mapping[str, Hyper] | None = None,
    scalars: Callable[..., Mapping[str, Tensor]] | None = None,
    prepare: Callable[..., Mapping[str, Tensor]] | None = None,
    init: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    init_shared: Mapping[str, float | Tensor] | None = None,
    elementwise: bool = True,
    reduces: bool = False,
    over: Mapping[str, Over] | None = None,
    needs_params: bool = False,
    name: str | None = None,
) -> GradientTransformation:
    """Make a transformation from a function of one leaf. This is how to write an optimizer.

    The function is written once, for plain float32 tensors; low-bit state, compilation, sharding and checkpoints follow
    from what is declared here.

    Args:
        update: `update(g, s, p, c) -> (u, s)`, pure. `g` is the incoming update and `p` the parameter (None if the
            caller passed no params), both float32. `s` is an instance of `state` that holds this leaf's moments,
            float32 of g's shape; return it with new moments: `s._replace(mu=mu)`. `c` holds the hyperparameters, and
            what `scalars` and `prepare` return, as float32[] attributes. An elementwise function may be given a leaf in
            another shape (blocks, or several leaves in one), so it must not look at shapes. One that combines elements
            is refused, unless it is declared with `reduces` or `elementwise=False`.
        state: A NamedTuple class. A field annotated `Signed` or `NonNegative` is a moment, a tree like params; one
            annotated with a `Statistic` holds what is left of each leaf when some dimensions are reduced. Any other
            field is one 0-d tensor for the whole tree; the field `step` (int64) counts the updates by itself.
        hyperparams: Name to value: a float, a 0-d tensor that is read anew at each step, or a schedule. A schedule
            needs a `step` field; without a state class, one is added.
        scalars: `scalars(s, h) -> {name: 0-d tensor}`, once per step: what follows from the step and the
            hyperparameters, for instance bias corrections. `h` holds the hyperparameters as float64[], `s` the shared
            fields of the state (its moments are None).
        prepare: `prepare(updates, s, params, h) -> {name: 0-d tensor}`, once per step: what needs the whole tree, for
            instance a global norm. A name that is a shared field of the state replaces that field (also in `scalars`).
        init: `init(p) -> {field: first value}` for moments and statistics that do not begin at 0. `p` is what `update`
            would be given: a part of the parameter, or all of it.
        init_shared: First values of shared fields other than `step`; 0 by default, float32.
        elementwise: Whether each element's update depends on that element alone. The function is fused with its
            neighbours. If False, it is given whole leaves, plain and contiguous, and may do anything: a sharded leaf is
            gathered on one rank, which works on it, and its parts are handed back. The work is spread over the ranks.
        reduces: Whether each element's update depends on that element and on sums, means, norms or maxima of its leaf
            or of some dimensions of it. The function is given this rank's part of each leaf in its own shape, and takes
            them with `fl.reduce`, which knows of the other parts. It is not fused.
        over: Name of a statistic to the dimensions that it is reduced over, in place of what the state class says: for
            a rule that decides by shape.
        needs_params: Whether `p` may not be None.
        name: Who speaks in errors; by default the function's name.

    Raises:
        TypeError: if `state` is no NamedTuple class, or a hyperparameter is no number, tensor or schedule.
        ValueError: for a non-finite hyperparameter, a schedule without a `step` field, or a statistic in an elementwise
            rule; at `update` or `compile`, for a function that is not what it is declared to be.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> def sign_descent(g, s, p, c):
        ...     return -c.learning_rate * torch.sign(g), s
        >>> tx = fl.leafwise(sign_descent, hyperparams={"learning_rate": 0.5})
        >>> tx.update({"w": torch.tensor([3.0, -2.0])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([-0.5000,  0.5000])}
    """
    name = str(name or getattr(update, "__name__", "leafwise").strip("_"))
    hyperparams = dict(hyperparams or {})
    for key, value in hyperparams.items():
        with speaking(name):
            refuse.hyperparameter(key, value)
        if not isinstance(value, Tensor) and not callable(value):
            hyperparams[key] = float(value)
    scheduled = [k for k, v in hyperparams.items() if not isinstance(v, (Tensor, int, float))]
    if state is None:
        state = StepState if scheduled else EmptyState
    fields = getattr(state, "_fields", None)
    if not isinstance(state, type) or fields is None:
        raise WrongType(f"state must be a NamedTuple class, got {state!r}")
    if scheduled and "step" not in fields:
        raise WrongValue(
            f"{name} has a schedule for {scheduled[0]}, so its state class {state.__name__} needs a field `step: "
            "Tensor`"
        )
    if reduces and not elementwise:
        raise WrongValue(
            f"{name} is declared with reduces=True and elementwise=False; the first is given parts of leaves and uses "
            "fl.reduce, the second whole leaves, so choose one"
        )
    moments = moments_of(state)
    statistics = statistics_of(state)
    if statistics and elementwise and not reduces:
        raise WrongValue(
            f"{name} has the statistic {next(iter(statistics))!r}, which an elementwise function cannot be given; "
            "declare it with reduces=True or elementwise=False"
        )
    unknown = next((f for f in over or () if f not in statistics), None)
    if unknown is not None:
        raise WrongValue(f"over names {unknown!r}, which is no statistic of {state.__name__}")
    statistics = {f: Statistic(over[f]) if over and f in over else s for f, s in statistics.items()}
    per_leaf = {*moments, *statistics, "step"}
    unknown = next((f for f in init_shared or () if f not in fields or f in per_leaf), None)
    if unknown is not None:
        raise WrongValue(f"init_shared names {unknown!r}, which is no shared field of {state.__name__}")
    part = Leafwise(
        name=name,
        update_leaf=update,
        state_class=state,
        moments=moments,
        statistics=statistics,
        hyperparams=hyperparams,
        scalars=scalars,
        prepare=prepare,
        init_leaf=init,
        init_shared=dict(init_shared or {}),
        elementwise=elementwise and not reduces,
        reduces=reduces,
        needs_params=needs_params,
    )
    return part.transformation()
