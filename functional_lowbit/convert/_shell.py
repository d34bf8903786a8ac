"""An `fl.optim` optimizer as the target: the state_dict that it would have saved."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from functional_lowbit.convert._fill import fill
from functional_lowbit.convert._match import Sides, match
from functional_lowbit.convert._read import Read
from functional_lowbit.convert._saved import Saved, SavedParam
from functional_lowbit.optim import _entries
from functional_lowbit.optim._optimizer import Optimizer

SWITCHES = ("maximize", "nesterov")  # what moments are of, and what becomes of them


def params_in_order(speaker: str, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameter by name, in the order of the groups.

    Raises:
        TypeError, ValueError: for groups whose parameters are others than those given.
    """
    optimizer._settle(speaker)
    names = {id(p): name for tree in optimizer._trees for name, p in tree.params.items()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def into_optimizer(
    sides: Sides, saved: Saved, target: Optimizer, read: Any, check: Any, step: int | None
) -> dict[str, Any]:
    """A state_dict for `target.load_state_dict`. Nothing is written.

    Args:
        sides: Who speaks in errors, and of what.
        saved: What was saved.
        target: The optimizer.
        read: `read(param) -> Read`.
        check: `check(states, reads)` refuses what the target cannot go on with.
        step: For every counter, if not None.
    """
    speaker = sides.speaker
    params = params_in_order(speaker, target)
    found = match(sides, saved.params, params)
    reads: dict[str, Read] = {name: read(p) for name, p in found.items()}
    check([tree.state for tree in target._trees], reads)
    entries: dict[str, dict[str, Any]] = {}
    for tree in target._trees:
        state = fill(speaker, tree.state, {n: r for n, r in reads.items() if n in tree.params}, step, tree.params)
        own: dict[str, dict[str, Any]] = {name: {} for name in tree.params}
        shared: dict[str, Any] = {}

        def note(owner: str | None, name: str, leaf: Any, own: Any = own, shared: Any = shared) -> Any:
            (shared if owner is None else own[owner])[name] = leaf
            return leaf

        _entries.map_leaves(note, state, tree.params)
        for name, p in tree.params.items():
            entries[name] = _entries.save({**own[name], **shared}, p.device)
    result = target.state_dict()
    names = iter(params)
    groups = []
    for i, group in enumerate(result["param_groups"]):
        members = [next(names) for _ in group["params"]]
        groups.append({**group, **_carried(speaker, i, group, [found[n] for n in members if n in found], saved.groups)})
    return {**result, "state": {i: entries[name] for i, name in enumerate(params)}, "param_groups": groups}


def _carried(
    speaker: str, index: int, group: Mapping[str, Any], members: list[SavedParam], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Hyperparameters of the saved groups under the names that the target's group has numbers for."""
    carried: dict[str, Any] = {}
    for p in members:
        same_switches(f"{speaker}: group {p.group}", groups[p.group], f"group {index} of the target", group)
        for name, value in groups[p.group].items():
            value = _number(value)
            fits = name in group and _kind(_number(group[name])) == _kind(value)
            if value is None or not (fits or (name == "initial_lr" and "lr" in group)):
                continue
            if name in carried and carried[name] != value:
                raise ValueError(
                    f"{speaker}: group {index} of the target has parameters of saved groups whose {name} is "
                    f"{carried[name]} and {value}; give the target the groups of the saved optimizer"
                )
            carried[name] = value
    return carried


def _number(value: Any) -> Any:
    """A float, or a tuple of floats; None for anything else."""
    if isinstance(value, (tuple, list)):
        numbers = tuple(map(_number, value))
        return None if None in numbers else numbers
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _kind(value: Any) -> Any:
    return len(value) if isinstance(value, tuple) else type(value)


def same_switches(speaker: str, given: Mapping[str, Any], target: str, group: Mapping[str, Any]) -> None:
    """Refuse a group whose moments are of other things, or are used otherwise, than those that are given.

    Args:
        speaker: Who speaks in errors, and of what.
        given: The group that the moments come from.
        target: What `group` is called in errors.
        group: The group that they are for.
    """
    for name in SWITCHES:
        theirs, own = given.get(name), group.get(name)
        if isinstance(theirs, bool) and isinstance(own, bool) and theirs != own:
            raise ValueError(
                f"{speaker} has {name}={theirs}, {target} {name}={own}, which cannot change; make the target with the "
                "other"
            )
