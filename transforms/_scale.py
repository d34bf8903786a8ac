"""Scaling by a constant, a learning rate or a schedule."""

from typing import Any

from functional_lowbit._core.contract.base import GradientTransformation, Hyper, Schedule
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._refused import WrongType, speaking


def scale(step_size: Hyper) -> GradientTransformation:
    """Multiply the updates by a number.

    Args:
        step_size: The factor.

    Raises:
        TypeError, ValueError: for a factor that is no number or not finite.

    References:
        optax.scale.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale(-0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)))[0]
        tensor([-0.1000])
    """
    return leafwise(_scale, hyperparams={"step_size": step_size}, name="scale")


@speaking("scale_by_schedule")
def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply the updates by a function of the step.

    Args:
        step_size_fn: `step_size_fn(step) -> factor`; step is int64[], counted from 0.

    Raises:
        TypeError: for anything but a function.

    References:
        optax.scale_by_schedule.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_schedule(lambda step: 1.0 / (step + 1))
        >>> state = tx.init(torch.zeros(1))
        >>> _, state = tx.update(torch.ones(1), state)
        >>> tx.update(torch.ones(1), state)[0]
        tensor([0.5000])
    """
    if not callable(step_size_fn):
        raise WrongType(f"step_size_fn must be a function of the step, got {type(step_size_fn).__name__}")
    return leafwise(_scale, hyperparams={"step_size": step_size_fn}, name="scale_by_schedule")


def _scale(g: Any, s: Any, p: Any, c: Any) -> Any:
    return c.step_size * g, s


def scale_by_learning_rate(learning_rate: Hyper, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply the updates by minus the learning rate, so that they go downhill.

    Args:
        learning_rate: A float, a 0-d tensor that is read anew at each step, or a schedule.
        flip_sign: False keeps the sign, for updates that already go downhill.

    Raises:
        TypeError, ValueError: for a learning rate that is no number or not finite.

    References:
        optax.scale_by_learning_rate.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_learning_rate(0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)))[0]
        tensor([-0.1000])
    """
    return leafwise(
        _descend if flip_sign else _ascend,
        hyperparams={"learning_rate": learning_rate},
        name="scale_by_learning_rate",
    )


def _descend(g: Any, s: Any, p: Any, c: Any) -> Any:
    return -c.learning_rate * g, s


def _ascend(g: Any, s: Any, p: Any, c: Any) -> Any:
    return c.learning_rate * g, s
