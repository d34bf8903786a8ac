"""Which saved parameter is which of the target's: the same tensor, the same name, the same number, or in order."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

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

    Raises:
        ValueError: for parameters that only one side has, and for another number of them.
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
