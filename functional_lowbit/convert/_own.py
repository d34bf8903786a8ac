"""What this library saved, as a source: `fl.state_dict` of a state, or the state_dict of an `fl.optim` optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _schema, formats
from functional_lowbit._quantized import Layout, QuantizedTensor
from functional_lowbit.convert._kept import Codes, Kept
from functional_lowbit.convert._read import Read, read_step
from functional_lowbit.convert._saved import Saved, SavedParam, read_saved
from functional_lowbit.convert._slots import COUNTERS
from functional_lowbit.formats._format import unpack
from functional_lowbit.sharding import ShardSpec, local_of

ENTRIES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}  # as torch calls them


def is_own(saved: Any) -> bool:
    """Whether this library saved something, as a state or as an optimizer."""
    if isinstance(saved, torch.optim.Optimizer):
        return type(saved).__module__.startswith("functional_lowbit.") or _has_schema(saved.state.values())
    if not isinstance(saved, Mapping):
        return False
    state = saved.get("state")
    return isinstance(saved.get(_schema.SCHEMA), str) or (isinstance(state, Mapping) and _has_schema(state.values()))


def _has_schema(entries: Any) -> bool:
    return any(isinstance(x, Mapping) and _schema.SCHEMA in x for x in entries)


def saved_of_own(speaker: str, saved: Any) -> Saved:
    """Parameters with entries named by field: `mu` to a leaf, `step` to a number.

    Raises:
        ValueError: for a state whose schema is damaged, and for one parameter with two leaves of one field.
    """
    if not isinstance(saved, torch.optim.Optimizer) and isinstance(saved.get(_schema.SCHEMA), str):
        return _of_state(speaker, saved)
    read = read_saved(speaker, saved)
    params = []
    for p in read.params:
        raw = p.entries.get(_schema.SCHEMA)
        if not isinstance(raw, Tensor):
            params.append(p._replace(entries={}))
            continue
        text = bytes(local_of(raw).tolist()).decode(errors="replace")
        found: dict[str, Any] = {}
        for path, described in _schema.read(speaker, text).items():
            field = path.rsplit(".", 1)[-1]
            _put(speaker, found, p.words, field, _leaf(speaker, p.entries, path, described))
        params.append(p._replace(entries=found))
    return read._replace(params=params)


def _of_state(speaker: str, saved: Mapping[str, Any]) -> Saved:
    """`0.mu.layers.0.weight`: the first part of the path that is a known field ends the state's part of it."""
    leaves = _schema.read(speaker, saved[_schema.SCHEMA])
    owners: dict[str, dict[str, Any]] = {}
    counters: dict[str, Any] = {}
    for path, described in leaves.items():
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part in ENTRIES), None)
        if at is not None:
            owner, node = ".".join(parts[at + 1 :]), ".".join(parts[:at])
            found = owners.setdefault(owner, {})
            _put(speaker, found, f"parameter {owner!r}", parts[at], _leaf(speaker, saved, path, described))
            found.setdefault("step", f"{node}.step" if node else "step")
        elif parts[-1] in COUNTERS:
            counters[path] = _leaf(speaker, saved, path, described)
    for found in owners.values():
        found["step"] = counters.get(found["step"])
    params = [SavedParam(owner, i, 0, found) for i, (owner, found) in enumerate(owners.items())]
    return Saved(params, [{}])


def _put(speaker: str, found: dict[str, Any], words: str, field: str, leaf: Any) -> None:
    if field not in ENTRIES and field not in COUNTERS:
        return
    if field in COUNTERS:
        found.setdefault("step", leaf)
    elif field in found:
        raise ValueError(f"{speaker}: {words} has two leaves {field!r} in saved; load it with fl.load_state_dict")
    else:
        found[field] = leaf


def _leaf(speaker: str, entries: Mapping[str, Any], path: str, described: Mapping[str, Any]) -> Any:
    """A tensor, a number or a `QuantizedTensor`, as the schema describes it."""
    parts = {ending: entries.get(path + ending) for ending in described["parts"]}
    if described["kind"] != "quantized" or described["stored"] == "values":
        return next(iter(parts.values()))
    if any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise ValueError(
            f"{speaker}: leaf {path!r} of saved is sharded; load it with fl.load_state_dict or fl.checkpoint.load, and "
            "convert then"
        )
    format = formats.get(described["format"])
    shape, block = tuple(described["shape"]), described["block_size"]
    return QuantizedTensor(
        parts[".codes"], parts.get(".scales"), Layout(format, described["signed"], shape, block, None)
    )


def read_own(speaker: str, param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """Entries as `saved_of_own` returns them."""
    moments = {f: kept_of(x) for f, x in param.entries.items() if f in ENTRIES}
    return Read(param.words, moments, {f: (f,) for f in moments}, param.group, read_step(speaker, param))


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
