"""What an optimizer saved, in whichever of torch's shapes: parameters in order, with their entries."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._refused import WrongType, WrongValue

STATE, GROUPS = "state.", "param_groups."  # how keys begin that flatten_optimizer_state_dict made
OWN = "schema"  # an entry of what fl.state_dict returned, also of a tree with a "state"


class SavedParam(NamedTuple):
    """One parameter of a saved optimizer."""

    name: str | None  # None: it has only its number
    number: int  # counted through all groups
    group: int
    entries: Mapping[str, Any]  # empty: it never had a gradient
    tensor: Tensor | None = None  # the parameter itself, where the optimizer was given and not its state_dict
    has_key: bool = False  # whether the state and the groups call it by its name

    @property
    def key(self) -> str | int:
        """What it is called in the state and in the groups."""
        return self.name if self.has_key and self.name is not None else self.number

    @property
    def label(self) -> str:
        """Its name, or its number."""
        return str(self.number) if self.name is None else self.name

    @property
    def words(self) -> str:
        """How errors speak of it."""
        return f"parameter {self.number if self.name is None else repr(self.name)}"


class Saved(NamedTuple):
    """A saved optimizer."""

    params: list[SavedParam]
    groups: list[dict[str, Any]]  # hyperparameters, and names


def read_saved(saved: Any) -> Saved:
    """What an optimizer, its `state_dict()`, or `get_optimizer_state_dict` (flattened or not; by names) holds."""
    if isinstance(saved, torch.optim.Optimizer):
        return with_tensors(read_saved(saved.state_dict()), saved)
    if not isinstance(saved, Mapping):
        raise WrongType(f"saved must be an optimizer or what its state_dict() returned, got {type(saved).__name__}")
    saved = unflattened(saved)
    for key, kind, words in (("state", Mapping, "dict"), ("param_groups", Sequence, "list")):
        if key not in saved:
            inside = [str(k) for k, v in saved.items() if isinstance(v, Mapping) and "param_groups" in v]
            way_out = f"pass saved[{inside[0]!r}]" if inside else "pass what optimizer.state_dict() returned"
            raise WrongValue(f"saved has no entry {key!r}; {way_out}")
        if not isinstance(saved[key], kind):
            raise WrongValue(f"saved[{key!r}] must be a {words}, got {type(saved[key]).__name__}")
    return of_groups(saved["state"], saved["param_groups"])


def with_tensors(saved: Saved, optimizer: torch.optim.Optimizer) -> Saved:
    """The same with the parameters themselves."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return saved._replace(params=[p._replace(tensor=x) for p, x in zip(saved.params, tensors, strict=True)])


def of_groups(state: Mapping[Any, Any], saved_groups: Sequence[Any]) -> Saved:
    """The parameters of some groups, in order, with what a state has of them."""
    params: list[SavedParam] = []
    groups: list[dict[str, Any]] = []
    keys: set[Any] = set()
    for i, group in enumerate(saved_groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), Sequence):
            raise WrongValue(
                f"saved['param_groups'][{i}] must be a dict with a list 'params'; it must come from "
                "optimizer.state_dict()"
            )
        names = group.get("param_names")
        if names is not None and not (isinstance(names, Sequence) and all(isinstance(x, str) for x in names)):
            raise WrongValue(
                f"saved['param_groups'][{i}]['param_names'] must be a list of strings; the file is damaged"
            )
        if not all(isinstance(key, Hashable) for key in group["params"]):
            raise WrongValue(
                f"saved['param_groups'][{i}]['params'] must be a list of numbers or names; the file is damaged"
            )
        if names and len(names) != len(group["params"]):
            raise WrongValue(
                f"saved['param_groups'][{i}] has {len(names)} names for {len(group['params'])} parameters; "
                "the file is damaged"
            )
        for k, key in enumerate(group["params"]):
            name = key if isinstance(key, str) else names[k] if names else None
            entries = state.get(key, {})
            if not isinstance(entries, Mapping):
                raise WrongValue(
                    f"saved['state'][{key!r}] must be a dict, got {type(entries).__name__}; it must come "
                    "from optimizer.state_dict()"
                )
            tensor = key if isinstance(key, Tensor) else None
            params.append(SavedParam(name, len(params), i, entries, tensor, has_key=isinstance(key, str)))
            keys.add(key)
        groups.append({str(k): v for k, v in group.items() if k != "params"})
    for key, entries in state.items():
        if key not in keys and entries:
            raise WrongValue(f"saved['state'] has {key!r}, which is in no group; the file is damaged")
    return Saved(params, groups)


def unflattened(saved: Any) -> Any:
    """Out of what `flatten_optimizer_state_dict` made one dict of: `state.layers.0.weight.exp_avg`. Else as it is.

    A hyperparameter stands with each parameter there. Those with the same ones make a group again. Entries of this
    library have dots in their names, hyperparameters have none; so parameters are known by those.
    """
    if not isinstance(saved, Mapping) or "state" in saved or OWN in saved:
        return saved
    if not any(str(key).startswith(STATE) for key in saved):
        return saved
    hypers: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        if key.startswith(GROUPS):
            name, _, entry = key.removeprefix(GROUPS).rpartition(".")
            hypers.setdefault(name, {})[entry] = value
    state: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        if key.startswith(STATE):
            name, entry = _name_and_entry(key.removeprefix(STATE), hypers)
            state.setdefault(name, {})[entry] = value
    groups: list[dict[str, Any]] = []
    for name in hypers or state:
        own = hypers.get(name, {})
        for group in groups:
            if _written({k: v for k, v in group.items() if k != "params"}) == _written(own):
                group["params"].append(name)
                break
        else:
            groups.append({**own, "params": [name]})
    return {"state": state, "param_groups": groups}


def _name_and_entry(key: str, names: Collection[str]) -> tuple[str, str]:
    parts = key.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:i])) in names:
            return name, ".".join(parts[i:])
    return ".".join(parts[:-1]), parts[-1]


def _written(group: Mapping[str, Any]) -> str:
    """Whole, as printing would round tensors."""
    return repr({k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()})
