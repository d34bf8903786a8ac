"""Param groups on both sides: whose parameters they are of, which hyperparameters are carried over, what must agree."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_lowbit._refused import speaking
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.optim._optimizer import Optimizer

SWITCHES = ("maximize", "nesterov")  # what moments are of, and what becomes of them
# What torch's Adam and SGD read of a group, but for the switches, which they set themselves.
HYPERS = ({"lr", "betas", "eps", "weight_decay"}, {"lr", "momentum", "dampening", "weight_decay", "nesterov"})


def params_in_order(speaker: str, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameter by name, in the order of the groups.

    Raises:
        TypeError, ValueError: for groups whose parameters are others than those given.
    """
    with speaking(speaker):
        parts = optimizer.parts()
    names = {id(p): name for _, params in parts for name, p in params.items()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def are_whole(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups have all hyperparameters that an optimizer of torch reads."""
    return bool(groups) and all(any(names <= set(group) for names in HYPERS) for group in groups)


def with_hyperparams(
    speaker: str, made: dict[str, Any], params: Sequence[SavedParam | None], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state_dict for an optimizer of ours whose groups have the saved hyperparameters.

    Args:
        speaker: Who speaks in errors.
        made: The state_dict with the numbers of the target.
        params: What was saved of each of its parameters, in order; None for one that was not.
        groups: The saved groups.

    Raises:
        ValueError: for a group that is made of several ones that differ, and for switches that differ.
    """
    rest = iter(params)
    own = [[p for _, p in zip(group["params"], rest, strict=False) if p] for group in made["param_groups"]]
    new = [
        {**group, **_carried(speaker, i, group, members, groups)}
        for i, (group, members) in enumerate(zip(made["param_groups"], own, strict=True))
    ]
    return {**made, "param_groups": new}


def _carried(
    speaker: str,
    index: int,
    group: Mapping[str, Any],
    members: Sequence[SavedParam],
    groups: Sequence[Mapping[str, Any]],
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
