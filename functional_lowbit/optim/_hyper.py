"""Hyperparameters of a param group: read as plain numbers, and the transformation made anew when one has changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.contract.refuse import is_transformation
from functional_lowbit._refused import WrongType, WrongValue


class Hypers:
    """The hyperparameters of one group.

    What is a number is decided by the default, not by the group: a float or a tensor is one, and so is each entry of a
    tuple with a float in it. Anything else (an int, a bool, a string) is handed on as it is, and stays as it is.

    Args:
        function: Of the hyperparameters, by name; makes the group's transformation.
        defaults: Hyperparameter by name.
        group: The group, with a value for each name.
    """

    def __init__(self, function: Callable[..., Any], defaults: Mapping[str, Any], group: Mapping[str, Any]):
        self.function = function
        self.defaults = dict(defaults)
        self.fixed = {name: group[name] for name, value in defaults.items() if not _is_number(value)}
        self.accepted: list[float] | None = None  # the numbers that `function` was last called with

    def read(self, source: str, groups: Sequence[Mapping[str, Any]], index: int) -> GradientTransformation | None:
        """The transformation that the group's numbers make; None if they are those of the last time.

        The function is given floats; where a default is a tensor, a tensor: a copy of the group's own, which may be
        replaced, or written to where the group does not see it.

        Args:
            source: What `groups` is called in errors.
            groups: The groups as they are now.
            index: Of the group that is read.

        Raises:
            TypeError, ValueError: for what is missing, no number, not finite or out of its range, for a changed value
                that is no number, and for a function that makes no transformation.
        """
        numbers: list[float] = []
        given: dict[str, Any] = {}
        for name, default in self.defaults.items():
            what = f"{name} of group {index}"
            if name not in groups[index]:
                raise WrongValue(f"{what} is missing; set {source}[{index}][{name!r}]")
            value = groups[index][name]
            if name in self.fixed:
                given[name] = self.fixed[name]
                if value is not given[name] and _as_list(value) != _as_list(given[name]):
                    raise WrongValue(
                        f"{what} was {given[name]!r} when the optimizer was made, got {value!r}; only numbers whose "
                        "default is a float can be changed"
                    )
            elif isinstance(default, (tuple, list)):
                if not isinstance(value, (tuple, list)) or len(value) != len(default):
                    raise WrongValue(f"{what} must be {len(default)} numbers, got {value!r}")
                own = [_number(what, v) for v in value]
                given[name] = tuple(map(_argument, default, value, own))
                numbers += own
            else:
                numbers.append(_number(what, value))
                given[name] = _argument(default, value, numbers[-1])
        if numbers == self.accepted:
            return None
        tx = self._made(index, given)
        self.accepted = numbers
        return tx

    def _made(self, index: int, given: Mapping[str, Any]) -> GradientTransformation:
        try:
            tx = self.function(**given)
        except (TypeError, ValueError) as error:
            kind = WrongType if isinstance(error, TypeError) else WrongValue
            raise kind(f"group {index}: {error}") from error
        if not is_transformation(tx):
            raise WrongType(
                f"group {index}: tx(**hyperparameters) must return a GradientTransformation, got {type(tx).__name__}"
            )
        return tx


def _is_number(default: Any) -> bool:
    if isinstance(default, (tuple, list)):
        return any(isinstance(x, (float, Tensor)) for x in default)
    return isinstance(default, (float, Tensor))


def _argument(default: Any, value: Any, number: float) -> float | Tensor:
    """What a function is given: a float, unless a tensor was meant, whose methods it may need."""
    if not isinstance(default, Tensor):
        return number
    return (
        value.detach().clone() if isinstance(value, Tensor) else torch.tensor(number, dtype=torch.float64, device="cpu")
    )


def _as_list(value: Any) -> Any:
    """torch.distributed.checkpoint makes lists of tuples."""
    return list(value) if isinstance(value, tuple) else value


def _number(what: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.ndim:
        raise WrongValue(f"{what} must be a number, got a tensor of shape {tuple(value.shape)}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise WrongType(f"{what} must be a number, got {value!r}") from error
    if not math.isfinite(number):
        raise WrongValue(f"{what} must be finite, got {number}")
    return number
