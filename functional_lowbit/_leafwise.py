"""Lift a function of one leaf to a transformation of trees."""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_lowbit import _check, _tree
from functional_lowbit._base import EmptyState, GradientTransformation, Hyper, Moment, StepState, Tree, moments_of
from functional_lowbit._parts import Part, Rest
from functional_lowbit.sharding import ShardSpec, local_of, wrap


class Shared(NamedTuple):
    """What all leaves share in one step."""

    scalars: dict[str, Tensor]  # float32[]; what the leaf function sees as `c`
    state: dict[str, Tensor]  # new values of the state's shared fields


@dataclass(frozen=True, eq=False)
class Leafwise(Part):
    """The `update` of a transformation that treats each leaf alone. Made by `leafwise`."""

    name: str
    update_leaf: Callable[..., tuple[Tensor, Any]]
    state_class: Any
    moments: Mapping[str, Moment]
    hyperparams: Mapping[str, Hyper]
    scalars: Callable[..., Mapping[str, Tensor]] | None
    prepare: Callable[..., Mapping[str, Tensor]] | None
    init_leaf: Callable[[Tensor], Mapping[str, Tensor]] | None
    init_shared: Mapping[str, float | Tensor]
    elementwise: bool
    needs_params: bool
    _float64: dict[str, Tensor] = field(default_factory=dict)
    _float32: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shared_fields(self) -> list[str]:
        """Fields of the state that are one value for the whole tree."""
        return [name for name in self.state_class._fields if name not in self.moments]

    def init(self, params: Tree) -> Any:
        """A new state, moments in float32."""
        return self.init_state(params, rest_in_float32)

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """A new state, moments kept as `rest` decides."""
        leaves, treedef = _tree.flatten(params)
        paths = _tree.names(treedef)
        _check.params(f"{self.name}.init", paths, leaves)
        fields: dict[str, Any] = {name: self._first(name) for name in self.shared_fields}
        for name, moment in self.moments.items():
            kept = []
            for path, param in zip(paths, leaves, strict=True):
                kept.append(rest(name, moment, path, param, self._first_moment(name, param)))
            fields[name] = _tree.unflatten(treedef, kept)
        return self.state_class(**fields)

    def _first(self, name: str) -> Tensor:
        if name == "step":
            return torch.zeros((), dtype=torch.int64)
        return torch.as_tensor(self.init_shared.get(name, 0.0), dtype=torch.float32).clone()

    def _first_moment(self, name: str, param: Tensor) -> Callable[[], Tensor] | None:
        if self.init_leaf is None:
            return None
        first = self.init_leaf(param if not self.elementwise else local_of(param))
        unknown = next((field for field in first if field not in self.moments), None)
        if unknown is not None:
            raise ValueError(f"{self.name}.init: init returned {unknown!r}, which is no moment of the state")
        return (lambda: first[name]) if name in first else None

    def hyper(self, state: Any) -> Any:
        """The hyperparameters at this step: a namedtuple of float64[].

        float64, so that 1 - b2 and b2 ** step are right; what reaches the leaves is rounded once.
        """
        values = {}
        for name, value in self.hyperparams.items():
            if not isinstance(value, (Tensor, int, float)):
                with _at_least_float32():
                    value = value(state.step)
                value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            if isinstance(value, Tensor):
                values[name] = _check.finite(self.name, name, value.detach() if _is_param(value) else value).double()
            else:
                values[name] = _constant(self._float64, name, value, torch.float64)
        return record(tuple(values))(*values.values())

    def share(self, updates: Tree, state: Any, params: Tree, h: Any) -> Shared:
        """Compute, once for the whole tree, what the leaf function is given and how the shared state goes on."""
        derived: dict[str, Tensor] = {}
        if self.scalars is not None:
            derived.update(self.scalars(state._replace(**dict.fromkeys(self.moments)), h))
        if self.prepare is not None:
            derived.update(self.prepare(updates, state, params, h))
        derived = {name: torch.as_tensor(value, dtype=_dtype(value)) for name, value in derived.items()}
        new_state = {
            name: derived[name].to(getattr(state, name).dtype) for name in self.shared_fields if name in derived
        }
        if "step" in self.shared_fields and "step" not in new_state:
            new_state["step"] = state.step + 1
        scalars = {name: value.float() for name, value in derived.items()}
        for name, value in zip(h._fields, h, strict=True):
            if isinstance(self.hyperparams[name], (int, float)):
                scalars.setdefault(name, _constant(self._float32, name, self.hyperparams[name], torch.float32))
            else:
                scalars.setdefault(name, value.float())
        return Shared(scalars, new_state)

    def leaf(self, g: Tensor, moments: Mapping[str, Tensor], p: Tensor | None, scalars: Mapping[str, Tensor]) -> Any:
        """Call the leaf function: (update, new moments)."""
        blank = dict.fromkeys(self.state_class._fields)
        c = record(tuple(scalars))(*scalars.values())
        update, new = self.update_leaf(g, self.state_class(**{**blank, **moments}), p, c)
        new_moments = {name: getattr(new, name) for name in self.moments}
        check_leaf(self.update_leaf, g, update, new_moments)
        return update, new_moments

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The pure update, leaf by leaf."""
        speaker = f"{self.name}.update"
        _check.state_class(speaker, state, self.state_class)
        # Without params, moments say where the leaves are: a gradient may be None.
        reference = next((getattr(state, name) for name in self.moments), updates) if params is None else params
        leaves, treedef = _tree.flatten(reference)
        paths = _tree.names(treedef)
        us = _check.same_structure(speaker, "updates", treedef, updates)
        _check.updates(speaker, paths, us, leaves)
        if params is not None:
            us = [None if u is None else as_sharded(u, p)[0] for u, p in zip(us, leaves, strict=True)]
            updates = _tree.unflatten(treedef, us)
        if params is None and self.needs_params:
            raise ValueError(f"{speaker}: params are needed; call update(updates, state, params)")
        moments = {
            name: _check.same_structure(speaker, f"state.{name}", treedef, getattr(state, name))
            for name in self.moments
        }
        for name, values in moments.items():
            _check.moments(speaker, name, paths, leaves, values)
        shared = self.share(updates, state, params, self.hyper(state))
        new_us: list[Any] = []
        new_moments: dict[str, list[Any]] = {name: [] for name in moments}
        for i, (u, leaf) in enumerate(zip(us, leaves, strict=True)):
            old = {name: moments[name][i] for name in moments}
            if u is None:
                new_us.append(None)
                new = old
            else:
                new_u, new = self._update_one(u, old, None if params is None else leaf, shared.scalars)
                new_us.append(new_u)
            for name in new_moments:
                new_moments[name].append(new[name])
        new_state = state._replace(
            **shared.state, **{name: _tree.unflatten(treedef, new) for name, new in new_moments.items()}
        )
        return _tree.unflatten(treedef, new_us), new_state

    def _update_one(self, u: Tensor, moments: dict[str, Any], p: Tensor | None, scalars: Mapping[str, Tensor]) -> Any:
        """One leaf. An elementwise rule works on local shards; any other on the whole (DTensors reduce globally)."""
        spec = ShardSpec.of(u)
        if not self.elementwise or spec is None:
            p32 = None if p is None else (p.detach() if _is_param(p) else p).float()
            new_u, new = self.leaf(u.float(), moments, p32, scalars)
            return new_u.to(u.dtype), new
        p32 = None if p is None else local_of(p).float()
        local, new = self.leaf(local_of(u).float(), {k: local_of(m) for k, m in moments.items()}, p32, scalars)
        return wrap(local.to(u.dtype), spec), {k: wrap(m, spec) for k, m in new.items()}


def check_leaf(function: Callable[..., Any], g: Tensor, update: Any, moments: Mapping[str, Any]) -> None:
    """Refuse what a leaf function returned if it is not shaped like its leaf."""
    for what, x in [("update", update), *moments.items()]:
        if not isinstance(x, Tensor) or x.shape != g.shape or x.dtype != torch.float32:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            speaker = getattr(function, "__name__", "the leaf function")
            raise ValueError(
                f"leafwise: {speaker} must return float32 tensors of g's shape {tuple(g.shape)}, got for {what}: {got}"
            )


def as_sharded(u: Tensor, p: Tensor) -> tuple[Tensor, ShardSpec | None]:
    """An update with its parameter's mesh and placements. A gradient that rests otherwise is moved there."""
    spec = ShardSpec.of(p)
    if spec is not None and tuple(u.placements) != spec.placements:  # type: ignore[attr-defined]
        u = u.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
    return u, spec


