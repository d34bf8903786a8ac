"""A function of one leaf with what is declared of it, as the `update` of trees. Made by `leafwise`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import Hyper, Moment, Statistic
from functional_lowbit._core.leafwise import current
from functional_lowbit._core.leafwise.guard import Guard, can_watch, check_elementwise, name_of, watched
from functional_lowbit._core.leafwise.scalars import at_least_float32, constant, is_param, plain, record
from functional_lowbit._core.state import fits, statistics as kept_statistics
from functional_lowbit._core.state.parts import Part, Rest
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, local_of


class Shared(NamedTuple):
    """What all leaves share in one step."""

    scalars: dict[str, Tensor]  # float32[]; what the leaf function sees as `c`
    state: dict[str, Tensor]  # new values of the state's shared fields


@dataclass(frozen=True, eq=False)
class Rule(Part):
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
        with speaking(self.name):
            return not self.elementwise or check_elementwise(self.update_leaf, self.state_class, tuple(self.moments))

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """A new state, moments kept as `rest` decides."""
        leaves, treedef = _optree.flatten(params)
        paths = _optree.names(treedef)
        kept: dict[str, list[Any]] = {name: [] for name in self.leaf_fields}
        with speaking(f"{self.name}.init"):
            fits.params(paths, leaves)
            for path, param in zip(paths, leaves, strict=True):
                firsts = self._first_values(path, param)
                for name, moment in self.moments.items():
                    kept[name].append(rest(name, moment, path, param, firsts.get(name)))
                for name, statistic in self.statistics.items():
                    kept[name].append(kept_statistics.first(name, path, statistic, param, firsts.get(name)))
        return self.state_class(
            **{name: self._first(name) for name in self.shared_fields},
            **{name: _optree.unflatten(treedef, values) for name, values in kept.items()},
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
        leaf = current.Leaf(path, tuple(part.shape), spec, guard) if self.reduces else None
        with current.inside(leaf), watched(guard, self.init_leaf, path):
            first = self.init_leaf(part)
        unknown = next((field for field in first if field not in self.leaf_fields), None)
        if unknown is not None:
            raise WrongValue(f"init returned {unknown!r}, which is no moment or statistic of the state", path)
        return {name: partial(self._own_part, name, param, value, whole) for name, value in first.items()}

    def _own_part(self, name: str, param: Tensor, value: Tensor, whole: bool) -> Tensor:
        """This rank's part of a first value; of a whole one it is cut out."""
        if not whole:
            return value
        spec = ShardSpec.of(param)
        if name in self.statistics:
            spec = kept_statistics.spec_of(self.statistics[name], param)[1]
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
                value = plain(value)
            if isinstance(value, Tensor):
                with speaking(self.name):
                    values[name] = refuse.finite(name, value.detach() if is_param(value) else value).double()
            else:
                values[name] = constant(self._float64, name, value, torch.float64)
        return record(tuple(values))(*values.values())

    def share(self, updates: Tree, state: Any, params: Tree, h: Any) -> Shared:
        """Compute, once for the whole tree, what the leaf function is given and how the shared state goes on."""
        derived: dict[str, Tensor] = {}
        if self.scalars is not None:
            derived.update(self.scalars(state._replace(**dict.fromkeys(self.leaf_fields)), h))
        if self.prepare is not None:
            derived.update(self.prepare(updates, state, params, h))
        derived = {name: plain(value) for name, value in derived.items()}
        new_state = {
            name: derived[name].to(getattr(state, name).dtype) for name in self.shared_fields if name in derived
        }
        if "step" in self.shared_fields and "step" not in new_state:
            new_state["step"] = state.step + 1
        scalars = {name: value.float() for name, value in derived.items()}
        for name, value in zip(h._fields, h, strict=True):
            if isinstance(self.hyperparams[name], (int, float)):
                scalars.setdefault(name, constant(self._float32, name, self.hyperparams[name], torch.float32))
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


def _slice(offset: int, length: int) -> slice:
    return slice(offset, offset + length)


def check_pair(function: Callable[..., Any], state_class: Any, result: Any) -> tuple[Any, Any]:
    """Refuse what a leaf function returned if it is not an update and a state."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], state_class):
        return result
    kinds = [type(x).__name__ for x in result] if isinstance(result, tuple) else type(result).__name__
    raise WrongType(
        f"{name_of(function)} must return (update, state), with a state of class {state_class.__name__}, got {kinds}",
        speaker="leafwise",
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
            raise WrongValue(
                f"{name_of(function)} must return float32 tensors of {whose}'s shape {tuple(like.shape)}, got for "
                f"{what}: {got}",
                speaker="leafwise",
            )
