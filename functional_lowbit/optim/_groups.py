"""Param groups read: parameters by name, and the transformation that their hyperparameters make."""

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.contract.refuse import is_transformation
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.optim._hyper import Hypers


class NumberlessGroup(dict[str, Any]):
    """A group of a transformation. Torch's schedulers ask it for `lr`, and are told why there is none."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"Optimizer: a group has no {key!r}, since a transformation reads no numbers from it; give a function "
            "tx(**hyperparameters) and defaults, or give the transformation a schedule"
        )


@speaking("Optimizer")
def check_tx(tx: Any, with_defaults: bool) -> None:
    """Refuse what is neither a transformation nor, with defaults, a function that makes one."""
    kind = type(tx).__name__
    if not with_defaults and not is_transformation(tx):
        raise WrongType(f"tx must be a GradientTransformation, got {kind}; a function that makes one needs defaults")
    if with_defaults and (is_transformation(tx) or not callable(tx)):
        raise WrongType(f"with defaults, tx must be a function of hyperparameters, got {kind}")


@speaking("Optimizer")
def params_of(groups: Sequence[Mapping[str, Any]], members: Sequence[int], taken: Collection[str]) -> dict[str, Tensor]:
    """The parameters of some groups by name; without names, by their number through all groups.

    Args:
        groups: All groups, as torch keeps them.
        members: The indices of those that are meant.
        taken: Names that parameters of other groups have.

    Raises:
        ValueError: for two parameters of one name, a parameter that stands twice, and one without memory.
    """
    params: dict[str, Tensor] = {}
    seen: set[int] = set()
    for i in members:
        first = sum(len(group["params"]) for group in groups[:i])
        own = groups[i]["params"]
        names = groups[i].get("param_names") or [str(first + k) for k in range(len(own))]
        for name, p in zip(names, own, strict=True):
            if name in params or name in taken:
                raise WrongValue(f"two parameters have the name {name!r}; rename one")
            if id(p) in seen:
                raise WrongValue(f"parameter {name!r} stands twice in group {i}; leave one out")
            if p.device.type == "meta":
                raise WrongValue(
                    f"parameter {name!r} is on the meta device; give it memory first (Module.to_empty), since its "
                    "state is made now"
                )
            params[name] = p
            seen.add(id(p))
    return params


def refuse_numbers(groups: Sequence[Mapping[str, Any]], members: Sequence[int]) -> None:
    """Refuse a hyperparameter that would have no effect."""
    for i in members:
        for name, value in groups[i].items():
            if name != "params" and _has_numbers(value):
                raise WrongValue(
                    f"group {i} has {name!r}, which a transformation does not read; give a function "
                    "tx(**hyperparameters) and defaults"
                )


@speaking("Optimizer")
def make_tx(
    function: Callable[..., Any], defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], index: int
) -> tuple[GradientTransformation, Hypers]:
    """The transformation of a group, and what makes it anew when a number of the group has changed."""
    hypers = Hypers(function, defaults, groups[index])
    tx = hypers.read("param_groups", groups, index)
    assert tx is not None  # no numbers were known yet
    return tx, hypers


def _has_numbers(value: Any) -> bool:
    """torch.distributed.checkpoint makes lists of tuples."""
    if isinstance(value, list):
        return any(map(_has_numbers, value))
    return isinstance(value, (Real, tuple, Tensor)) and not isinstance(value, bool)  # Real: numpy's numbers too
