"""Hyperparameters of a param group, as 0-d tensors that the compiled step reads anew."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Hypers:
    """The hyperparameters of one group: a tensor for each number, so that no schedule compiles anything again.

    What is a number is decided by the default, not by the group: a float or a tensor is one, and so is each entry of a
    tuple with a float in it. Anything else (an int, a bool, a string) is handed on as it is, and stays as it is.

    Args:
        function: Of the hyperparameters; called with numbers, it checks their ranges.
        defaults: Hyperparameter by name.
        group: The group, with a value for each name.
    """

    def __init__(self, function: Callable[..., Any], defaults: Mapping[str, Any], group: Mapping[str, Any]):
        self.function = function
        self.defaults = dict(defaults)
        self.values: dict[str, Any] = {name: _place(value, group[name]) for name, value in defaults.items()}
        # float64[], or a tuple of them; what is no number, as given
        self.accepted: list[float] | None = None  # the numbers that `function` was last called with

    def read(self, where: str, groups: Sequence[Mapping[str, Any]], index: int) -> list[tuple[Tensor, float]]:
        """The group's numbers, each with the tensor that it is for. Nothing is written to the tensors.

        `function` is called only if a number has changed: with floats, but with the group's tensor where the default is
        a tensor, whose range is not looked at.

        Args:
            where: Who speaks in errors, and what `groups` is called there: "Optimizer.step: param_groups".
            groups: The groups as they are now.
            index: Of the group that is read.

        Raises:
            TypeError, ValueError: for what is missing, no number, not finite or out of its range, and for a changed
                value that is no number.
        """
        speaker, _, source = where.partition(": ")
        found: list[tuple[Tensor, float]] = []
        given: dict[str, Any] = {}
        for name, place in self.values.items():
            what = f"{speaker}: {name} of group {index}"
            if name not in groups[index]:
                raise ValueError(f"{what} is missing; set {source}[{index}][{name!r}]")
            value, default = groups[index][name], self.defaults[name]
            if isinstance(place, Tensor):
                found.append((place, _number(what, value)))
                given[name] = _argument(default, value)
            elif isinstance(place, tuple) and any(isinstance(x, Tensor) for x in place):
                if not isinstance(value, (tuple, list)) or len(value) != len(place):
                    raise ValueError(f"{what} must be {len(place)} numbers, got {value!r}")
                found += [(x, _number(what, v)) for x, v in zip(place, value, strict=True)]
                given[name] = tuple(_argument(d, v) for d, v in zip(default, value, strict=True))
            elif value is not place and _as_list(value) != _as_list(place):
                raise ValueError(
                    f"{what} was {place!r} when the optimizer was made, got {value!r}; only numbers whose default is a "
                    "float can be changed"
                )
            else:
                given[name] = place
        numbers = [number for _, number in found]
        if numbers != self.accepted:
            try:
                self.function(**given)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{speaker}: group {index}: {error}") from error
            self.accepted = numbers
        return found


def _place(default: Any, value: Any) -> Any:
    if isinstance(default, (float, Tensor)):
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if isinstance(default, (tuple, list)) and any(isinstance(x, (float, Tensor)) for x in default):
        return tuple(torch.zeros((), dtype=torch.float64, device="cpu") for _ in default)
    return value


def _argument(default: Any, value: Any) -> Any:
    """What a function is given to check: a number, which has a range, unless a tensor was meant."""
    return value if isinstance(default, Tensor) or not isinstance(value, Tensor) else float(value)


def _as_list(value: Any) -> Any:
    """torch.distributed.checkpoint makes lists of tuples."""
    return list(value) if isinstance(value, tuple) else value


def _number(what: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"{what} must be a number, got a tensor of shape {tuple(value.shape)}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a number, got {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number
