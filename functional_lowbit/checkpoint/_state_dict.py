"""state_dict and load_state_dict: a state as flat names to tensors, and back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted
from functional_lowbit._core.state.named import Named, map_named, named_leaves
from functional_lowbit._core.state.resting import is_pinned, pinned
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import Reading, numbers, reading
from functional_lowbit.sharding import ShardSpec


@speaking("state_dict")
def state_dict(state: Any) -> dict[str, Any]:
    """A state as a flat dict, ready for `torch.save` and `torch.distributed.checkpoint`.

    Nothing is changed. Nothing is copied either, except leaves whose blocks this mesh cuts: their codes mean nothing on
    another mesh, so they are saved as float32 numbers.

    Args:
        state: The state of any transformation, or any tree of tensors, numbers and states. Numbers and strings of
            subclasses (numpy's float64, enums) are saved as the bool, int, float or string that they stand for.

    Returns:
        Path to tensor or DTensor, for instance `0.mu.layers.0.weight.codes` and `….scales` (or `….values`), `0.step`;
        and under "schema" a JSON string with the library's version and, of every leaf, kind, dtypes, shape, format,
        block size, the field of a state class that it is of, its parameter and its sign.

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
    interrupted.refuse(state)
    return flat(named_leaves(state))


def flat(leaves: Iterable[tuple[Named, Any]]) -> dict[str, Any]:
    """The entries of some leaves, and their schema."""
    saved: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for named, leaf in leaves:
        path, own = named.path, _schema.describe(named, leaf)
        for ending in own["parts"]:
            name = path + ending
            if name in saved or name == _schema.SCHEMA or path in described:
                raise WrongValue(f"two leaves have the path {name!r}; rename one")
            saved[name] = _part(leaf, ending)
        described[path] = own
    saved[_schema.SCHEMA] = _schema.write(described)
    return saved


@speaking("load_state_dict")
def load_state_dict(state: Any, saved: Mapping[str, Any], *, convert: bool = False) -> Any:
    """A state like `state`, with the tensors of `saved`.

    Args:
        state: A state of the same transformation for the same parameters, for instance from `init`. Not written to.
        saved: What `state_dict` returned, or was loaded from a file. Its tensors are used, not copied.
        convert: Whether leaves of another format or block size, or in float32 instead of few bits, are converted to
            what `state` has; else they are an error. Shapes, dtypes and the structure must be equal in any case.

    Returns:
        The loaded state. Nothing is cast: every leaf has the dtype that it has in `state`.

    Raises:
        ValueError: for missing and unexpected leaves and entries, for a leaf of another kind, format, block size,
            shape, dtype or sharding, and for a schema that is missing, damaged or newer than this library. All is
            looked at before anything is made.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> params = {"w": torch.zeros(64, 64)}
        >>> saved = fl.state_dict(fl.adam8bit(1e-3).init(params))
        >>> fl.load_state_dict(fl.adam8bit(1e-3).init(params), saved)[0].step
        tensor(0)
        >>> fl.load_state_dict(fl.adam4bit(1e-3).init(params), saved, convert=True)[0].mu["w"]
        QuantizedTensor(root4, shape=(64, 64), block_size=128)
    """
    return read(state, saved, convert)


def read(state: Any, saved: Mapping[str, Any], convert: bool) -> Any:
    """As `load_state_dict`, for whoever speaks."""
    if _schema.SCHEMA not in saved:
        raise WrongValue(f"saved has no entry {_schema.SCHEMA!r}; it must come from functional_lowbit.state_dict")
    leaves = _schema.read(saved[_schema.SCHEMA])
    readings = plan(state, leaves, {name: _entry(x) for name, x in saved.items()}, convert)
    return build(state, readings, lambda name, like, device: _moved(saved[name], device))


class Entry(NamedTuple):
    """What is known of an entry before it is read."""

    kind: str  # "tensor", or the name of a type
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    sharding: Any = None  # the placements; None: any will do, on any mesh
    mesh: Any = None  # ranks, nested as the mesh's dimensions are


def plan(state: Any, leaves: Mapping[str, Any], entries: Mapping[str, Entry], convert: bool) -> dict[str, Reading]:
    """How each leaf is read. Everything is compared here, so that nothing is half-loaded.

    Args:
        state: What is to be loaded into.
        leaves: The schema's description of each leaf that was saved.
        entries: What was saved, by name.
        convert: As in `load_state_dict`.
    """
    wanted: dict[str, tuple[Named, Any]] = {}
    for named, leaf in named_leaves(state):
        path = named.path
        if path in wanted:
            raise WrongValue(f"two leaves of the state have the path {path!r}; rename one")
        wanted[path] = named, leaf
        if path not in leaves:
            raise WrongValue(f"saved has no leaf {path!r}, which the state has")
    listed = {_schema.SCHEMA}
    for path, leaf in leaves.items():
        if path not in wanted:
            raise WrongValue(f"saved has a leaf {path!r}, which the state has not")
        listed |= {path + ending for ending in leaf["parts"]}
    for name in entries:
        if name not in listed:
            raise WrongValue(f"saved has an entry {name!r}, which its schema does not list")
    readings = {path: reading(*own, leaves[path], convert) for path, own in wanted.items()}
    for path, one in readings.items():
        for ending, like in one.likes.items():
            name = path + ending
            if name not in entries:
                raise WrongValue(f"saved has no entry {name!r}, which its schema lists")
            _check(name, _entry(like), entries[name])
    return readings


def build(state: Any, readings: Mapping[str, Reading], take: Callable[[str, Any, torch.device | None], Any]) -> Any:
    """The loaded state; `take(name, like, device)` hands out each entry once."""
    new = {
        path: one.build({ending: take(path + ending, like, one.device) for ending, like in one.likes.items()})
        for path, one in readings.items()
    }
    for path, one in readings.items():
        if one.pinned:  # else a state that is offloaded would be copied more slowly from here on
            new[path] = _optree.map_leaves(lambda x: x if is_pinned(x) else pinned(x), new[path])
    return map_named(lambda named, _: new[named.path], state)


def _check(name: str, own: Entry, saved: Entry) -> None:
    """Refuse an entry that does not fit."""
    if own.kind != saved.kind:
        raise WrongValue(f"{name!r} must be a {own.kind}, got {saved.kind}")
    for what, a, b in (
        ("dtype", own.dtype, saved.dtype),
        ("shape", own.shape, saved.shape),
        ("sharding", own.sharding, saved.sharding),
    ):
        if a != b and not (what == "sharding" and b is None):
            raise WrongValue(f"{name!r} must have {what} {a}, got {b}")
    if own.mesh != saved.mesh and saved.sharding is not None:
        raise WrongValue(
            f"{name!r} must be on a mesh of the ranks {own.mesh}, got {saved.mesh}; checkpoint.save and "
            "load take any mesh"
        )


def _entry(x: Any) -> Entry:
    if not isinstance(x, Tensor):
        return Entry(type(_schema.plain(x)).__name__)
    spec = ShardSpec.of(x)
    if spec is None:
        return Entry("tensor", x.dtype, tuple(x.shape), "none (a plain tensor)")
    return Entry("tensor", x.dtype, tuple(x.shape), spec.placements, spec.mesh.mesh.tolist())


def _moved(saved: Any, device: torch.device | None) -> Any:
    """On the leaf's device; a leaf on the meta device only says what is wanted."""
    if not isinstance(saved, Tensor) or device is None or device.type == "meta" or saved.device == device:
        return saved
    return saved.to(device)


def _part(leaf: Any, ending: str) -> Any:
    """What is saved of a leaf under one ending of its name."""
    if ending == _schema.VALUES:
        return numbers(leaf)
    return getattr(leaf, ending[1:]) if ending else _schema.plain(leaf)
