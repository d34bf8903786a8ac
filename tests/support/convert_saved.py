"""States of torch's Adam as they are saved, right ones and wrong ones."""

from collections.abc import Callable
from typing import Any

import torch

import functional_lowbit as fl

PARAMS = {"w": torch.ones(2, 3), "b": torch.ones(3)}


ADAM = fl.adam(0.1).init(PARAMS)


ANOTHER = "it is the state of another model, or of other groups"


def adam_of(shape: tuple[int, ...] = (2, 3), step: float = 2.0) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}


def saved_of(w: Any = None, b: Any = None, names: Any = None, **group: Any) -> dict[str, Any]:
    """Of torch's Adam for PARAMS, with other entries where given."""
    state = {0: adam_of() if w is None else w, 1: adam_of((3,)) if b is None else b}
    more = {} if names is None else {"param_names": names}
    return {"state": state, "param_groups": [{**group, "params": [0, 1], **more}]}


def from_torch(saved: Any, target: Any = ADAM, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fl.convert.from_torch(saved, target, *args, **options)
