"""The pure update of a rule: leaf by leaf, on whole trees. Made by `leafwise`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit import _optree
from functional_lowbit._core.leafwise import current
from functional_lowbit._core.leafwise.guard import Guard, can_watch, name_of, watched
from functional_lowbit._core.leafwise.rule import Rule
from functional_lowbit._core.leafwise.whole import Task, run_whole
from functional_lowbit._core.state import fits, statistics as kept_statistics
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._optree import Tree
from functional_lowbit._private import version_of
from functional_lowbit._refused import WrongValue, speaking


@dataclass(frozen=True, eq=False)
class Leafwise(Rule):
    """The `update` of a transformation that treats each leaf alone."""

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The pure update, leaf by leaf."""
        with speaking(f"{self.name}.update"):
            return self._update(updates, state, params)

    def _update(self, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        self.check_declaration()
        fits.state_class(state, self.state_class)
        # Without params, moments say where the leaves are: a gradient may be None.
        reference = next((getattr(state, name) for name in self.moments), updates) if params is None else params
        leaves, treedef = _optree.flatten(reference)
        paths = _optree.names(treedef)
        us = fits.same_structure("updates", treedef, updates)
        fits.updates(paths, us, leaves)
        us = [None if u is None else as_sharded(u, like)[0] for u, like in zip(us, leaves, strict=True)]
        if params is not None:
            updates = _optree.unflatten(treedef, us)
        if params is None and self.needs_params:
            raise WrongValue("params are needed; call update(updates, state, params)")
        kept = {name: fits.same_structure(f"state.{name}", treedef, getattr(state, name)) for name in self.leaf_fields}
        for name in self.moments:
            fits.moments(name, paths, leaves, kept[name])
        for name, statistic in self.statistics.items():
            for path, leaf, value in zip(paths, leaves, kept[name], strict=True):
                kept_statistics.check(name, path, statistic, leaf, value)
        shared = self.share(updates, state, params, self.hyper(state))
        tasks = [
            Task(path, u, {name: kept[name][i] for name in kept}, None if params is None else leaf)
            for i, (path, u, leaf) in enumerate(zip(paths, us, leaves, strict=True))
            if u is not None
        ]
        done = iter(self._update_leaves(tasks, shared.scalars))
        new_us: list[Any] = []
        news: dict[str, list[Any]] = {name: [] for name in kept}
        for i, u in enumerate(us):
            new_u, new = (None, {name: kept[name][i] for name in kept}) if u is None else next(done)
            new_us.append(new_u)
            for name in news:
                news[name].append(new[name])
        new_state = state._replace(
            **shared.state, **{name: _optree.unflatten(treedef, new) for name, new in news.items()}
        )
        return _optree.unflatten(treedef, new_us), new_state

    def _update_leaves(self, tasks: list[Task], scalars: Mapping[str, Tensor]) -> list[Any]:
        """(new update, new fields) of each leaf. A rule that needs whole leaves is given them."""
        if self.elementwise or self.reduces:
            return [self._update_part(task, scalars) for task in tasks]
        sharded = [task for task in tasks if task.spec is not None]
        parts = iter(self._update_wholes(sharded, scalars))
        return [self._update_part(t, scalars) if t.spec is None else t.wrapped(*next(parts)) for t in tasks]

    @torch.no_grad()
    def _update_wholes(self, tasks: list[Task], scalars: Mapping[str, Tensor]) -> list[Any]:
        """This rank's parts of (new update, new fields) of sharded leaves that are worked on as a whole."""

        def compute(task: Task, wholes: list[Tensor]) -> list[Tensor]:
            p = wholes.pop() if task.param is not None else None
            update, new = self.leaf(wholes[0], dict(zip(task.fields, wholes[1:], strict=True)), p, scalars)
            return [update, *new.values()]

        results = run_whole(tasks, compute)
        return [(update, dict(zip(self.leaf_fields, new, strict=True))) for update, *new in results]

    def _update_part(self, task: Task, scalars: Mapping[str, Tensor]) -> Any:
        """One leaf, or what this rank holds of it. A plain tensor keeps its autograd history, for meta-gradients."""
        g, *fields = task.parts()
        p = fields.pop() if task.param is not None else None
        if not self.elementwise and not self.reduces:
            # As whole sharded leaves are, so that what an operation makes of strides is the same.
            g, p, fields = g.contiguous(), None if p is None else p.contiguous(), [x.contiguous() for x in fields]
        named = dict(zip(task.fields, fields, strict=True))
        plain = (Tensor, nn.Parameter)  # others, of function transforms, have no versions
        given = [x for x in (g, p, *fields) if x is not None and type(x) in plain and not x.is_inference()]
        versions = list(map(version_of, given))
        result = self._watched_leaf(task, g, named, p, scalars)
        if can_watch() and versions != list(map(version_of, given)):
            raise WrongValue(
                f"the leaf function {name_of(self.update_leaf)} writes into one of its arguments at {task.path!r}; it "
                "must be pure: clone what it writes to",
                task.path,
            )
        return task.wrapped(*result)

    def _watched_leaf(self, task: Task, g: Tensor, named: Any, p: Tensor | None, scalars: Any) -> Any:
        """The leaf function's results; it is watched if it may not combine elements by itself."""
        if not self.elementwise and not self.reduces:
            return self.leaf(g, named, p, scalars)
        shape = tuple(g.shape)
        # Watched once for each shape: a function may do other things for other shapes, but hardly at other times.
        # In inference mode operations are not taken apart, and most could not be told from a mixture.
        is_seen = can_watch() and not torch.is_inference_mode_enabled()
        guard = Guard() if is_seen and shape not in self._watched else None
        with (
            current.inside(current.Leaf(task.path, shape, task.spec, guard) if self.reduces else None),
            watched(guard, self.update_leaf, task.path),
        ):
            result = self.leaf(g, named, p, scalars)
        if guard is not None:
            self._watched.add(shape)
        return result
