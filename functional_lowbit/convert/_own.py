"""What this library saved, as a source: `fl.state_dict` of a state, or the state_dict of an `fl.optim` optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._refused import WrongValue
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import expected, joined
from functional_lowbit.convert._kept import Codes, Kept
from functional_lowbit.convert._match import Shell
from functional_lowbit.convert._read import Read, read_step
from functional_lowbit.convert._saved import Saved, SavedParam, read_saved
from functional_lowbit.formats._format import unpack
from functional_lowbit.sharding import ShardSpec

ENTRIES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}  # as torch calls them


def is_own(saved: Any) -> bool:
    """Whether this library saved something, as a state or as an optimizer."""
    if isinstance(saved, torch.optim.Optimizer):
        return isinstance(saved, Shell) or _has_schema(saved.state.values())
    if not isinstance(saved, Mapping):
        return False
    state = saved.get("state")
    return is_own_state(saved) or (isinstance(state, Mapping) and _has_schema(state.values()))


def is_own_state(saved: Any) -> bool:
    """Whether it is what `fl.state_dict` returned: its leaves are sorted, so parameters are in no order of a model."""
    return isinstance(saved, Mapping) and isinstance(saved.get(_schema.SCHEMA), str)


def _has_schema(entries: Any) -> bool:
    return any(isinstance(x, Mapping) and _schema.SCHEMA in x for x in entries)


def saved_of_own(saved: Any) -> Saved:
    """Parameters with entries named by field: `mu` to a leaf, `step` to a number."""
    if is_own_state(saved):
        owners, _ = _owners(saved, _schema.read(saved[_schema.SCHEMA]), "")
        return Saved([SavedParam(name, i, 0, found) for i, (name, found) in enumerate(owners.items())], [{}])
    read = read_saved(saved)
    return read._replace(params=[p._replace(entries=_of_param(p)) for p in read.params])


def _of_param(p: SavedParam) -> dict[str, Any]:
    """What is saved of one parameter is the state of a tree that is this parameter."""
    raw = p.entries.get(_schema.SCHEMA)
    if not isinstance(raw, Tensor):
        return {}
    text = _schema.of_bytes(raw)
    if text is None:
        raise WrongValue(
            f"{_schema.SCHEMA!r} of {p.words} must be bytes, got {raw.dtype} {tuple(raw.shape)}; the file is damaged"
        )
    owners, counters = _owners(p.entries, _schema.read(text), p.words)
    found = owners.get("", {})
    if found.get("step") is None and counters:  # one that counts for all parameters
        found["step"] = next(iter(counters.values()))
    return found


def _owners(
    entries: Mapping[str, Any], leaves: Mapping[str, Any], words: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Leaves by parameter and field, `step` the counter beside a moment; and counters by the path of their state."""
    owners: dict[str, dict[str, Any]] = {}
    beside: dict[str, str] = {}
    counters: dict[str, Any] = {}
    for path, described in leaves.items():
        role, field = described.get("role"), described.get("field")
        if role == "counter":
            counters.setdefault(_schema.state_of(path, described), _leaf(entries, path, described))
        elif role == "moment" and field in ENTRIES:
            name = described["param"]
            found = owners.setdefault(name, {})
            if field in found:
                raise WrongValue(
                    f"{words or f'parameter {name!r}'} has two leaves {field!r} in saved; load it with "
                    "fl.load_state_dict"
                )
            found[field] = _leaf(entries, path, described)
            beside.setdefault(name, _schema.state_of(path, described))
    for name, state in beside.items():
        owners[name]["step"] = counters.get(state)
    return owners, counters


def _leaf(entries: Mapping[str, Any], path: str, described: Mapping[str, Any]) -> Any:
    """A tensor, a number or a `QuantizedTensor`, as the schema describes it."""
    for ending in described["parts"]:
        if path + ending not in entries:
            raise WrongValue(f"saved has no entry {path + ending!r}, which its schema lists")
    parts = {ending: entries[path + ending] for ending in described["parts"]}
    if described["kind"] in _schema.NUMBERS:
        return parts[""]
    wanted = expected(path, described)
    if ".codes" in wanted and any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise WrongValue(
            f"leaf {path!r} of saved is sharded; load it with fl.load_state_dict or fl.checkpoint.load, and "
            "convert then"
        )
    for ending, (dtype, shape) in wanted.items():
        x = parts[ending]
        got = (_schema.name_of(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else None
        if got != (dtype, shape):
            words = type(x).__name__ if got is None else f"{got[0]} {got[1]}"
            raise WrongValue(f"{path + ending!r} must be a tensor, {dtype} {shape}, got {words}; the file is damaged")
    return joined(path, described, parts)


def read_own(param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """Entries as `saved_of_own` returns them."""
    moments = {f: kept_of(x) for f, x in param.entries.items() if f in ENTRIES}
    return Read(param.words, moments, {f: (f,) for f in moments}, param.group, read_step(param))


def kept_of(leaf: Any) -> Kept:
    """One of our leaves as a source."""
    if not isinstance(leaf, QuantizedTensor):
        return Kept(tuple(leaf.shape), lambda: leaf, ShardSpec.of(leaf))
    layout, grid = leaf.layout, leaf.layout.local_grid()
    found = None
    if layout.format.scaled and grid.padding == 0:
        codes, scales = leaf.local_blocks()
        assert scales is not None
        packed = layout.format.codec(layout.signed).packing > 1

        def each() -> Tensor:
            return unpack(codes, grid.block) if packed else codes

        found = Codes(layout.format.name, layout.signed, each, scales.reshape(-1), grid.block)
    return Kept(layout.shape, leaf.dequantize, layout.spec, found)
