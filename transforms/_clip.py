"""Clipping: by value, and by the norm of all gradients together."""

from typing import Any

import torch

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._core.leafwise.norm import global_norm
from functional_lowbit._refused import speaking


@speaking("clip")
def clip(max_delta: Hyper) -> GradientTransformation:
    """Clip each element to [-max_delta, max_delta].

    Args:
        max_delta: The largest magnitude, >= 0; in units of the updates.

    Raises:
        TypeError, ValueError: for a bound that is no number, not finite or negative.

    References:
        optax.clip.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.clip(1.0)
        >>> tx.update(torch.tensor([0.5, -3.0]), tx.init(torch.zeros(2)))[0]
        tensor([ 0.5000, -1.0000])
    """
    refuse.hyperparameter("max_delta", max_delta, at_least=0.0)
    return leafwise(_clip, hyperparams={"max_delta": max_delta}, name="clip")


def _clip(g: Any, s: Any, p: Any, c: Any) -> Any:
    return torch.minimum(torch.maximum(g, -c.max_delta), c.max_delta), s


@speaking("clip_by_global_norm")
def clip_by_global_norm(max_norm: Hyper) -> GradientTransformation:
    """Scale all updates down together if their global norm is above a bound.

    The norm is the same number on every mesh (see `global_norm`). As in optax and torch, a NaN makes every update NaN,
    and an Inf becomes NaN while the finite updates become 0; `apply_if_finite` around it skips such a step.

    Args:
        max_norm: The largest Euclidean norm of all updates together, >= 0; in units of the updates.

    Raises:
        TypeError, ValueError: for a bound that is no number, not finite or negative.

    References:
        optax.clip_by_global_norm; Pascanu, Mikolov, Bengio, 2013, https://arxiv.org/abs/1211.5063, Algorithm 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.clip_by_global_norm(1.0)
        >>> tx.update(torch.tensor([3.0, 4.0]), tx.init(torch.zeros(2)))[0]
        tensor([0.6000, 0.8000])
    """
    refuse.hyperparameter("max_norm", max_norm, at_least=0.0)
    return leafwise(_scale_down, hyperparams={"max_norm": max_norm}, prepare=_shrink_factor, name="clip_by_global_norm")


def _shrink_factor(updates: Any, s: Any, params: Any, h: Any) -> dict[str, torch.Tensor]:
    norm = global_norm(updates)
    return {"factor": torch.where(norm <= h.max_norm, 1.0, h.max_norm / norm)}


# The norm of bfloat16 gradients is that of the same numbers in float32.
_shrink_factor.any_dtype = True  # type: ignore[attr-defined]


def _scale_down(g: Any, s: Any, p: Any, c: Any) -> Any:
    return g * c.factor, s
