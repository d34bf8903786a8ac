"""Files and folders of tensors, opened so that one tensor at a time is read."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.report.headers import DTYPES, header_text
from functional_lowbit.checkpoint import _folder
from functional_lowbit.checkpoint._safetensors import NUMBERS
from functional_lowbit.checkpoint._schema import SCHEMA
from functional_lowbit.cli._folders import open_folder, zip_damage
from functional_lowbit.cli._numbers import Pending
from functional_lowbit.cli._output import Advance, Broken, Mistake, said

FOLDER, SAFETENSORS, TORCH = "checkpoint folder", "safetensors file", "file of torch.save"
TORCHAO = "torchao"  # whose tensor classes are known to torch.load once it is imported
PICKLE = b"\x80"  # the first byte of a file of torch.save from before 2020, which was no zip file


class Store(NamedTuple):
    """What a path holds."""

    kind: str  # in words: "file of torch.save"
    tree: Any  # dicts and lists of tensors, of `Pending` tensors, and of numbers
    size: int  # bytes on the disk
    check: Callable[[Advance], list[str]] = lambda advance: []  # compares checksums, if there are any; what differs


def open_store(path: str, unsafe: bool) -> Store:
    """What is at a path; tensors stay in the file until they are asked for. `unsafe` lets code in pickled files run."""
    place = Path(path)
    if place.is_dir() or (not place.exists() and _folder.previous(_folder.real(place)).exists()):
        return Store(FOLDER, *open_folder(place, unsafe))
    if not place.exists():
        raise Mistake(f"there is no {path!r}")
    if not place.is_file():
        raise Mistake(f"{path!r} is no file (a pipe or a device); write what comes from it into a file first")
    try:
        with place.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise Mistake(f"cannot read {path!r}: {error.strerror}") from error
    if not start:
        raise Broken(f"{path!r} is empty")
    if place.suffix == ".safetensors" or (start[8:9] == b"{" and not start.startswith(b"PK")):
        return Store(SAFETENSORS, _safetensors(place), place.stat().st_size)
    zipped = _is_zip(place)
    if not zipped and start.startswith(b"PK"):
        raise Broken(f"{str(place)!r} is truncated: it begins as a file of torch.save, and has no end")
    if not zipped and not start.startswith(PICKLE):
        raise Mistake(f"{str(place)!r} is no file of torch.save, no safetensors file and no checkpoint folder")
    store = Store(TORCH, _load(place, zipped, unsafe), place.stat().st_size)
    return store._replace(check=lambda advance: zip_damage(place, repr(str(place)), advance)) if zipped else store


def _is_zip(place: Path) -> bool:
    try:
        return zipfile.is_zipfile(place)
    except zipfile.BadZipFile:  # it has the end of one, with flipped bits
        return True


def _load(place: Path, zipped: bool, unsafe: bool) -> Any:
    try:
        return torch.load(place, map_location="cpu", weights_only=not unsafe, mmap=zipped)
    except Exception as error:  # damaged files make torch raise almost anything
        foreign = _foreign(place) if zipped and isinstance(error, pickle.UnpicklingError) else []
        if not zipped:  # torch lists the names of zip files only
            foreign = re.findall(r"GLOBAL:? (?:GLOBAL )?([\w.]+)", str(error), re.IGNORECASE)[:1]
        # Its classes may be loaded once they are known; a file's wish alone imports nothing else.
        if zipped and any(name.startswith(f"{TORCHAO}.") for name in foreign) and find_spec(TORCHAO):
            import_module(f"{TORCHAO}.optim")
            foreign = _foreign(place)
            if not foreign:
                return _load(place, zipped, unsafe)
        if foreign:
            missing = f"; is {TORCHAO} installed?" if any(x.startswith(f"{TORCHAO}.") for x in foreign) else ""
            raise Mistake(
                f"{str(place)!r} holds more than tensors and numbers: {', '.join(foreign)}{missing}; loading that can "
                "run any code, so use --unsafe if you trust whoever wrote it"
            ) from error
        first = re.split(r"(?<=[^.])\. |\n|; ", said(error))[0].rstrip(".")  # the rest is advice to programmers
        raise Broken(f"cannot read {str(place)!r} as a file of torch.save: {first}") from error


def _foreign(place: Path) -> list[str]:
    """Classes and functions that a file names and torch does not know to be harmless."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(place))
    except Exception:
        return []


def _safetensors(path: Path) -> Mapping[str, Any]:
    """Tensors by name, and what `fl.checkpoint.save_safetensors` puts beside them. The package is not needed."""
    size = path.stat().st_size
    length, text = header_text(path)
    if size < 8 or len(text) < length:
        raise Broken(f"{str(path)!r} is truncated: its header alone needs {length + 8} bytes of {size}")
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        start = length + 8
        tree: dict[str, Any] = {name: _entry(path, name, x, start, size) for name, x in sorted(header.items())}
        tree.update(json.loads(metadata.get(NUMBERS, "{}")))
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:  # bytes that were inserted have moved those behind them
            raise Broken(f"{str(path)!r} has {size} bytes, and its header tells of {end}")
    except Broken:
        raise
    except Exception as error:  # a damaged header is any JSON, or none
        raise Broken(f"cannot read {str(path)!r}, its header is damaged: {error}") from error
    return {**tree, SCHEMA: metadata[SCHEMA]} if SCHEMA in metadata else tree


def _entry(path: Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> Pending:
    if entry["dtype"] not in DTYPES:
        raise Broken(f"{str(path)!r} has {name!r} of the dtype {entry['dtype']!r}, which torch does not have")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, end = entry["data_offsets"]
    if end - first != dtype.itemsize * prod(shape):
        raise Broken(f"{str(path)!r} has {end - first} bytes for {name!r} of shape {shape} and {dtype}")
    if start + end > size:
        raise Broken(f"{str(path)!r} is truncated: it has {size} bytes of {start + end}, which {name!r} needs")

    def read() -> Tensor:
        with path.open("rb") as file:
            file.seek(start + first)
            stored = bytearray(file.read(end - first))
        numbers = torch.frombuffer(stored, dtype=torch.uint8) if stored else torch.empty(0, dtype=torch.uint8)
        return numbers.view(dtype).view(shape)

    return Pending(dtype, shape, read)
