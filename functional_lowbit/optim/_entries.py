"""A transformation's state as torch.optim keeps it: for each parameter, tensors by name.

What is saved of a parameter is `fl.state_dict` of its own leaves, so that formats, block sizes, dtypes and shapes are
checked by `fl.load_state_dict`. The schema, a string there, is a tensor of bytes here: `get_optimizer_state_dict` with
`flatten_optimizer_state_dict` refuses strings in the state, and repeats those of a param group for every parameter.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted
from functional_lowbit._core.state.named import Named, map_named
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.checkpoint import _schema, _state_dict
from functional_lowbit.checkpoint._schema import SCHEMA
from functional_lowbit.sharding import local_of


class Entries(NamedTuple):
    """A state, sorted by parameters."""

    leaves: dict[str, dict[str, Any]]  # parameter to leaves by entry, `0.mu`; what all share stands with each
    shared: list[str]  # entries of what all share
    named: dict[str, Named]  # what each entry is; its path is that in the state of one parameter


def entries_of(state: Any, params: Collection[str]) -> Entries:
    """Whose each leaf of a state is, and under which name."""
    own: dict[str, dict[str, Any]] = {name: {} for name in params}
    shared: dict[str, Any] = {}
    found: dict[str, Named] = {}

    def note(named: Named, leaf: Any) -> Any:
        entry = _entry(named)
        (shared if named.owner is None else own[named.owner])[entry] = leaf
        is_owned = named.owner is not None and named.param == named.owner
        found[entry] = named._replace(path=entry, param="" if is_owned else named.param)
        return leaf

    map_named(note, state, params)
    return Entries({name: {**leaves, **shared} for name, leaves in own.items()}, list(shared), found)


def map_entries(visit: Callable[[str | None, str, Any], Any], state: Any, params: Collection[str]) -> Any:
    """A state with `visit(parameter, entry, leaf)` in place of each leaf; the parameter is None for what all share."""
    return map_named(lambda named, leaf: visit(named.owner, _entry(named), leaf), state, params)


def _entry(named: Named) -> str:
    return named.entry or "state"  # a state that is the tree itself


def live(leaves: Mapping[str, Any], named: Mapping[str, Named], device: torch.device) -> dict[str, Any]:
    """What rests in `optimizer.state[p]`: as `save`, but nothing is computed.

    A leaf that is saved as numbers instead of its codes stands there itself, a `QuantizedTensor`.
    """
    own = {id(x) for leaf in leaves.values() for x in _optree.leaves(leaf)}
    entries = save(leaves, named, device)
    for key, value in entries.items():
        if key != SCHEMA and isinstance(value, Tensor) and id(value) not in own:
            entries[key] = leaves[max((n for n in leaves if key == n or key.startswith(f"{n}.")), key=len)]
    return entries


def save(leaves: Mapping[str, Any], named: Mapping[str, Named], device: torch.device) -> dict[str, Any]:
    """The entries of one parameter as they are saved: tensors, DTensors and numbers, the schema on its device."""
    with speaking("state_dict"):
        interrupted.refuse(leaves)
    entries = _state_dict.flat((named[entry], leaf) for entry, leaf in sorted(leaves.items()))
    text = entries.pop(SCHEMA)
    device = next(
        (x.device for x in entries.values() if isinstance(x, Tensor) and x.ndim), device
    )  # it may be offloaded
    return {**entries, SCHEMA: _schema.as_bytes(text, device)}


def load(name: str, leaves: Mapping[str, Any], entries: Any, convert: bool) -> dict[str, Any]:
    """New leaves, from the entries that were saved of one parameter. Nothing is written to."""
    if not isinstance(entries, Mapping) or SCHEMA not in entries:
        raise WrongValue(
            f"the state of {name!r} has no entry {SCHEMA!r}; it must come from a functional_lowbit.optim.Optimizer, "
            "and another library's must be converted, by fl.convert"
        )
    raw = entries[SCHEMA]
    text = _schema.of_bytes(raw)
    if text is None:
        got = f"{raw.dtype} of shape {tuple(raw.shape)}" if isinstance(raw, Tensor) else type(raw).__name__
        raise WrongValue(
            f"the state of {name!r} has an entry {SCHEMA!r} that must be uint8 of one dimension, got {got}"
        )
    with speaking(f"Optimizer.load_state_dict: the state of {name!r}"):
        return _state_dict.read(leaves, {**entries, SCHEMA: text}, convert)


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
