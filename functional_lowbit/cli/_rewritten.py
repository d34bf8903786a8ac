"""A checkpoint with other states in it, written bit for bit as it was meant, or not at all."""

import os
import shutil
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from functional_lowbit.checkpoint import _folder
from functional_lowbit.checkpoint._safetensors import write as write_safetensors
from functional_lowbit.checkpoint._save import write as write_folder
from functional_lowbit.cli._numbers import dense_parts, is_tensor, take
from functional_lowbit.cli._output import Broken, Mistake, progress, said
from functional_lowbit.cli._stores import FOLDER, SAFETENSORS, TORCH, open_store


def check_place(source: str, target: str, force: bool) -> None:
    """Refuse to overwrite what is there."""
    if os.path.realpath(source) == os.path.realpath(target):
        raise Mistake(f"{target!r} is what is converted; write to another path")
    if os.path.lexists(target) and not force:
        raise Mistake(f"{target!r} is there already; --force replaces it")
    if os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        raise Mistake(f"{target!r} is a pipe or a device; write to a file")
    if not Path(target).absolute().parent.is_dir():
        raise Mistake(f"there is no folder {str(Path(target).parent)!r} to write into")


def write(kind: str, target: str, tree: Any, unsafe: bool) -> None:
    """Write a whole tree, read what was written, and only then give it its name. `kind` is that of a `Store`."""
    place = Path(os.path.realpath(target))
    if place.suffix == ".safetensors" and kind != SAFETENSORS:
        raise Mistake(f"what is written is a {kind}, which must not be called {target!r}")
    partial = place.with_name(f".{place.name}.{uuid4().hex}{place.suffix}")
    try:
        try:
            if kind == FOLDER:
                write_folder(partial, lambda: tree)
            elif kind == SAFETENSORS:
                write_safetensors(partial, lambda: tree)
            else:
                with partial.open("wb") as file:
                    torch.save(tree, file)
                    file.flush()
                    os.fsync(file.fileno())
        except (OSError, RuntimeError, ImportError) as error:
            raise Mistake(f"cannot write {target!r}: {said(_cause(error))}") from error
        with progress("verify", 1) as advance:
            written, wanted = open_store(str(partial), unsafe).tree, tree
            if kind != TORCH:  # in another order
                written, wanted = dict(sorted(written.items())), dict(sorted(tree.items()))
            wrong = first_difference(wanted, written)
            advance(1)
        if wrong is not None:
            raise Broken(f"{wrong!r} was not written as it should be, so nothing was put at {target!r}; try again")
        if kind != FOLDER and place.is_dir():
            raise Mistake(f"{str(place)!r} is a folder, and what is written is a file; move it away")
        if kind == FOLDER and not (_folder.nothing_at(place) or (place / _folder.METADATA).is_file()):
            raise Mistake(f"{str(place)!r} is no checkpoint; move it away")
        _folder.rename(partial, place)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _cause(error: BaseException) -> BaseException:
    """What the system said. torch hides a full disk behind an error of its own about positions in a file."""
    cause: BaseException | None = error
    while cause is not None:
        error, cause = cause if isinstance(cause, OSError) else error, cause.__cause__ or cause.__context__
    return error


def replaced(tree: Any, keys: Sequence[Any], new: Any) -> Any:
    """A tree with another node at the place that keys lead to; nothing is written to."""
    if not keys:
        return new
    first, *behind = keys
    if isinstance(tree, Mapping):
        changed = copy(tree)  # of the same class and order
        changed[first] = replaced(tree[first], behind, new)  # type: ignore[index]
        return changed
    return type(tree)(replaced(x, behind, new) if i == first else x for i, x in enumerate(tree))


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """The path of the first thing that differs between two trees; objects of other classes are not looked at."""
    if is_tensor(a):
        return None if is_tensor(b) and _same_bits(take(a), take(b)) else path
    if isinstance(a, Mapping):
        if not isinstance(b, Mapping) or list(a) != list(b):
            return path
        pairs = [(name, a[name], b[name]) for name in a]
    elif isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            return path
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        plain = isinstance(a, (bool, int, float, str, bytes, type(None)))
        return path if plain and repr(a) != repr(b) else None
    found = (first_difference(x, y, f"{path}.{name}" if path else str(name)) for name, x, y in pairs)
    return next((x for x in found if x is not None), None)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or type(a) is not type(b):
        return False
    if hasattr(a, "__tensor_flatten__"):
        inner = a.__tensor_flatten__()[0]  # type: ignore[operator]
        return all(_same_bits(getattr(a, name), getattr(b, name)) for name in inner)
    if a.layout != b.layout or a.device.type != b.device.type or a.is_nested != b.is_nested:
        return False
    if a.is_nested or a.layout is not torch.strided:
        return all(map(_same_bits, dense_parts(a), dense_parts(b)))
    if a.is_quantized:
        return torch.equal(a, b)
    if a.device.type == "meta" or not a.numel():  # it has no bits
        return True
    a, b = (x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
