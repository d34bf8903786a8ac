"""What this library saved, as a source: `fl.state_dict` of a state, or the state_dict of an `fl.optim` optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.state.quantized import QuantizedTensor, zeros
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import saved_layout
from functional_lowbit.convert._kept import Codes, Kept
from functional_lowbit.convert._read import Read, read_step
from functional_lowbit.convert._saved import Saved, SavedParam, read_saved
from functional_lowbit.convert._slots import COUNTERS
from functional_lowbit.formats._format import unpack
from functional_lowbit.sharding import ShardSpec, local_of

ENTRIES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}  # as torch calls them
HYPERS = "hyperparams"  # the field of inject_hyperparams, whose numbers may be called as moments are


def is_own(saved: Any) -> bool:
    """Whether this library saved something, as a state or as an optimizer."""
    if isinstance(saved, torch.optim.Optimizer):
        return type(saved).__module__.startswith("functional_lowbit.") or _has_schema(saved.state.values())
    if not isinstance(saved, Mapping):
        return False
    state = saved.get("state")
    return is_own_state(saved) or (isinstance(state, Mapping) and _has_schema(state.values()))


def is_own_state(saved: Any) -> bool:
    """Whether it is what `fl.state_dict` returned: its leaves are sorted, so parameters are in no order of a model."""
    return isinstance(saved, Mapping) and isinstance(saved.get(_schema.SCHEMA), str)


def _has_schema(entries: Any) -> bool:
    return any(isinstance(x, Mapping) and _schema.SCHEMA in x for x in entries)


def saved_of_own(speaker: str, saved: Any) -> Saved:
    """Parameters with entries named by field: `mu` to a leaf, `step` to a number.

    Raises:
        ValueError: for a state whose schema is damaged, and for one parameter with two leaves of one field.
    """
    if is_own_state(saved):
        return _of_state(speaker, saved)
    read = read_saved(speaker, saved)
    params = []
    for p in read.params:
        raw = p.entries.get(_schema.SCHEMA)
        if not isinstance(raw, Tensor):
            params.append(p._replace(entries={}))
            continue
        if raw.dtype != torch.uint8 or raw.ndim != 1:
            raise ValueError(
                f"{speaker}: {_schema.SCHEMA!r} of {p.words} must be bytes, got {raw.dtype} {tuple(raw.shape)}; the "
                "file is damaged"
            )
        text = bytes(local_of(raw).tolist()).decode(errors="replace")
        params.append(p._replace(entries=_of_param(speaker, p, _schema.read(speaker, text))))
    return read._replace(params=params)


def _of_param(speaker: str, p: SavedParam, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`0.mu`: the last part of the path is the field. The counter beside a moment is the parameter's."""
    found: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    for path, described in leaves.items():
        node, _, field = path.rpartition(".")
        if field in COUNTERS:
            counters[path] = _leaf(speaker, p.entries, path, described)
        elif field in ENTRIES and node.rpartition(".")[-1] != HYPERS:
            _put(speaker, found, p.words, field, _leaf(speaker, p.entries, path, described))
            found.setdefault("step", f"{node}.step" if node else "step")
    beside = counters.get(found.get("step", ""))
    step = next(iter(counters.values()), None) if beside is None else beside
    return found if step is None and "step" not in found else {**found, "step": step}


def _of_state(speaker: str, saved: Mapping[str, Any]) -> Saved:
    """`0.mu.layers.0.weight`: a known field ends the state's part of the path."""
    leaves = _schema.read(speaker, saved[_schema.SCHEMA])
    owners: dict[str, dict[str, Any]] = {}
    counters: dict[str, Any] = {}
    fields = _fields(leaves)
    for path, described in leaves.items():
        parts, at = path.split("."), fields.get(path)
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


def _fields(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Which part of a leaf's path is a moment's field, for leaves that are of one.

    Labels of a partition and names in a chain may be called as fields are. A field has a `step` beside it, or at least
    no state below it that has.
    """
    found: dict[str, int] = {}
    open_: dict[str, list[int]] = {}
    states: set[str] = set()
    for path in leaves:
        parts = path.split(".")
        known = [i for i, part in enumerate(parts) if part in ENTRIES and (i == 0 or parts[i - 1] != HYPERS)]
        at = next((i for i in known if ".".join([*parts[:i], "step"]) in leaves), None)
        if at is None:
            open_[path] = known
        else:
            found[path] = at
            states |= {".".join(parts[:i]) for i in range(1, at + 1)}
    for path, known in open_.items():
        parts = path.split(".")
        at = next((i for i in known if ".".join(parts[: i + 1]) not in states), None)
        if at is not None:
            found[path] = at
    return found


def _put(speaker: str, found: dict[str, Any], words: str, field: str, leaf: Any) -> None:
    if field in found:
        raise ValueError(f"{speaker}: {words} has two leaves {field!r} in saved; load it with fl.load_state_dict")
    found[field] = leaf


def _leaf(speaker: str, entries: Mapping[str, Any], path: str, described: Mapping[str, Any]) -> Any:
    """A tensor, a number or a `QuantizedTensor`, as the schema describes it."""
    for ending in described["parts"]:
        if path + ending not in entries:
            raise ValueError(f"{speaker}: saved has no entry {path + ending!r}, which its schema lists")
    parts = {ending: entries[path + ending] for ending in described["parts"]}
    if described["kind"] in _schema.NUMBERS:
        return next(iter(parts.values()), None)
    shape = tuple(described["shape"])
    if described["kind"] != "quantized" or described["stored"] == "values":
        (ending, dtype), *_ = described["parts"].items()
        _check_part(speaker, path + ending, parts[ending], dtype, shape)
        return parts[ending]
    if any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise ValueError(
            f"{speaker}: leaf {path!r} of saved is sharded; load it with fl.load_state_dict or fl.checkpoint.load, and "
            "convert then"
        )
    layout = saved_layout(speaker, path, None, described, None)
    like = zeros(layout, torch.device("meta"))
    for ending, x in ((".codes", like.codes), (".scales", like.scales)):
        if x is not None:
            _check_part(speaker, path + ending, parts.get(ending), str(x.dtype), tuple(x.shape))
    leaf = QuantizedTensor(parts[".codes"], parts.get(".scales"), layout)
    return leaf if layout.shape == shape else leaf.dequantize().reshape(shape)  # of another version's blocks


def _check_part(speaker: str, name: str, x: Any, dtype: str, shape: tuple[int, ...]) -> None:
    dtype = dtype.removeprefix("torch.")
    got = f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
    if got != f"{dtype} {shape}":
        raise ValueError(f"{speaker}: {name!r} must be a tensor, {dtype} {shape}, got {got}; the file is damaged")


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
