"""What a leaf function returned, looked at."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.leafwise.guard import name_of
from functional_lowbit._refused import WrongType, WrongValue


def check_pair(function: Callable[..., Any], state_class: Any, result: Any) -> tuple[Any, Any]:
    """Refuse what a leaf function returned if it is not an update and a state."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], state_class):
        return result
    kinds = [type(x).__name__ for x in result] if isinstance(result, tuple) else type(result).__name__
    raise WrongType(
        f"{name_of(function)} must return (update, state), with a state of class {state_class.__name__}, got {kinds}",
        speaker="leafwise",
    )


def check_leaf(
    function: Callable[..., Any],
    like: Tensor,
    update: Any,
    moments: Mapping[str, Any],
    whose: str = "g",
) -> None:
    """Refuse what a leaf function returned if it is not shaped like its leaf, or like what it was given."""
    for what, x in [("update", update), *moments.items()]:
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != torch.float32:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise WrongValue(
                f"{name_of(function)} must return float32 tensors of {whose}'s shape {tuple(like.shape)}, got for "
                f"{what}: {got}",
                speaker="leafwise",
            )
