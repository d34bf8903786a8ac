"""A transformation's state as torch.optim keeps it: for each parameter, tensors by name.

What is saved of a parameter is `fl.state_dict` of its own leaves, so that formats, block sizes, dtypes and shapes are
checked by `fl.load_state_dict`. The schema, a string there, is a tensor of bytes here: `get_optimizer_state_dict` with
`flatten_optimizer_state_dict` refuses strings in the state, and repeats those of a param group for every parameter.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit.checkpoint._state_dict import load_state_dict, state_dict
from functional_lowbit.sharding import local_of
from functional_lowbit.transforms._inject import InjectHyperparamsState
from functional_lowbit.transforms._partition import PartitionState

SCHEMA = "schema"  # as in fl.state_dict
# Fields that hold a dict by other names than the parameters'.
OWN_NAMES: dict[type, str] = {PartitionState: "inner_states", InjectHyperparamsState: "hyperparams"}


def map_leaves(visit: Callable[[str | None, str, Any], Any], state: Any, names: Collection[str]) -> Any:
    """A state with `visit(parameter, name, leaf)` in place of each leaf; a `QuantizedTensor` is one leaf.

    A dict with exactly the parameters' names has a part for each parameter, and does not appear in the leaf's name:
    `0.mu`. What is in no such dict belongs to all: the parameter is None. Labels of a `partition`, names of a
    `named_chain` and injected hyperparameters may be called as the parameters are, and are none.
    """
    wanted = set(names)

    def walk(node: Any, path: str, owner: str | None, has_own_names: bool = False) -> Any:
        level = None if isinstance(node, QuantizedTensor) else _optree.children(node)
        if level is None:
            return visit(owner, path or "state", node)
        kids, kid_names, rebuild = level
        has_own_names = has_own_names or _is_named_chain(node)
        if owner is None and isinstance(node, dict) and wanted and set(node) == wanted and not has_own_names:
            return rebuild([walk(kid, path, name) for kid, name in zip(kids, kid_names, strict=True)])
        inside = [f"{path}.{name}" if path else name for name in kid_names]
        named = OWN_NAMES.get(type(node))
        return rebuild(
            [walk(kid, at, owner, name == named) for kid, name, at in zip(kids, kid_names, inside, strict=True)]
        )

    return walk(state, "", None)


def _is_named_chain(node: Any) -> bool:
    """Its state holds states; a user's own OrderedDict of something for each parameter holds leaves."""
    return isinstance(node, OrderedDict) and any(isinstance(kid, (tuple, dict)) for kid in node.values())


def live(leaves: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What rests in `optimizer.state[p]`: as `save`, but nothing is computed.

    A leaf that is saved as numbers instead of its codes stands there itself, a `QuantizedTensor`.
    """
    own = {id(x) for leaf in leaves.values() for x in _optree.leaves(leaf)}
    entries = save(leaves, device)
    for key, value in entries.items():
        if key != SCHEMA and isinstance(value, Tensor) and id(value) not in own:
            entries[key] = leaves[max((n for n in leaves if key == n or key.startswith(f"{n}.")), key=len)]
    return entries


def save(leaves: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The entries of one parameter as they are saved: tensors, DTensors and numbers.

    Args:
        leaves: Leaf by name.
        device: Of the parameter. `set_optimizer_state_dict` wants one device for all that has a dimension.
    """
    entries = state_dict(leaves)
    text = entries.pop(SCHEMA).encode()
    device = next(
        (x.device for x in entries.values() if isinstance(x, Tensor) and x.ndim), device
    )  # it may be offloaded
    return {**entries, SCHEMA: torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)}


def load(speaker: str, leaves: Mapping[str, Any], entries: Any, convert: bool) -> dict[str, Any]:
    """New leaves, from the entries that were saved of one parameter. Nothing is written to.

    Args:
        speaker: Who speaks in errors, and of which parameter.
        leaves: Leaf by name, as the optimizer has them.
        entries: What `save` returned.
        convert: As in `fl.load_state_dict`.

    Raises:
        ValueError: for entries that do not fit.
    """
    if not isinstance(entries, Mapping) or SCHEMA not in entries:
        raise ValueError(
            f"{speaker} has no entry {SCHEMA!r}; it must come from a functional_lowbit.optim.Optimizer, and another "
            "library's must be converted, by fl.convert"
        )
    raw = entries[SCHEMA]
    if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 1:
        got = f"{raw.dtype} of shape {tuple(raw.shape)}" if isinstance(raw, Tensor) else type(raw).__name__
        raise ValueError(f"{speaker} has an entry {SCHEMA!r} that must be uint8 of one dimension, got {got}")
    try:
        text = bytes(local_of(raw).tolist()).decode(errors="replace")
        return load_state_dict(leaves, {**entries, SCHEMA: text}, convert=convert)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{speaker}: {str(error).removeprefix('load_state_dict: ')}") from error


def write_(leaf: Any, new: Any) -> Any:
    """Copy a new leaf, of the same dtypes and shapes, into the tensors of a leaf; returned. A number is replaced."""
    if not isinstance(leaf, (Tensor, QuantizedTensor)):
        return new
    for place, value in zip(_optree.leaves(leaf), _optree.leaves(new), strict=True):
        local_of(place).copy_(local_of(value))
    return leaf


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves of one kind hold the same numbers; NaN is equal to NaN."""
    if a is b or not isinstance(a, (Tensor, QuantizedTensor)):
        return a is b or a == b
    pairs = [(local_of(x), local_of(y)) for x, y in zip(_optree.leaves(a), _optree.leaves(b), strict=True)]
    return all(bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs)


def is_copy(other: Any, leaf: Any) -> bool:
    """Whether something is a copy of what rests, perhaps on another device."""
    if type(other) is not type(leaf) or not isinstance(leaf, Tensor):
        return False
    a, b = local_of(leaf), local_of(other)
    return (a.dtype, other.shape, a.shape) == (b.dtype, leaf.shape, b.shape) and equal(a, b.to(a.device))
