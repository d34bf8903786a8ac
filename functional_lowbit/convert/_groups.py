"""Param groups on both sides: whose parameters they are of, which hyperparameters are carried over, what must agree."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._saved import SavedParam

SWITCHES = ("maximize", "nesterov")  # what moments are of, and what becomes of them
# What torch's Adam and SGD read of a group, but for the switches, which they set themselves.
HYPERS = ({"lr", "betas", "eps", "weight_decay"}, {"lr", "momentum", "dampening", "weight_decay", "nesterov"})


@runtime_checkable
class Shell(Protocol):
    """An optimizer that holds states of ours, such as `fl.optim.Optimizer`: what is asked of it."""

    param_groups: list[dict[str, Any]]

    def parts(self) -> list[tuple[Any, dict[str, Tensor]]]:
        """Each state, and the parameters that it is of, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers return it."""
        ...

    def state_dict_with(self, states: Sequence[Any]) -> dict[str, Any]:
        """The same, with other states."""
        ...


def params_in_order(optimizer: Shell) -> dict[str, Tensor]:
    """Parameter by name, in the order of the groups.

    Raises:
        TypeError, ValueError: for groups whose parameters are others than those given.
    """
    names = {id(p): name for _, params in optimizer.parts() for name, p in params.items()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def are_whole(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups have all hyperparameters that an optimizer of torch reads."""
    return bool(groups) and all(any(names <= set(group) for names in HYPERS) for group in groups)


def with_hyperparams(
    made: dict[str, Any], params: Sequence[SavedParam | None], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state_dict for an optimizer of ours whose groups have the saved hyperparameters.

    Args:
        made: The state_dict with the numbers of the target.
        params: What was saved of each of its parameters, in order; None for one that was not.
        groups: The saved groups.

    Raises:
        ValueError: for a group that is made of several ones that differ, and for switches that differ.
    """
    rest = iter(params)
    own = [[p for _, p in zip(group["params"], rest, strict=False) if p] for group in made["param_groups"]]
    new = [
        {**group, **_carried(i, group, members, groups)}
        for i, (group, members) in enumerate(zip(made["param_groups"], own, strict=True))
    ]
    return {**made, "param_groups": new}


def _carried(
    index: int,
    group: Mapping[str, Any],
    members: Sequence[SavedParam],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Hyperparameters of the saved groups under the names that the target's group has numbers for."""
    carried: dict[str, Any] = {}
    for p in members:
        same_switches(f"group {p.group}", groups[p.group], f"group {index} of the target", group)
        for name, value in groups[p.group].items():
            value = _number(value)
            fits = name in group and _kind(_number(group[name])) == _kind(value)
            if value is None or not (fits or (name == "initial_lr" and "lr" in group)):
                continue
            if name in carried and carried[name] != value:
                raise WrongValue(
                    f"group {index} of the target has parameters of saved groups whose {name} is "
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


def same_switches(source: str, given: Mapping[str, Any], target: str, group: Mapping[str, Any]) -> None:
    """Refuse a group whose moments are of other things, or are used otherwise, than those that are given.

    Args:
        source: What errors call the group that the moments come from.
        given: That group.
        target: What errors call the group that they are for.
        group: That group.
    """
    for name in SWITCHES:
        theirs, own = given.get(name), group.get(name)
        if isinstance(theirs, bool) and isinstance(own, bool) and theirs != own:
            raise WrongValue(
                f"{source} has {name}={theirs}, {target} {name}={own}, which cannot change; make the target with the "
                "other"
            )
