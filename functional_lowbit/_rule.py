"""A function of one leaf with what is declared of it, as the `update` of trees. Made by `leafwise`."""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_lowbit import _check, _current, _statistics, _tree
from functional_lowbit._base import (
    Hyper,
    Moment,
    Statistic,
    Tree,
)
from functional_lowbit._guard import Guard, can_watch, check_elementwise, name_of, watched
from functional_lowbit._like_params import as_sharded, rest_in_float32
from functional_lowbit._parts import Part, Rest
from functional_lowbit._task import Task
from functional_lowbit._whole import run_whole
from functional_lowbit.sharding import ShardSpec, local_of


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
    statistics: Mapping[str, Statistic]
    hyperparams: Mapping[str, Hyper]
    scalars: Callable[..., Mapping[str, Tensor]] | None
    prepare: Callable[..., Mapping[str, Tensor]] | None
    init_leaf: Callable[[Tensor], Mapping[str, Tensor]] | None
    init_shared: Mapping[str, float | Tensor]
    elementwise: bool
    reduces: bool
    needs_params: bool
    _float64: dict[str, Tensor] = field(default_factory=dict)
    _float32: dict[str, Tensor] = field(default_factory=dict)
    _watched: set[tuple[int, ...]] = field(default_factory=set)  # shapes for which the function was watched

    @property
    def leaf_fields(self) -> list[str]:
        """Fields of the state that hold something for each leaf: moments, then statistics."""
        return [*self.moments, *self.statistics]

    @property
    def shared_fields(self) -> list[str]:
        """Fields of the state that are one value for the whole tree."""
        return [name for name in self.state_class._fields if name not in self.leaf_fields]

    def structure(self) -> Any:
        """The state's class and its fields, and what the leaf function is given."""
        return self.state_class, tuple(self.moments.items()), tuple(self.statistics), self.elementwise, self.reduces

    def check_declaration(self) -> bool:
        """Refuse a function that is declared elementwise and is not. It is tried once; False if that was not possible.

        Then it is watched where it runs, and not fused.
        """
        return not self.elementwise or check_elementwise(
            self.name, self.update_leaf, self.state_class, tuple(self.moments)
        )

    def init(self, params: Tree) -> Any:
        """A new state, moments and statistics in float32."""
        return self.init_state(params, rest_in_float32)

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """A new state, moments kept as `rest` decides."""
        leaves, treedef = _tree.flatten(params)
        paths = _tree.names(treedef)
        _check.params(f"{self.name}.init", paths, leaves)
        kept: dict[str, list[Any]] = {name: [] for name in self.leaf_fields}
        for path, param in zip(paths, leaves, strict=True):
            firsts = self._first_values(path, param)
            for name, moment in self.moments.items():
                kept[name].append(rest(name, moment, path, param, firsts.get(name)))
            for name, statistic in self.statistics.items():
                first = _statistics.first(f"{self.name}.init", name, path, statistic, param, firsts.get(name))
                kept[name].append(first)
        return self.state_class(
            **{name: self._first(name) for name in self.shared_fields},
            **{name: _tree.unflatten(treedef, values) for name, values in kept.items()},
        )

    def _first(self, name: str) -> Tensor:
        if name == "step":
            return torch.zeros((), dtype=torch.int64, device="cpu")
        value = self.init_shared.get(name, 0.0)
        device = value.device if isinstance(value, Tensor) else "cpu"  # whatever the default device
        return torch.as_tensor(value, dtype=torch.float32, device=device).clone()

    def _first_values(self, path: str, param: Tensor) -> dict[str, Callable[[], Tensor]]:
        """This rank's parts of the first values of a leaf's fields; those that are not there are zeros."""
        if self.init_leaf is None:
            return {}
        spec, part = ShardSpec.of(param), local_of(param)
        whole = spec is not None and not self.elementwise and not self.reduces
        if whole:
            part = local_of(param.full_tensor())  # type: ignore[attr-defined]
        guard = Guard() if can_watch() and (self.elementwise or self.reduces) else None
        leaf = _current.Leaf(path, tuple(part.shape), spec, guard) if self.reduces else None
        with _current.inside(leaf), watched(guard, f"{self.name}.init", self.init_leaf, path):
            first = self.init_leaf(part)
        unknown = next((field for field in first if field not in self.leaf_fields), None)
        if unknown is not None:
            raise ValueError(
                f"{self.name}.init: init returned {unknown!r}, which is no moment or statistic of the state"
            )
        return {name: partial(self._own_part, name, param, value, whole) for name, value in first.items()}

    def _own_part(self, name: str, param: Tensor, value: Tensor, whole: bool) -> Tensor:
        """This rank's part of a first value; of a whole one it is cut out."""
        if not whole:
            return value
        spec = ShardSpec.of(param)
        if name in self.statistics:
            spec = _statistics.spec_of(self.statistics[name], param)[1]
        assert spec is not None
        return value[tuple(map(_slice, spec.local_offset(), spec.local_shape()))]

    def hyper(self, state: Any) -> Any:
        """The hyperparameters at this step: a namedtuple of float64[].

        float64, so that 1 - b2 and b2 ** step are right; what reaches the leaves is rounded once.
        """
        values = {}
        for name, value in self.hyperparams.items():
            if not isinstance(value, (Tensor, int, float)):
                with at_least_float32():
                    value = value(state.step)
                value = _plain(value)
            if isinstance(value, Tensor):
                values[name] = _check.finite(self.name, name, value.detach() if _is_param(value) else value).double()
            else:
                values[name] = _constant(self._float64, name, value, torch.float64)
        return record(tuple(values))(*values.values())

    def share(self, updates: Tree, state: Any, params: Tree, h: Any) -> Shared:
        """Compute, once for the whole tree, what the leaf function is given and how the shared state goes on."""
        derived: dict[str, Tensor] = {}
        if self.scalars is not None:
            derived.update(self.scalars(state._replace(**dict.fromkeys(self.leaf_fields)), h))
        if self.prepare is not None:
            derived.update(self.prepare(updates, state, params, h))
        derived = {name: _plain(value) for name, value in derived.items()}
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

    def leaf(self, g: Tensor, fields: Mapping[str, Tensor], p: Tensor | None, scalars: Mapping[str, Tensor]) -> Any:
        """Call the leaf function: (update, new moments and statistics)."""
        blank = dict.fromkeys(self.state_class._fields)
        c = record(tuple(scalars))(*scalars.values())
        result = self.update_leaf(g, self.state_class(**{**blank, **fields}), p, c)
        update, new = check_pair(self.update_leaf, self.state_class, result)
        news = {name: getattr(new, name) for name in self.leaf_fields}
        check_leaf(self.update_leaf, g, update, {name: news[name] for name in self.moments})
        for name in self.statistics:
            check_leaf(self.update_leaf, fields[name], fields[name], {name: news[name]}, f"the statistic {name!r}")
        return update, news

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The pure update, leaf by leaf."""
        speaker = f"{self.name}.update"
        self.check_declaration()
        _check.state_class(speaker, state, self.state_class)
        # Without params, moments say where the leaves are: a gradient may be None.
        reference = next((getattr(state, name) for name in self.moments), updates) if params is None else params
        leaves, treedef = _tree.flatten(reference)
        paths = _tree.names(treedef)
        us = _check.same_structure(speaker, "updates", treedef, updates)
        _check.updates(speaker, paths, us, leaves)
        us = [None if u is None else as_sharded(u, like)[0] for u, like in zip(us, leaves, strict=True)]
        if params is not None:
            updates = _tree.unflatten(treedef, us)
        if params is None and self.needs_params:
            raise ValueError(f"{speaker}: params are needed; call update(updates, state, params)")
        kept = {
            name: _check.same_structure(speaker, f"state.{name}", treedef, getattr(state, name))
            for name in self.leaf_fields
        }
        for name in self.moments:
            _check.moments(speaker, name, paths, leaves, kept[name])
        for name, statistic in self.statistics.items():
            for path, leaf, value in zip(paths, leaves, kept[name], strict=True):
                _statistics.check(speaker, name, path, statistic, leaf, value)
        shared = self.share(updates, state, params, self.hyper(state))
        tasks = [
            Task(path, u, {name: kept[name][i] for name in kept}, None if params is None else leaf)
            for i, (path, u, leaf) in enumerate(zip(paths, us, leaves, strict=True))
            if u is not None
        ]
        done = iter(self._update_leaves(speaker, tasks, shared.scalars))
        new_us: list[Any] = []
        news: dict[str, list[Any]] = {name: [] for name in kept}
        for i, u in enumerate(us):
            new_u, new = (None, {name: kept[name][i] for name in kept}) if u is None else next(done)
            new_us.append(new_u)
            for name in news:
                news[name].append(new[name])
        new_state = state._replace(
            **shared.state, **{name: _tree.unflatten(treedef, new) for name, new in news.items()}
        )
        return _tree.unflatten(treedef, new_us), new_state

    def _update_leaves(self, speaker: str, tasks: list[Task], scalars: Mapping[str, Tensor]) -> list[Any]:
        """(new update, new fields) of each leaf. A rule that needs whole leaves is given them."""
        if self.elementwise or self.reduces:
            return [self._update_part(speaker, task, scalars) for task in tasks]
        sharded = [task for task in tasks if task.spec is not None]
        parts = iter(self._update_wholes(speaker, sharded, scalars))
        return [self._update_part(speaker, t, scalars) if t.spec is None else t.wrapped(*next(parts)) for t in tasks]

    @torch.no_grad()
    def _update_wholes(self, speaker: str, tasks: list[Task], scalars: Mapping[str, Tensor]) -> list[Any]:
        """This rank's parts of (new update, new fields) of sharded leaves that are worked on as a whole."""

        def compute(task: Task, wholes: list[Tensor]) -> list[Tensor]:
            p = wholes.pop() if task.param is not None else None
            update, new = self.leaf(wholes[0], dict(zip(task.fields, wholes[1:], strict=True)), p, scalars)
            return [update, *new.values()]

        results = run_whole(speaker, tasks, compute)
        return [(update, dict(zip(self.leaf_fields, new, strict=True))) for update, *new in results]

    def _update_part(self, speaker: str, task: Task, scalars: Mapping[str, Tensor]) -> Any:
        """One leaf, or what this rank holds of it. A plain tensor keeps its autograd history, for meta-gradients."""
        g, *fields = task.parts()
        p = fields.pop() if task.param is not None else None
        if not self.elementwise and not self.reduces:
            # As whole sharded leaves are, so that what an operation makes of strides is the same.
            g, p, fields = g.contiguous(), None if p is None else p.contiguous(), [x.contiguous() for x in fields]
        named = dict(zip(task.fields, fields, strict=True))
        plain = (Tensor, nn.Parameter)  # others, of function transforms, have no versions
        given = [x for x in (g, p, *fields) if x is not None and type(x) in plain and not x.is_inference()]
        versions = [x._version for x in given]
        result = self._watched_leaf(speaker, task, g, named, p, scalars)
        if can_watch() and versions != [x._version for x in given]:
            raise ValueError(
                f"{speaker}: the leaf function {name_of(self.update_leaf)} writes into one of its arguments at "
                f"{task.path!r}; it must be pure: clone what it writes to"
            )
        return task.wrapped(*result)

    def _watched_leaf(self, speaker: str, task: Task, g: Tensor, named: Any, p: Tensor | None, scalars: Any) -> Any:
        """The leaf function's results; it is watched if it may not combine elements by itself."""
        if not self.elementwise and not self.reduces:
            return self.leaf(g, named, p, scalars)
        shape = tuple(g.shape)
        # Watched once for each shape: a function may do other things for other shapes, but hardly at other times.
        # In inference mode operations are not taken apart, and most could not be told from a mixture.
        is_seen = can_watch() and not torch.is_inference_mode_enabled()
        guard = Guard() if is_seen and shape not in self._watched else None
        with (
            _current.inside(_current.Leaf(task.path, shape, task.spec, guard) if self.reduces else None),
            watched(guard, speaker, self.update_leaf, task.path),
        ):
            result = self.leaf(g, named, p, scalars)
        if guard is not None:
            self._watched.add(shape)
        return result


