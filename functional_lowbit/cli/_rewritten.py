"""A checkpoint with other states in it, in the same kind of file or folder, written as a whole or not at all."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from functional_lowbit.checkpoint import _folder
from functional_lowbit.checkpoint._safetensors import write as write_safetensors
from functional_lowbit.checkpoint._save import write as write_folder
from functional_lowbit.cli._output import Mistake, said
from functional_lowbit.cli._stores import FOLDER, SAFETENSORS, Store


def check_place(source: str, target: str, force: bool) -> None:
    """Refuse to overwrite what is there.

    Raises:
        Mistake: if there is something at `target` and not `force`; if it is the source itself.
    """
    if os.path.realpath(source) == os.path.realpath(target):
        raise Mistake(f"{target!r} is what is converted; write to another path")
    if os.path.lexists(target) and not force:
        raise Mistake(f"{target!r} is there already; --force replaces it")
    if os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        raise Mistake(f"{target!r} is a pipe or a device; write to a file")
    if not Path(target).absolute().parent.is_dir():
        raise Mistake(f"there is no folder {str(Path(target).parent)!r} to write into")


def write(store: Store, target: str, tree: Any, verify: Callable[[str], None]) -> None:
    """Write, look at what was written, and only then give it its name.

    Args:
        store: Where the tree came from: the kind of file.
        target: The path.
        tree: Of a file of torch.save, all that it holds; else what `fl.state_dict` returned.
        verify: Called with the path of what was written; raises if it is not as it should be.

    Raises:
        Mistake: where nothing can be written.
        Broken: if what was written is not what was meant; `target` is then as it was.
    """
    place = Path(os.path.realpath(target))
    if place.suffix == ".safetensors" and store.kind != SAFETENSORS:
        raise Mistake(f"what is written is a {store.kind}, which must not be called {target!r}")
    partial = place.with_name(f".{place.name}.{uuid4().hex}{place.suffix}")
    try:
        try:
            if store.kind == FOLDER:
                write_folder(partial, lambda: tree)
            elif store.kind == SAFETENSORS:
                write_safetensors(partial, lambda: tree)
            else:
                with partial.open("wb") as file:
                    torch.save(tree, file)
                    file.flush()
                    os.fsync(file.fileno())
        except (OSError, RuntimeError, ImportError) as error:
            raise Mistake(f"cannot write {target!r}: {said(_cause(error), 'checkpoint.save_safetensors')}") from error
        verify(str(partial))
        if store.kind != FOLDER and place.is_dir():
            raise Mistake(f"{str(place)!r} is a folder, and what is written is a file; move it away")
        if store.kind == FOLDER and not (_folder.nothing_at(place) or (place / _folder.METADATA).is_file()):
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
    first, *rest = keys
    if isinstance(tree, Mapping):
        changed = copy(tree)  # of the same class and order
        changed[first] = replaced(tree[first], rest, new)  # type: ignore[index]
        return changed
    return type(tree)(replaced(x, rest, new) if i == first else x for i, x in enumerate(tree))
