"""Arguments that are refused before any tree is seen: hyperparameters, and what is no transformation."""

import math
from numbers import Real
from typing import Any

from torch import Tensor

from functional_lowbit._refused import WrongType, WrongValue


def hyperparameter(name: str, value: Any, at_least: float = -math.inf, below: float = math.inf) -> None:
    """Refuse a hyperparameter that cannot be meant. Schedules and tensors are looked at when they are used."""
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise WrongValue(
                f"{name} must be a float, a 0-d tensor or a schedule, got a tensor of shape {tuple(value.shape)}"
            )
        return
    if callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's scalars are real numbers too
        raise WrongType(f"{name} must be a float, a 0-d tensor or a schedule, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise WrongValue(f"{name} must be finite, got {value}")
    if not at_least <= number < below:
        bound = f"at least {at_least:g}" if below == math.inf else f"in [{at_least:g}, {below:g})"
        raise WrongValue(f"{name} must be {bound}, got {value}")


def finite(name: str, value: Tensor) -> Tensor:
    """Refuse a non-finite value of a schedule or of a tensor hyperparameter.

    Only on the CPU: elsewhere the look would make the device wait.
    """
    if value.ndim != 0:
        raise WrongValue(f"{name} must be 0-d at each step, got shape {tuple(value.shape)}")
    if value.device.type == "cpu":
        try:
            number = float(value.detach())
        except RuntimeError:  # inside torch.func.vmap there is no one number to look at
            return value
        if not math.isfinite(number):
            raise WrongValue(f"{name} must be finite at each step, got {number}")
    return value


def is_transformation(x: Any) -> bool:
    """Whether something is an (init, update) pair."""
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def transformation(name: str, tx: Any) -> None:
    """Refuse what is no (init, update) pair, for instance an optimizer's function that was not called."""
    if not is_transformation(tx):
        hint = f"; call it: {tx.__name__}(...)" if callable(tx) and hasattr(tx, "__name__") else ""
        raise WrongType(f"{name} must be a GradientTransformation, got {type(tx).__name__}{hint}")
