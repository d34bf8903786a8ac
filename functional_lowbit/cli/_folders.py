"""Checkpoint folders (`fl.checkpoint`, `torch.distributed.checkpoint`), opened without running code pickled in them."""

import io
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from functional_lowbit._private import PICKLED_IN_METADATA
from functional_lowbit._refused import WrongValue
from functional_lowbit.checkpoint import _files, _folder
from functional_lowbit.cli._numbers import Pending
from functional_lowbit.cli._output import Advance, Broken, Mistake, said, told

CHUNK = 1 << 22  # bytes of a file that are looked at in one go
METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
METADATA_CLASSES = {
    *("Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex"),
}
SPOILT = "the bytes of {!r} are not those that were written (their checksum says)"


def open_folder(path: Path, unsafe: bool) -> tuple[Mapping[Any, Any], int, Callable[[Advance], list[str]]]:
    """What was saved, bytes on the disk, and how to compare checksums."""
    place = _folder.real(path)
    names = [x.name for x in place.iterdir()] if place.is_dir() else []
    if names and not any(name == _folder.METADATA or name.endswith(".distcp") for name in names):
        raise Mistake(f"{str(path)!r} is a folder without a checkpoint; give one of the files in it")
    with told(Mistake, OSError), told(Broken, WrongValue):
        folder = _folder.find(place)
    if not unsafe:
        _refuse_code(folder / _folder.METADATA)
    with told(Broken):
        metadata = _folder.metadata(folder)

    def entry(name: str, saved: Any) -> Any:
        if not isinstance(saved, TensorStorageMetadata):
            return _read(folder, metadata, name, "", unsafe)
        dtype, shape = saved.properties.dtype, tuple(saved.size)
        return Pending(dtype, shape, lambda: _read(folder, metadata, name, torch.empty(shape, dtype=dtype), unsafe))

    flat = {name: entry(name, saved) for name, saved in metadata.state_dict_metadata.items()}
    size = sum(x.stat().st_size for x in folder.iterdir() if x.is_file())
    return _nested(flat, metadata.planner_data), size, lambda advance: _damage(folder, metadata, advance)


def _nested(flat: Mapping[str, Any], places: Any) -> dict[Any, Any]:
    """The dicts and lists that torch.distributed.checkpoint flattened: it keeps the place of each entry."""
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        place = places.get(name, (name,)) if isinstance(places, Mapping) else (name,)
        node = tree
        for word in place[:-1]:
            node = node.setdefault(word, {})
        node[place[-1]] = value
    return {name: _with_lists(node) for name, node in tree.items()}


def _with_lists(node: Any) -> Any:
    """Dicts whose keys count from 0 as lists, which they were."""
    if not isinstance(node, dict):
        return node
    kids = {name: _with_lists(kid) for name, kid in node.items()}
    return [kids[i] for i in range(len(kids))] if kids and set(kids) == set(range(len(kids))) else kids


class _Unpickler(pickle.Unpickler):
    """Loads what torch puts into `.metadata`, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        plain = (module in METADATA_MODULES and name in METADATA_CLASSES) or (
            (module, name) in {*PICKLED_IN_METADATA, ("torch", "Size")}
            or (module.startswith("pathlib") and hasattr(pathlib, name) and name.endswith("Path"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not plain:
            raise Mistake(f"{module}.{name}")
        return super().find_class(module, name)


def _refuse_code(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            _Unpickler(opened).load()
    except Mistake as code:
        raise Mistake(
            f"{str(file)!r} holds more than an account of tensors: {code}; loading that can run any code, so use "
            "--unsafe if you trust whoever wrote it"
        ) from code
    except Exception as error:  # cut short or spoilt, it raises almost anything
        raise Broken(f"cannot read {str(file)!r}, the file is damaged: {said(error)}") from error


class _Planner(DefaultLoadPlanner):
    """Reads numbers and strings without running what else might be pickled there."""

    def __init__(self, unsafe: bool):
        super().__init__()
        self.unsafe = unsafe

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=not self.unsafe)


def _read(folder: Path, metadata: Any, name: str, like: Any, unsafe: bool) -> Any:
    planner = _Planner(unsafe)
    try:
        _files.read(folder, metadata, {name: like}, planner)
    except Exception as error:
        raise Broken(f"cannot read {name!r} of {str(folder)!r}, a file is damaged: {said(error)}") from error
    return planner.state_dict[name]


def _damage(folder: Path, metadata: Any, advance: Advance) -> list[str]:
    """Entries whose bytes are not those that were written. Each is a small file of torch.save, with a checksum."""
    found = []
    for index, where in metadata.storage_data.items():
        with (folder / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            stored = file.read(where.length)
        advance(len(stored), index.fqn)
        if zip_damage(io.BytesIO(stored), "the entry", lambda *done: None):
            found.append(SPOILT.format(index.fqn))
    return found


def zip_damage(file: Path | io.BytesIO, what: str, advance: Advance) -> list[str]:
    """Records of a file of torch.save whose bytes are not those that were written."""
    found = []
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # torch reads less of the directory than Python does
        return [f"the directory of {what} is not as it was written: {said(error)}"]
    with archive:
        for record in archive.infolist():
            try:
                with archive.open(record) as content:
                    while chunk := content.read(CHUNK):
                        advance(len(chunk), record.filename)
            except Exception:  # flipped bits say that a record is encrypted, or packed in a way that nobody knows
                found.append(SPOILT.format(record.filename))
    return found
