"""Hyperparameters of a param group, as 0-d tensors that the compiled step reads anew."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Hypers:
    """The hyperparameters of one group: a tensor for each number, so that no schedule compiles anything again.

    What is a number is decided by the default, not by the group: a float or a tensor is one, and so is each entry of a
    tuple with a float in it. Anything else (an int, a bool, a string) is handed on as it is, and stays as it is.

    Args:
        defaults: Hyperparameter by name.
        group: The group, with a value for each name.
    """

    def __init__(self, defaults: Mapping[str, Any], group: Mapping[str, Any]):
        self.values: dict[str, Any] = {name: _place(value, group[name]) for name, value in defaults.items()}
        # float64[], or a tuple of them; what is no number, as given

    def fill(self, index: int, group: Mapping[str, Any]) -> None:
        """Copy the group's numbers into the tensors, which are written to once all have been looked at.

        Args:
            index: Of the group, for errors.
            group: The group as it is now.

        Raises:
            TypeError, ValueError: for what is missing, no number or not finite, and for a changed value that is no
                number.
        """
        found: list[tuple[Tensor, float]] = []
        for name, place in self.values.items():
            what = f"{name} of group {index}"
            if name not in group:
                raise ValueError(f"Optimizer.step: {what} is missing; set param_groups[{index}][{name!r}]")
            value = group[name]
            if isinstance(place, Tensor):
                found.append((place, _number(what, value)))
            elif isinstance(place, tuple) and any(isinstance(x, Tensor) for x in place):
                if not isinstance(value, (tuple, list)) or len(value) != len(place):
                    raise ValueError(f"Optimizer.step: {what} must be {len(place)} numbers, got {value!r}")
                found += [(x, _number(what, v)) for x, v in zip(place, value, strict=True)]
            elif value is not place and _as_list(value) != _as_list(place):
                raise ValueError(
                    f"Optimizer.step: {what} was {place!r} when the optimizer was made, got {value!r}; only numbers "
                    "whose default is a float can be changed"
                )
        for place, number in found:
            place.fill_(number)


def _place(default: Any, value: Any) -> Any:
    if isinstance(default, (float, Tensor)):
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if isinstance(default, (tuple, list)) and any(isinstance(x, (float, Tensor)) for x in default):
        return tuple(torch.zeros((), dtype=torch.float64, device="cpu") for _ in default)
    return value


def _as_list(value: Any) -> Any:
    """torch.distributed.checkpoint makes lists of tuples."""
    return list(value) if isinstance(value, tuple) else value


def _number(what: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"Optimizer.step: {what} must be a number, got a tensor of shape {tuple(value.shape)}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Optimizer.step: {what} must be a number, got {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"Optimizer.step: {what} must be finite, got {number}")
    return number
