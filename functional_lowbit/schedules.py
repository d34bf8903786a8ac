"""Schedules: functions of the step, counted from 0. Each takes int64[] and returns float64[] on the same device.

Imports: _core.contract, _refused
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from functional_lowbit import _refused as refused
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import Schedule


@refused.speaking("constant_schedule")
def constant_schedule(value: float) -> Schedule:
    """The same value at every step.

    Args:
        value: The value.

    References:
        optax.schedules.constant_schedule.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.schedules.constant_schedule(0.1)(torch.tensor(5))
        tensor(0.1000, dtype=torch.float64)
    """
    refuse.hyperparameter("value", value)
    return lambda step: torch.full_like(_as_float(step), value)


@refused.speaking("linear_schedule")
def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """A straight line from one value to another, and constant before and after.

    Args:
        init_value: Until `transition_begin`.
        end_value: From `transition_begin + transition_steps` on.
        transition_steps: Length of the line, in steps, >= 1.
        transition_begin: The step at which it begins, >= 0.

    Raises:
        ValueError: for a length below 1 or a begin below 0.

    References:
        optax.schedules.linear_schedule.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.schedules.linear_schedule(0.0, 1.0, 4)(torch.tensor(1))
        tensor(0.2500, dtype=torch.float64)
    """
    _check_steps("transition_steps", transition_steps, 1)
    _check_steps("transition_begin", transition_begin, 0)
    _check_values(init_value=init_value, end_value=end_value)

    def schedule(step: Tensor) -> Tensor:
        done = ((_as_float(step) - transition_begin) / transition_steps).clamp(0.0, 1.0)
        return init_value + (end_value - init_value) * done

    return schedule


@refused.speaking("cosine_decay_schedule")
def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine from a value down to a fraction of it, and constant after.

    Args:
        init_value: At step 0.
        decay_steps: Length of the decay, in steps, >= 1.
        alpha: The last value, as a fraction of `init_value`.
        exponent: Power to which the cosine's curve is raised.

    Raises:
        ValueError: for a length below 1.

    References:
        optax.schedules.cosine_decay_schedule; Loshchilov & Hutter, 2016, https://arxiv.org/abs/1608.03983, Equation 5.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.schedules.cosine_decay_schedule(1.0, 10)(torch.tensor(5))
        tensor(0.5000, dtype=torch.float64)
    """
    _check_steps("decay_steps", decay_steps, 1)
    _check_values(init_value=init_value, alpha=alpha, exponent=exponent)

    def schedule(step: Tensor) -> Tensor:
        done = (_as_float(step) / decay_steps).clamp(max=1.0)
        curve = (0.5 * (1 + torch.cos(math.pi * done))) ** exponent
        return init_value * ((1 - alpha) * curve + alpha)

    return schedule


@refused.speaking("warmup_cosine_decay_schedule")
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A straight line up, then half a cosine down, and constant after.

    Args:
        init_value: At step 0.
        peak_value: At step `warmup_steps`.
        warmup_steps: Length of the line, in steps, >= 0.
        decay_steps: Length of line and cosine together, in steps, > warmup_steps.
        end_value: From step `decay_steps` on.
        exponent: Power to which the cosine's curve is raised.

    Raises:
        ValueError: for lengths out of their range.

    References:
        optax.schedules.warmup_cosine_decay_schedule.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> schedule = fl.schedules.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=30)
        >>> [round(float(schedule(torch.tensor(t))), 3) for t in (0, 5, 10, 20, 30)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_steps("warmup_steps", warmup_steps, 0)
    _check_steps("decay_steps", decay_steps, warmup_steps + 1)
    _check_values(
        init_value=init_value,
        peak_value=peak_value,
        end_value=end_value,
        exponent=exponent,
    )
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    down = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    if warmup_steps == 0:
        return down
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), down], [warmup_steps])


@refused.speaking("join_schedules")
def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each counts from its own beginning.

    Args:
        schedules: One more than there are boundaries.
        boundaries: The steps at which the next schedule takes over, rising.

    Raises:
        ValueError: for the wrong number of boundaries, and for boundaries that do not rise.

    References:
        optax.schedules.join_schedules.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> halves = [fl.schedules.constant_schedule(1.0), fl.schedules.constant_schedule(0.5)]
        >>> fl.schedules.join_schedules(halves, [10])(torch.tensor(10))
        tensor(0.5000, dtype=torch.float64)
    """
    if len(schedules) != len(boundaries) + 1:
        raise refused.WrongValue(
            f"schedules must be one more than boundaries, got {len(schedules)} and {len(boundaries)}"
        )
    if any(a >= b for a, b in pairwise(boundaries)):
        raise refused.WrongValue(f"boundaries must rise, got {list(boundaries)}")

    def schedule(step: Tensor) -> Tensor:
        value = _as_float(schedules[0](step))
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(_as_float(step) < boundary, value, _as_float(following(step - boundary)))
        return value

    return schedule


def _as_float(step: Tensor | float) -> Tensor:
    if isinstance(step, Tensor):
        return step.to(torch.float64)
    return torch.tensor(step, dtype=torch.float64, device="cpu")  # whatever the default device


def _check_steps(name: str, value: int, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise refused.WrongValue(f"{name} must be an int of at least {at_least}, got {value!r}")


def _check_values(**values: float) -> None:
    for name, value in values.items():
        refuse.hyperparameter(name, value)