def check_pair(function: Callable[..., Any], state_class: Any, result: Any) -> tuple[Any, Any]:
    """Refuse what a leaf function returned if it is not an update and a state."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], state_class):
        return result
    kinds = [type(x).__name__ for x in result] if isinstance(result, tuple) else type(result).__name__
    raise TypeError(
        f"leafwise: {name_of(function)} must return (update, state), with a state of class {state_class.__name__}, got "
        f"{kinds}"
    )


def check_leaf(
    function: Callable[..., Any],
    like: Tensor,
    update: Any,
    moments: Mapping[str, Any],
    whose: str = "g",
) -> None:
    """Refuse what a leaf function returned if it is not shaped like its leaf, or like what it was given."""
    for what, x in [("update", update), *moments.items()]:
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != torch.float32:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            speaker = name_of(function)
            raise ValueError(
                f"leafwise: {speaker} must return float32 tensors of {whose}'s shape {tuple(like.shape)}, got for "
                f"{what}: {got}"
            )


def _slice(offset: int, length: int) -> slice:
    return slice(offset, offset + length)


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


def _plain(value: Any) -> Tensor:
    """A number of the whole tree, where it is, or on the CPU, whatever the default device.

    torch's norm of a DTensor is a DTensor, which has no address for a kernel.
    """
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


@contextmanager
def at_least_float32() -> Iterator[None]:
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
