"""A checkpoint with other states in it, in the same kind of file or folder, written as a whole or not at all."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

import functional_lowbit as fl
from functional_lowbit.cli._mistakes import Broken, Mistake, said
from functional_lowbit.cli._pending import take
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
    if not Path(target).absolute().parent.is_dir():
        raise Mistake(f"there is no folder {str(Path(target).parent)!r} to write into")


def write(store: Store, target: str, tree: Any, verify: Callable[[str], None]) -> None:
    """Write, look at what was written, and only then give it its name.

    Args:
        store: Where the tree came from: the kind of file.
        target: The path.
        tree: Of a file of torch.save, all that it holds; else leaves by path.
        verify: Called with the path of what was written; raises if it is not as it should be.

    Raises:
        Mistake: where nothing can be written.
        Broken: if what was written is not what was meant; `target` is then as it was.
    """
    place = Path(os.path.realpath(target))
    partial = place.with_name(f".{place.name}.{uuid4().hex}{place.suffix}")
    try:
        if store.kind == FOLDER:
            _folder(place, partial, tree, verify)
            return
        if store.kind == SAFETENSORS:
            fl.checkpoint.save_safetensors({name: take(x) for name, x in tree.items()}, partial)
        else:
            torch.save(tree, partial)
            with partial.open("rb") as written:
                os.fsync(written.fileno())
        verify(str(partial))
        if place.is_dir():
            raise Mistake(f"{target!r} is a folder, and what is written is a file; move it away")
        partial.replace(place)
    except (OSError, RuntimeError, ImportError) as error:  # torch tells of a full disk by a RuntimeError
        raise Mistake(f"cannot write {target!r}: {said(error, 'checkpoint.save_safetensors')}") from error
    finally:
        partial.unlink(missing_ok=True) if not partial.is_dir() else None


def _folder(place: Path, partial: Path, tree: Mapping[str, Any], verify: Callable[[str], None]) -> None:
    """`checkpoint.save` replaces a checkpoint as a whole. What it writes is tried under another name first."""
    try:
        fl.checkpoint.save(partial, {name: take(x) for name, x in tree.items()})
        verify(str(partial))
        if place.exists() and not (place / ".metadata").is_file() and any(place.iterdir()):
            raise Mistake(f"{str(place)!r} is no checkpoint; move it away")
        old = place.with_name(f".{place.name}.{uuid4().hex}")
        if place.exists():
            place.rename(old)
        partial.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except ValueError as error:
        raise Broken(said(error, "checkpoint.save")) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replaced(tree: Any, where: str, new: Any) -> Any:
    """A tree with another node at `where`; nothing is written to."""
    if not where:
        return new
    name, _, rest = where.partition(".")
    if isinstance(tree, Mapping):
        # A key may have dots in it: the longest that fits.
        keys = [k for k in tree if where == str(k) or where.startswith(f"{k}.")]
        key = max(keys, key=lambda k: len(str(k)))
        inner = where[len(str(key)) + 1 :]
        return {k: replaced(v, inner, new) if k == key else v for k, v in tree.items()}
    return type(tree)(replaced(v, rest, new) if str(i) == name else v for i, v in enumerate(tree))
