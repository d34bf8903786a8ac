"""One optimizer state of a checkpoint as another: of ours in a format, or of torch.optim."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.state.named import Named
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._state_dict import flat
from functional_lowbit.cli._numbers import take
from functional_lowbit.cli._output import Mistake, told
from functional_lowbit.cli._recipes import in_format
from functional_lowbit.cli._reformat import Made, Target, reformat, relative_error
from functional_lowbit.cli._sections import OPTIMIZER, OURS, Leaf, Section, names_of
from functional_lowbit.convert._library import any_saved, each_read
from functional_lowbit.convert._own import is_own
from functional_lowbit.convert._slots import named_leaves
from functional_lowbit.optim import _entries

CPU = torch.device("cpu")
Advance = Callable[..., None]


class Converted(NamedTuple):
    """A state that was converted."""

    node: Any  # what stands in the checkpoint now
    made: dict[str, Made]  # what was done to each leaf
    how_to_load: str


def to_format(section: Section, target: Target, advance: Advance) -> Converted:
    """A state as one of ours in a format.

    Raises:
        Mistake: for a state that cannot be converted.
        Broken: for one that is damaged.
    """
    if section.library != OURS:
        return _foreign_to_format(section, target, advance)
    _refuse_nested(section)
    made: dict[str, Made] = {}
    if _schema.SCHEMA in section.node:
        for leaf in section.leaves:
            made[leaf.path] = reformat(leaf, target)
            advance(made[leaf.path].bytes_before, leaf.path)
        node = flat((_named(leaf, ""), made[leaf.path].leaf) for leaf in section.leaves)
        return Converted(node, made, "load it as before, into a state of this format")
    prefixes = _prefixes(section)
    state: dict[Any, Any] = {}
    for key, entries in section.node["state"].items():
        own = [leaf for leaf in section.leaves if leaf.path.startswith(prefixes[key]) and leaf.described]
        new: dict[str, Any] = {}
        for leaf in own:
            made[leaf.path] = reformat(leaf, target)
            new[leaf.path.removeprefix(prefixes[key])] = made[leaf.path].leaf
            advance(made[leaf.path].bytes_before, leaf.path)
        named = {leaf.path.removeprefix(prefixes[key]): _named(leaf, prefixes[key]) for leaf in own}
        state[key] = _entries.save(new, named, CPU) if new else entries
    node = {**section.node, "state": state}
    return Converted(node, made, "load it as before, with an optimizer of this format")


def _named(leaf: Leaf, prefix: str) -> Named:
    """A leaf's place in its own state."""
    return _schema.named(leaf.path.removeprefix(prefix), dict(leaf.described or {}))


def _foreign_to_format(section: Section, target: Target, advance: Advance) -> Converted:
    family, params = _family(section.node), _params(section.node)
    exact = _state(section.node, params, in_format(family, "float32"))
    state = _state(section.node, params, in_format(family, target.format.name, target.block_size))
    plain = _leaves(exact)
    made = {}
    for path, leaf in _leaves(state).items():
        old, name, error = plain[path], str(getattr(leaf, "dtype", "")).removeprefix("torch."), 0.0
        if isinstance(leaf, QuantizedTensor):
            name, error = leaf.format.name, relative_error(leaf.dequantize(), old)
        made[path] = Made(leaf, section.library, name, old.nbytes, leaf.nbytes, error)
    advance(sum(one.bytes_before for one in made.values()))
    stored = "" if target.format.name == "float32" else f"format={target.format.name!r}"
    recipe = f"fl.{family}" if not stored else f"fl.{family}8bit"
    how = f"load it into a state of {recipe}(..., {stored})" if stored else f"load it into a state of {recipe}(...)"
    return Converted(fl.state_dict(state), made, f"{how}, or with fl.convert.from_saved into any other")


def _params(saved: Any) -> dict[str, Tensor]:
    with told("params_of"):
        return fl.convert.params_of(saved)


