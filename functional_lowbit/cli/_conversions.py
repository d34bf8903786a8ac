"""One optimizer state of a checkpoint as another: of ours in a format, or of torch.optim."""

from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit.checkpoint import _schema
from functional_lowbit.cli._numbers import take
from functional_lowbit.cli._output import Mistake, said
from functional_lowbit.cli._recipes import in_format
from functional_lowbit.cli._reformat import Made, Target, reformat, relative_error
from functional_lowbit.cli._sections import OPTIMIZER, OURS, Section, names_of
from functional_lowbit.convert._slots import named_leaves
from functional_lowbit.optim import _entries

CPU = torch.device("cpu")
ANOTHER_KIND = "another kind of optimizer"  # what fl.convert says of a target that keeps other moments
Advance = Callable[..., None]


class Converted(NamedTuple):
    """A state that was converted."""

    node: Any  # what stands in the checkpoint now
    leaves: dict[str, Any] | None  # by path, for files that hold nothing but leaves
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
        listed = {leaf.path for leaf in section.leaves}
        for leaf in section.leaves:
            made[leaf.path] = reformat(leaf, leaf.path, listed, target)
            advance(made[leaf.path].bytes_before, leaf.path)
        leaves = {path: one.leaf for path, one in made.items()}
        return Converted(fl.state_dict(leaves), leaves, made, "load it as before, into a state of this format")
    prefixes = _prefixes(section)
    state: dict[Any, Any] = {}
    for key, entries in section.node["state"].items():
        own = [leaf for leaf in section.leaves if leaf.path.startswith(prefixes[key]) and leaf.described]
        listed = {leaf.path.removeprefix(prefixes[key]) for leaf in own}
        new: dict[str, Any] = {}
        for leaf in own:
            made[leaf.path] = reformat(leaf, leaf.path.removeprefix(prefixes[key]), listed, target)
            new[leaf.path.removeprefix(prefixes[key])] = made[leaf.path].leaf
            advance(made[leaf.path].bytes_before, leaf.path)
        state[key] = _entries.save(new, CPU) if new else entries
    node = {**section.node, "state": state}
    return Converted(node, None, made, "load it as before, with an optimizer of this format")


def _foreign_to_format(section: Section, target: Target, advance: Advance) -> Converted:
    saved = section.node
    params = _asked(lambda: fl.convert.params_of(saved), "params_of")
    family, exact = _of_a_kind(saved, params, "float32", None)
    _, state = _of_a_kind(saved, params, target.format.name, target.block_size, family)
    flat, plain = _leaves(state), _leaves(exact)
    made = {}
    for path, leaf in flat.items():
        old, name, error = plain[path], str(getattr(leaf, "dtype", "")).removeprefix("torch."), 0.0
        if isinstance(leaf, QuantizedTensor):
            name, error = leaf.format.name, relative_error(leaf.dequantize(), old)
        made[path] = Made(leaf, section.library, name, old.nbytes, leaf.nbytes, error)
    advance(sum(one.bytes_before for one in made.values()))
    stored = "" if target.format.name == "float32" else f"format={target.format.name!r}"
    recipe = f"fl.{family}" if not stored else f"fl.{family}8bit"
    how = f"load it into a state of {recipe}(..., {stored})" if stored else f"load it into a state of {recipe}(...)"
    return Converted(fl.state_dict(state), flat, made, f"{how}, or with fl.convert.from_saved into any other")


def _of_a_kind(
    saved: Any, params: Mapping[str, Tensor], format: str, block_size: int | None, family: str | None = None
) -> tuple[str, Any]:
    """The state in the first of our optimizers that keeps what was saved."""
    for name in [family] if family else ("adamw", "lion", "sgd"):
        try:
            target = in_format(name, format, block_size).init(dict(params))
            return name, fl.convert.from_saved(saved, target, dict(params))
        except (TypeError, ValueError) as error:
            if ANOTHER_KIND not in str(error) or name == "sgd":
                raise Mistake(said(error, str(error).partition(":")[0])) from error
    raise AssertionError("the last one returns or raises")


def to_torch(section: Section) -> Converted:
    """A state as that of a torch.optim optimizer, in float32.

    Raises:
        Mistake: for a state that torch has no place for.
    """
    _refuse_nested(section)
    saved: Any = section.node
    if _schema.SCHEMA in saved:
        saved = {name: take(x) for name, x in saved.items()}
    saved, numbers = (saved, {}) if section.library == OURS else _stepped(saved)
    params = _asked(lambda: fl.convert.params_of(saved), "params_of")
    if section.library == OURS:
        groups = _groups(_family(section), saved, list(params))
        result = _asked(lambda: fl.convert.to_torch(saved, groups), "to_torch")
    else:
        family, state = _of_a_kind(saved, params, "float32", None)
        groups = _groups(family, saved, list(params))
        result = _asked(lambda: fl.convert.to_torch(state, groups, dict(params)), "to_torch")
        result["state"] = {numbers.get(key, key): entries for key, entries in result["state"].items()}
        result["param_groups"] = _groups(family, section.node, list(params))
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
    return Converted(result, None, made, how)


def _stepped(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """A state of the parameters that have one, numbered anew, and their old numbers by the new ones.

    Those that never had a gradient have none, and may stay without: torch's load_state_dict takes that.
    """
    stepped = [k for group in saved["param_groups"] for k in group["params"] if k in saved["state"]]
    new = {k: n if isinstance(k, int) else k for n, k in enumerate(stepped)}
    groups = []
    for group in saved["param_groups"]:
        kept = [k in new for k in group["params"]]
        own = {**group, "params": [new[k] for k in group["params"] if k in new]}
        if "param_names" in group:
            own["param_names"] = list(compress(group["param_names"], kept))
        groups.append(own)
    state = {new[k]: entries for k, entries in saved["state"].items() if k in new}
    return {**saved, "state": state, "param_groups": groups}, {n: k for k, n in new.items()}


def _family(section: Section) -> str:
    """Which kind of optimizer a state of ours is of, by the names of its moments.

    Raises:
        Mistake: for one without moments.
    """
    fields = {word for leaf in section.leaves for word in leaf.path.split(".")}
    if not fields & {"mu", "nu", "trace"}:
        raise Mistake("the state has no moments, so there is nothing to convert; make a new optimizer of torch.optim")
    return "adamw" if "nu" in fields else "sgd" if "trace" in fields else "lion"


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


def _asked(call: Callable[[], Any], speaker: str) -> Any:
    """What fl.convert returns; its errors are about the file, so they are the user's."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        raise Mistake(said(error, speaker)) from error
