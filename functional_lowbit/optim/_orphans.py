"""Parameters that are the model's no longer, because it got new ones after the optimizer was made."""

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit._private import parameters_of
from functional_lowbit._refused import WrongValue


def refuse_orphans(trees: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> None:
    """Refuse parameters that would silently never be stepped.

    `fully_shard`, `parallelize_module` and `load_state_dict(assign=True)` give a model new parameters and leave no mark
    on the old ones. What tells them: a parameter has no gradient, no module that is alive holds it, and for each of
    these a module holds one of the same shape that has a gradient and is no optimizer's. Parameters that no module ever
    held rarely have such a counterpart, and those that are not used at this step are held by their module.

    Looking through all modules takes about 0.1 s for a million objects; it is done if some parameter has no gradient.
    """
    lost = {name: p for params, grads in trees for name, p in params.items() if p.requires_grad and grads[name] is None}
    if not lost:
        return
    held, stepped = _held()
    lost = {name: p for name, p in lost.items() if id(p) not in held}
    others = [p for p in held.values() if p.grad is not None and id(p) not in stepped]
    if lost and Counter(tuple(p.shape) for p in lost.values()) <= Counter(tuple(p.shape) for p in others):
        name, p = next(iter(lost.items()))
        raise WrongValue(
            f"parameter {name!r} has no gradient and is in no module, but a module has another one of its shape "
            f"{tuple(p.shape)}, with a gradient; the model got new parameters after the optimizer was made (by "
            "fully_shard, parallelize_module, load_state_dict(assign=True)), so make the optimizer afterwards"
        )


def _held() -> tuple[dict[int, Tensor], set[int]]:
    """The parameters of all modules that are alive, by id, and the ids of those that optimizers step."""
    held: dict[int, Tensor] = {}
    stepped: set[int] = set()
    for x in gc.get_objects():
        if issubclass(type(x), nn.Module):  # isinstance would ask proxies for their class
            own = parameters_of(x)
            if isinstance(own, dict):
                held.update((id(p), p) for p in own.values() if p is not None)
        elif issubclass(type(x), torch.optim.Optimizer):
            stepped.update(id(p) for group in vars(x).get("param_groups", ()) for p in group["params"])
    return held, stepped