def _state(saved: Any, params: dict[str, Tensor], tx: fl.GradientTransformation) -> Any:
    with told(f"from_{fl.convert.library_of(saved)}"):
        return fl.convert.from_saved(saved, tx.init(params), params)


def to_torch(section: Section) -> Converted:
    """A state as that of a torch.optim optimizer, in float32.

    Raises:
        Mistake: for a state that torch has no place for.
    """
    _refuse_nested(section)
    saved: Any = section.node
    if _schema.SCHEMA in saved:
        saved = {name: take(x) for name, x in saved.items()}
    family, params = _family(saved), _params(saved)
    groups = _groups(family, saved, list(params))
    if section.library == OURS:
        with told("to_torch"):
            result = fl.convert.to_torch(saved, groups)
    else:
        # Parameters that never had a gradient have no state, and may stay without: torch's load_state_dict takes that.
        labels = {key: p.label for key, p in zip(_keys(groups), any_saved(saved).params, strict=True)}
        stepped = [{**g, "params": [labels[k] for k in g["params"] if labels[k] in params]} for g in groups]
        with told("to_torch"):
            result = fl.convert.to_torch(_state(saved, params, in_format(family, "float32")), stepped, params)
        state = {key: result["state"][label] for key, label in labels.items() if label in result["state"]}
        result = {"state": state, "param_groups": groups}
    made = {}
    for key, entries in result["state"].items():
        for name, x in entries.items():
            made[f"{key}.{name}"] = Made(x, section.library, "float32", 0, x.nbytes, 0.0)
    named = any(isinstance(key, str) for key in result["state"])
    how = (
        "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which goes by names; set the "
        "hyperparameters after that, the file has torch's defaults"
        if named
        else "load it with the optimizer's load_state_dict"
    )
    return Converted(result, made, how)


def _keys(groups: list[dict[str, Any]]) -> list[Any]:
    return [key for group in groups for key in group["params"]]


def _family(saved: Any) -> str:
    """Which kind of optimizer a state is of, by its moments.

    Raises:
        Mistake: for one without moments.
    """
    with told("params_of"):
        fields = {f for _, read in each_read(saved) for names in read.fields.values() for f in names}
    if not fields and is_own(saved):
        raise Mistake("the state has no moments, so there is nothing to convert; make a new optimizer of torch.optim")
    return "adamw" if "nu" in fields else "lion" if "mu" in fields else "sgd"


def _groups(family: str, saved: Any, names: list[str]) -> list[dict[str, Any]]:
    """Groups for torch: the optimizer's own, with torch's defaults for what they lack."""
    if family == "lion":
        raise Mistake("torch.optim has no optimizer that keeps a first moment alone, as Lion does; convert to a format")
    probe = [torch.zeros(1)]
    made = torch.optim.AdamW(probe) if family == "adamw" else torch.optim.SGD(probe, lr=1e-3, momentum=0.9)
    if "param_groups" in saved:
        return [{**made.defaults, **group} for group in saved["param_groups"]]
    numbers = all(name.isdecimal() for name in names)
    return [{**made.defaults, "params": sorted(map(int, names)) if numbers else names}]


def _refuse_nested(section: Section) -> None:
    if section.made_by.endswith(f"{OPTIMIZER} inside"):
        raise Mistake(
            "the state is that of an fl.optim optimizer inside a tree of fl.checkpoint; load it into one of the other "
            "format, with optimizer.load_state_dict(..., convert=True)"
        )


def _prefixes(section: Section) -> dict[Any, str]:
    """What the leaves of each parameter begin with, as in `_sections`."""
    names = names_of(section.node["param_groups"])
    return {key: f"{names.get(key, key)}." for key in section.node["state"]}


def _leaves(state: Any) -> dict[str, Any]:
    return {path: leaf for path, leaf in named_leaves(state) if leaf is not None}
