"""Param groups that are compared: with those that the optimizer was made of, and with those of a file."""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from functional_lowbit._refused import WrongValue, speaking


def check_params(given: Sequence[Mapping[str, Tensor]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that were changed by hand: the optimizer has no state of what is new, and would not step it."""
    if len(groups) != len(given):
        raise WrongValue(
            f"param_groups has {len(groups)} groups, but {len(given)} were given; add one with add_param_group, and "
            "make a new optimizer to leave one out"
        )
    for i, (own, group) in enumerate(zip(given, groups, strict=True)):
        now = group["params"]
        if len(now) == len(own) and all(map(is_, now, own.values())):
            continue
        here = {id(p) for p in now}
        for name, p in own.items():
            if id(p) not in here:
                raise WrongValue(
                    f"parameter {name!r} was replaced in group {i}, or taken out of it; make a new optimizer"
                )
        known = {id(p) for p in own.values()}
        for k, p in enumerate(now):
            if id(p) not in known:
                shape = tuple(getattr(p, "shape", ()))
                raise WrongValue(
                    f"parameter {k} of group {i}, of shape {shape}, was put there by hand; take it out and give it to "
                    "add_param_group"
                )
        names = {id(p): name for name, p in own.items()}
        k = next((k for k, (p, q) in enumerate(zip(own.values(), now, strict=False)) if p is not q), len(own))
        raise WrongValue(f"parameter {names[id(now[k])]!r} of group {i} was put at position {k}; make a new optimizer")


def place_of(p: Tensor) -> tuple[Any, ...]:
    """Where a parameter is: device, global shape, mesh and placements."""
    return p.device, tuple(p.shape), getattr(p, "device_mesh", None), getattr(p, "placements", None)


def are_like(
    given: Sequence[Mapping[str, Tensor]], places: Mapping[str, tuple[Any, ...]], groups: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether other parameters, or moved ones, stand in the groups, each of the shape of the one that was given.

    At least one is another one, or on another device. What was only sharded in place is not meant.
    """
    if [len(group["params"]) for group in groups] != list(map(len, given)):
        return False
    has_changed = False
    for own, group in zip(given, groups, strict=True):
        for (name, old), p in zip(own.items(), group["params"], strict=True):
            device, shape, *sharding = places[name]
            if not isinstance(p, Tensor) or p.device.type == "meta" or tuple(p.shape) != shape:
                return False
            if p is old and list(place_of(p)[2:]) != sharding:
                return False
            has_changed |= p is not old or p.device != device
    return has_changed


@speaking("Optimizer.load_state_dict")
def check_file(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
    """Refuse a file without its parts, or of parameters by other names: torch's loading goes by position."""
    _has("state_dict", saved, "state", Mapping)
    _has("state_dict", saved, "param_groups", Sequence)
    for i, group in enumerate(saved["param_groups"]):
        _has(f"group {i} of state_dict", group, "params", Sequence)
    for i, (own, other) in enumerate(zip(groups, saved["param_groups"], strict=False)):  # torch compares how many
        if any(isinstance(k, str) for k in other["params"]):
            continue  # set_optimizer_state_dict has brought them in the order of the groups, but not their names
        names, saved_names = (group.get("param_names") or () for group in (own, other))
        for k, (name, there) in enumerate(zip(names, saved_names, strict=False)):
            if name != there:
                raise WrongValue(
                    f"parameter {k} of group {i} is {name!r}, but {there!r} in state_dict; use "
                    "set_optimizer_state_dict, which goes by name, or delete 'param_names' from the groups of "
                    "state_dict to load by position"
                )


def _has(what: str, holder: Any, key: str, kind: type) -> None:
    """Refuse what has no entry of this name and kind."""
    if not isinstance(holder, Mapping):
        problem = f"{what} must be a dict, got {type(holder).__name__}"
    elif key not in holder:
        problem = f"{what} has no entry {key!r}"
    elif not isinstance(holder[key], kind):
        wanted = "dict" if kind is Mapping else "list"
        problem = f"entry {key!r} of {what} must be a {wanted}, got {type(holder[key]).__name__}"
    else:
        return
    raise WrongValue(f"{problem}; it must come from Optimizer.state_dict")
