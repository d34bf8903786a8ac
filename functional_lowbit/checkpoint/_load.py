"""Reading a checkpoint: looked at as a whole before anything is read, on any number of ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from functional_lowbit import sharding
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.checkpoint import _files, _folder, _ranks, _schema, _state_dict


@speaking("checkpoint.load")
def load(path: str | os.PathLike[str], tree: Any, *, convert: bool = False) -> Any:
    """Read a checkpoint into a tree like the given one, on any number of ranks. Every rank must call this.

    All files, names, shapes and dtypes are looked at before anything is read.

    Args:
        path: What was given to `save`.
        tree: A tree of the same structure, for instance of a fresh model and `tx.init(params)`; its sharding is the
            one that the result has. It is not written to. Leaves on the meta device take no memory; the result's are
            on the device of their mesh, or on the CPU if they are plain.
        convert: As in `load_state_dict`: whether another format or block size may be converted.

    Returns:
        A new tree. `model.load_state_dict(loaded["model"])` puts what `model.state_dict()` gave back into a module.

    Raises:
        FileNotFoundError: if there is no checkpoint; another OSError for a place that cannot be looked at.
        ValueError: for a checkpoint that is incomplete, damaged, newer than this library, or of another tree; the text
            names the file or the leaf. For one that is replaced again and again while it is read; if ranks give
            different paths. On all ranks.
        RuntimeError: if another rank ended.

    Example:
        >>> import tempfile, torch, functional_lowbit as fl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fl.checkpoint.save(f"{folder}/last", {"w": torch.ones(2)})
        ...     fl.checkpoint.load(f"{folder}/last", {"w": torch.zeros(3)})
        Traceback (most recent call last):
            ...
        functional_lowbit._refused.WrongValue: checkpoint.load: leaf 'w' was saved with shape [2], but the state has [3]
    """
    target = _folder.real(path)
    _ranks.same("path", str(target))
    for _ in range(2):
        before, loaded, error = _folder.identity(target), None, None
        try:
            loaded = _load(target, tree, convert)
        except Exception as raised:  # on all ranks
            error = raised
        found = _ranks.of_all((before, _folder.identity(target)))
        if error is not None and all(first == last for first, last in found):
            raise error
        if error is None and len({x for pair in found for x in pair}) == 1:  # every rank read this one, and no other
            return loaded
    raise WrongValue(
        f"{str(target)!r} was replaced while it was read, twice, or is another one on another rank; load it "
        "when nothing is saved there, from a disk that all ranks see"
    )


def _load(target: Path, tree: Any, convert: bool) -> Any:
    def look() -> Any:
        folder = _folder.find(target)
        metadata = _folder.metadata(folder)
        saved = metadata.state_dict_metadata
        if _schema.SCHEMA not in saved:
            raise WrongValue(f"{str(folder)!r} has no entry {_schema.SCHEMA!r}; it must come from checkpoint.save")
        leaves = _schema.read(_read(folder, metadata, {_schema.SCHEMA: ""})[_schema.SCHEMA])
        entries = {name: _entry(x, leaves.get(name, {}).get("kind")) for name, x in saved.items()}
        return folder, metadata, _state_dict.plan(tree, leaves, entries, convert)

    def read() -> Any:
        wanted = {
            name + ending: _empty(like, one.device)
            for name, one in readings.items()
            for ending, like in one.likes.items()
        }
        _read(folder, metadata, wanted)
        return _state_dict.build(tree, readings, lambda name, *_: wanted.pop(name))

    folder, metadata, readings = _ranks.together(look)
    return _ranks.together(read)


def _read(folder: Path, metadata: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """`wanted`, filled."""
    try:
        _files.read(folder, metadata, wanted)
    except Exception as error:
        raise WrongValue(f"cannot read {str(folder)!r}, a file is damaged: {error}") from error
    return wanted


def _entry(saved: Any, kind: str | None) -> _state_dict.Entry:
    if isinstance(saved, TensorStorageMetadata):
        return _state_dict.Entry("tensor", saved.properties.dtype, tuple(saved.size))
    return _state_dict.Entry(kind if kind in _schema.NUMBERS else "object")


def _empty(like: Any, device: torch.device | None) -> Any:
    """A place to read into; its memory is nobody else's."""
    if not isinstance(like, Tensor):
        return like
    spec = sharding.ShardSpec.of(like)
    if device is not None and device.type == "meta":
        device = torch.device("cpu" if spec is None else spec.mesh.device_type)
    empty = torch.empty_like(sharding.local_of(like), device=device, requires_grad=False)
    return empty if spec is None else spec.wrap(empty)
