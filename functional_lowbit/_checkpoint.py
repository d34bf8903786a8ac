"""state_dict and load_state_dict: a state as flat names to tensors, and back."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from functional_lowbit import _interrupted, _tree
from functional_lowbit._quantized import QuantizedTensor
from functional_lowbit.sharding import ShardSpec

SCHEMA = "schema"  # the one entry that is a string: JSON of what each leaf is
VERSION = 1  # of the schema


def state_dict(state: Any) -> dict[str, Any]:
    """A state as a flat dict, ready for `torch.save` and `torch.distributed.checkpoint`.

    Nothing is copied or changed: the tensors are those of the state.

    Args:
        state: The state of any transformation.

    Returns:
        Path to tensor or DTensor, for instance `0.mu.layers.0.weight.codes` and `….scales`, `0.step`; and under
        "schema" a JSON string with the kind, dtype, shape, format and block size of every leaf.

    Raises:
        TypeError: for a leaf that is neither a tensor nor a bool, a number or a string.
        ValueError: if two leaves have one path.
        RuntimeError: for a state that an interrupted step has left half-updated.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> saved = fl.state_dict(fl.adam8bit(1e-3).init({"w": torch.zeros(64, 64)}))
        >>> sorted(saved)
        ['0.mu.w.codes', '0.mu.w.scales', '0.nu.w.codes', '0.nu.w.scales', '0.step', 'schema']
    """
    _interrupted.refuse("state_dict", state)
    saved: dict[str, Any] = {}
    schema: dict[str, Any] = {}
    for path, leaf in _named_leaves(state, ""):
        if path in schema or path == SCHEMA:
            raise ValueError(f"state_dict: two leaves have the path {path!r}; rename one")
        schema[path] = _describe(path, leaf)
        for suffix, part in _parts(leaf):
            if path + suffix in saved:
                raise ValueError(f"state_dict: two leaves have the path {path + suffix!r}; rename one")
            saved[path + suffix] = part
    saved[SCHEMA] = json.dumps({"version": VERSION, "leaves": schema}, sort_keys=True)
    return saved


def load_state_dict(state: Any, saved: Mapping[str, Any]) -> Any:
    """A state like `state`, with the tensors of `saved`.

    Args:
        state: A state of the same transformation for the same parameters, for instance from `init`. Not written to.
        saved: What `state_dict` returned, or was loaded from a file. Its tensors are used, not copied.

    Returns:
        The loaded state. Every leaf has the dtype that the schema says; nothing is cast.

    Raises:
        ValueError: for missing and unexpected leaves, and for a leaf of another format, block size, shape, dtype or
            sharding. Nothing is half-loaded.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.adam8bit(1e-3)
        >>> state = tx.init({"w": torch.zeros(64, 64)})
        >>> fl.load_state_dict(state, fl.state_dict(state))[0].step
        tensor(0)
    """
    if SCHEMA not in saved:
        raise ValueError(
            f"load_state_dict: saved has no entry {SCHEMA!r}; it must come from functional_lowbit.state_dict"
        )
    document = json.loads(saved[SCHEMA])
    if document.get("version") != VERSION:
        raise ValueError(f"load_state_dict: the schema's version must be {VERSION}, got {document.get('version')!r}")
    schema = document["leaves"]
    wanted = dict(_named_leaves(state, ""))
    for path in wanted:
        if path not in schema:
            raise ValueError(f"load_state_dict: saved has no leaf {path!r}, which the state has")
    for path in schema:
        if path not in wanted:
            raise ValueError(f"load_state_dict: saved has a leaf {path!r}, which the state has not")
    new: dict[str, Any] = {}
    for path, leaf in wanted.items():
        own = _describe(path, leaf)
        for what, value in own.items():
            if schema[path].get(what) != value:
                raise ValueError(
                    f"load_state_dict: leaf {path!r} was saved with {what} {schema[path].get(what)!r}, but the state "
                    f"has {value!r}"
                )
        parts = []
        for suffix, part in _parts(leaf):
            if path + suffix not in saved:
                raise ValueError(f"load_state_dict: saved has no entry {path + suffix!r}")
            parts.append(_checked(path + suffix, part, saved[path + suffix]))
        if isinstance(leaf, QuantizedTensor):
            new[path] = QuantizedTensor(parts[0], parts[1] if len(parts) > 1 else None, leaf.layout)
        else:
            new[path] = parts[0]
    return _replace(state, "", new)


def _named_leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, leaf) pairs; a `QuantizedTensor` is one leaf."""
    level = None if isinstance(node, QuantizedTensor) else _tree.children(node)
    if level is None:
        yield path, node
        return
    for kid, name in zip(level[0], level[1], strict=True):
        yield from _named_leaves(kid, f"{path}.{name}" if path else name)


def _replace(node: Any, path: str, new: Mapping[str, Any]) -> Any:
    level = None if isinstance(node, QuantizedTensor) else _tree.children(node)
    if level is None:
        return new[path]
    kids, names, rebuild = level
    return rebuild([_replace(k, f"{path}.{n}" if path else n, new) for k, n in zip(kids, names, strict=True)])


def _parts(leaf: Any) -> list[tuple[str, Any]]:
    """What a leaf is saved as: (suffix of the path, tensor)."""
    if not isinstance(leaf, QuantizedTensor):
        return [("", leaf)]
    parts = [(".codes", leaf.codes)]
    return parts if leaf.scales is None else [*parts, (".scales", leaf.scales)]


def _describe(path: str, leaf: Any) -> dict[str, Any]:
    """What has to be equal for a leaf to be loaded into another."""
    if isinstance(leaf, QuantizedTensor):
        layout = leaf.layout
        return {
            "kind": "quantized",
            "format": layout.format.name,
            "signed": layout.signed,
            "block_size": layout.block_size,
            "shape": list(layout.shape),
        }
    if isinstance(leaf, Tensor):
        return {"kind": "tensor", "dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
    if isinstance(leaf, (bool, int, float, str)):
        return {"kind": type(leaf).__name__}
    raise TypeError(
        f"state_dict: leaf {path!r} must be a tensor, a bool, a number or a string, got {type(leaf).__name__}"
    )


def _checked(path: str, own: Any, saved: Any) -> Any:
    """The saved part, if it fits the place of `own`."""
    if not isinstance(own, Tensor):
        return saved
    if not isinstance(saved, Tensor):
        raise ValueError(f"load_state_dict: {path!r} must be a tensor, got {type(saved).__name__}")
    for what, a, b in (
        ("dtype", own.dtype, saved.dtype),
        ("shape", tuple(own.shape), tuple(saved.shape)),
        ("sharding", _sharding(own), _sharding(saved)),
    ):
        if a != b:
            raise ValueError(f"load_state_dict: {path!r} must have {what} {a}, got {b}")
    return saved.to(own.device) if saved.device != own.device else saved


def _sharding(x: Tensor) -> Any:
    spec = ShardSpec.of(x)
    return "none (a plain tensor)" if spec is None else spec.placements
