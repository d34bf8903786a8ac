"""Parameters and groups on both sides: which saved one is which of the target's, and what must agree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.masked_node import MaskedNode
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._saved import SavedParam


class Sides(NamedTuple):
    """How errors speak."""

    saved: str = "saved"
    target: str = "the target"
    unordered: str = ""  # the side that has names, and no order


def match(sides: Sides, saved: Sequence[SavedParam], targets: Mapping[str, Any]) -> dict[str, SavedParam]:
    """Saved parameters by the target's names.

    Args:
        sides: Who speaks in errors, and of what.
        saved: In order.
        targets: Name to parameter, in order; None where it is not known.

    Returns:
        For each name its saved parameter. Frozen parameters, of which optimizers need not know, may be missing.
    """
    tensors = {id(p): name for name, p in targets.items() if isinstance(p, Tensor)}
    if saved and all(id(p.tensor) in tensors for p in saved):
        return _checked(sides, targets, {tensors[id(p.tensor)]: p for p in saved})
    numbered = all(name.isdecimal() for name in targets)
    names = [p.name for p in saved if p.name is not None]
    if len(names) == len(saved) and len(set(names)) < len(names):
        name = next(x for x in names if names.count(x) > 1)
        raise WrongValue(f"two parameters of {sides.saved} have the name {name!r}; rename one")
    if len(names) == len(saved) and not (numbered and not any(x.isdecimal() for x in names)):
        return _checked(sides, targets, {str(p.name): p for p in saved})
    if numbered and not names:
        return _checked(sides, targets, {str(p.number): p for p in saved})
    return _in_order(sides, saved, targets)


def _checked(sides: Sides, targets: Mapping[str, Any], found: dict[str, SavedParam]) -> dict[str, SavedParam]:
    for name, p in found.items():
        if name not in targets and p.entries:
            raise WrongValue(f"{sides.saved} has {p.words}, which {sides.target} has not; {_near(name, targets)}")
    frozen = _frozen(targets)
    for name in targets:
        if name not in found and name not in frozen:
            raise WrongValue(
                f"{sides.target} has parameter {name!r}, which {sides.saved} has not; {_near(name, found)}"
            )
    return {name: found[name] for name in targets if name in found}


def _in_order(sides: Sides, saved: Sequence[SavedParam], targets: Mapping[str, Any]) -> dict[str, SavedParam]:
    names = list(targets)
    if len(saved) != len(names):
        frozen = _frozen(targets)
        names = [name for name in names if name not in frozen]
    if sides.unordered and len(names) > 1:
        other = sides.saved if sides.unordered == sides.target else sides.target
        raise WrongValue(
            f"{sides.unordered} has names of parameters, whose order was not saved, and {other} has "
            "none; make it of named parameters"
        )
    if len(saved) != len(names):
        raise WrongValue(
            f"{sides.saved} has {len(saved)} parameters, {sides.target} {len(targets)}; it is the "
            "state of another model, or of other groups"
        )
    return dict(zip(names, saved, strict=True))


def _frozen(targets: Mapping[str, Any]) -> set[str]:
    """Parameters that need no gradient, while others do."""
    still = {name for name, p in targets.items() if not getattr(p, "requires_grad", False)}
    return still if len(still) < len(targets) else set()


def _near(name: str, others: Mapping[str, Any]) -> str:
    """What a reader may have to do about a name."""
    for other in others:
        if other.endswith(f".{name}") or name.endswith(f".{other}"):
            return f"the other side has {other!r}: rename one of them"
    return "it is the state of another model, or of other groups"


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
    """Parameter by name, in the order of the groups."""
    names = {id(p): name for _, params in optimizer.parts() for name, p in params.items()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def are_whole(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups have all hyperparameters that an optimizer of torch reads."""
    return bool(groups) and all(any(names <= set(group) for names in HYPERS) for group in groups)


def with_hyperparams(
    made: dict[str, Any], params: Sequence[SavedParam | None], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state_dict for an optimizer of ours whose groups have the hyperparameters of the saved parameters."""
    left = iter(params)
    own = [[p for _, p in zip(group["params"], left, strict=False) if p] for group in made["param_groups"]]
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
    """Refuse a group whose moments are of other things, or are used otherwise, than those that are given."""
    for name in SWITCHES:
        theirs, own = given.get(name), group.get(name)
        if isinstance(theirs, bool) and isinstance(own, bool) and theirs != own:
            raise WrongValue(
                f"{source} has {name}={theirs}, {target} {name}={own}, which cannot change; make the target with the "
                "other"
            )


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(path, leaf) in the order in which dicts were filled, as `model.parameters()` goes; not sorted, as trees are.

    The leaf is None where a mask has taken it out. What is None in the tree is no leaf.
    """
    for at in _optree.nodes(tree, as_filled=True):
        if at.is_leaf or isinstance(at.node, MaskedNode):
            yield at.path, at.node if at.is_leaf else None
