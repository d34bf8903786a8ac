"""Where `to_torch` puts its result: parameters, keys and groups of a torch.optim optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit.convert._saved import SavedParam

HYPERS = ({"lr", "betas", "eps", "weight_decay"}, {"lr", "momentum", "dampening", "weight_decay", "nesterov"})


class Place(NamedTuple):
    """Where the result goes."""

    params: list[SavedParam]
    keys: list[Any]  # of the state, for each parameter
    groups: list[dict[str, Any]]  # as they are returned


def place_of(speaker: str, target: Any) -> Place:
    """Parameters, keys and groups of an optimizer, or of a list of groups."""
    tensors: list[Any] = []
    if isinstance(target, torch.optim.Optimizer):
        tensors = [p for group in target.param_groups for p in group["params"]]
        target = target.state_dict()["param_groups"]
    if not isinstance(target, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in target):
        raise TypeError(
            f"{speaker}: target must be a torch.optim.Optimizer or a list of its groups, got {type(target).__name__}"
        )
    params: list[SavedParam] = []
    keys: list[Any] = []
    groups: list[dict[str, Any]] = []
    for i, group in enumerate(target):
        own = list(group["params"])
        names, group_keys = group.get("param_names"), []
        for k, x in enumerate(own):
            name = x if isinstance(x, str) else names[k] if names else None
            n = len(params)
            tensor = x if isinstance(x, Tensor) else tensors[n] if tensors else None
            params.append(SavedParam(name, n, i, {}, tensor))
            group_keys.append(x if isinstance(x, str) else n)
        keys += group_keys
        groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": group_keys})
    return Place(params, keys, groups)


def own_groups(speaker: str, groups: Sequence[Mapping[str, Any]]) -> Place | None:
    """The source's own groups, if they have all that an optimizer of torch reads; torch sets the switches itself."""
    whole = all(any(names <= set(group) for names in HYPERS) for group in groups)
    return place_of(speaker, groups) if groups and whole else None