def like_params(speaker: str, updates: Tree, params: Tree) -> Tree:
    """Updates with the sharding of their parameters, for what looks at the whole tree before the leaf functions do."""
    leaves, treedef = _tree.flatten(params)
    us = _check.same_structure(speaker, "updates", treedef, updates)
    _check.updates(speaker, _tree.names(treedef), us, leaves)
    return _tree.unflatten(
        treedef, [None if u is None else as_sharded(u, p)[0] for u, p in zip(us, leaves, strict=True)]
    )


def rest_in_float32(field: str, moment: Moment, path: str, param: Tensor, value: Callable[[], Tensor] | None) -> Tensor:
    """Keep a new moment as float32, shaped and sharded like its parameter, whatever the default dtype."""
    local = local_of(param)
    if value is None:
        first = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
    else:
        first = value().detach().to(torch.float32, copy=True)
        if hasattr(first, "device_mesh"):
            return first
    return wrap(first, ShardSpec.of(param))


def _is_param(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)


def _constant(cache: dict[str, Tensor], name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """A number as a tensor, kept for the next step; made so that it serves outside the caller's modes too."""
    if name not in cache:
        with torch.inference_mode(False):
            made = torch.tensor(value, dtype=dtype, device="cpu")
        if type(made) is not Tensor:  # fake, or wrapped by a function transform
            return made
        cache[name] = made
    return cache[name]


def _dtype(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.float64


@contextmanager
def _at_least_float32() -> Iterator[None]:
    """A schedule that divides an int64 step must not round to a default dtype of bfloat16."""
    default = torch.get_default_dtype()
    if default in (torch.float32, torch.float64):
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


_records: dict[tuple[str, ...], Any] = {}


def record(names: tuple[str, ...]) -> Any:
    """One namedtuple class for each set of names, so that compiled code sees the same class again."""
    if names not in _records:
        _records[names] = namedtuple("Scalars", names)
    return _records[names]


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
            another shape (blocks, or several leaves in one), so it must not look at shapes.
        state: A NamedTuple class. A field annotated `Signed` or `NonNegative` is a moment, a tree like params. Any
            other field is one 0-d tensor for the whole tree; the field `step` (int64) counts the updates by itself.
        hyperparams: Name to value: a float, a 0-d tensor that is read anew at each step, or a schedule. A schedule
            needs a `step` field; without a state class, one is added.
        scalars: `scalars(s, h) -> {name: 0-d tensor}`, once per step: what follows from the step and the
            hyperparameters, for instance bias corrections. `h` holds the hyperparameters as float64[], `s` the shared
            fields of the state (its moments are None).
        prepare: `prepare(updates, s, params, h) -> {name: 0-d tensor}`, once per step: what needs the whole tree, for
            instance a global norm. A name that is a shared field of the state replaces that field (also in `scalars`).
        init: `init(p) -> {field: first value}` for moments that do not begin at 0.
        init_shared: First values of shared fields other than `step`; 0 by default, float32.
        elementwise: Whether each element's update depends on that element alone. If not, the function is given whole
            leaves (DTensors as DTensors), and is not fused with its neighbours.
        needs_params: Whether `p` may not be None.
        name: Who speaks in errors; by default the function's name.

    Raises:
        TypeError: if `state` is no NamedTuple class, or a hyperparameter is no number, tensor or schedule.
        ValueError: for a non-finite hyperparameter, or a schedule without a `step` field.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> def sign_descent(g, s, p, c):
        ...     return -c.learning_rate * torch.sign(g), s
        >>> tx = fl.leafwise(sign_descent, hyperparams={"learning_rate": 0.5})
        >>> tx.update({"w": torch.tensor([3.0, -2.0])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([-0.5000,  0.5000])}
    """
    speaker: str = name or getattr(update, "__name__", "leafwise").strip("_")
    hyperparams = dict(hyperparams or {})
    for key, value in hyperparams.items():
        _check.hyperparameter(speaker, key, value)
        if not isinstance(value, Tensor) and not callable(value):
            hyperparams[key] = float(value)
    scheduled = [k for k, v in hyperparams.items() if not isinstance(v, (Tensor, int, float))]
    if state is None:
        state = StepState if scheduled else EmptyState
    fields = getattr(state, "_fields", None)
    if not isinstance(state, type) or fields is None:
        raise TypeError(f"leafwise: state must be a NamedTuple class, got {state!r}")
    if scheduled and "step" not in fields:
        raise ValueError(
            f"leafwise: {speaker} has a schedule for {scheduled[0]}, so its state class {state.__name__} needs a field "
            "`step: Tensor`"
        )
    moments = moments_of(state)
    unknown = next((f for f in init_shared or () if f not in fields or f in moments or f == "step"), None)
    if unknown is not None:
        raise ValueError(f"leafwise: init_shared names {unknown!r}, which is no shared field of {state.__name__}")
    part = Leafwise(
        name=speaker,
        update_leaf=update,
        state_class=state,
        moments=moments,
        hyperparams=hyperparams,
        scalars=scalars,
        prepare=prepare,
        init_leaf=init,
        init_shared=dict(init_shared or {}),
        elementwise=elementwise,
        needs_params=needs_params,
    )
    return GradientTransformation(part.init, part)
