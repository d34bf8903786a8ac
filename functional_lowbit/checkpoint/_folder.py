"""The folder of a checkpoint: written beside the one it replaces, and renamed when it is complete.

At any moment one of two is a whole checkpoint: `name`; or, while two renames are under way,
`.name.checkpoint-previous`, which `find` then takes. `.name.checkpoint-partial` is never read.
"""

import hashlib
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from functional_lowbit._refused import NoAccess, NotThere, WrongType, WrongValue
from functional_lowbit.checkpoint import _lock

METADATA = ".metadata"  # written last, by torch


def real(path: str | os.PathLike[str]) -> Path:
    """The folder that a path stands for; behind a link, what the link leads to."""
    return Path(os.path.realpath(path))


def partial(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.checkpoint-partial")


def previous(path: Path) -> Path:
    """Where the replaced checkpoint is, until the new one has its name."""
    return path.with_name(f".{path.name}.checkpoint-previous")


def prepare(path: Path) -> None:
    """Make an empty folder to write into; what an interrupted save left is put right or removed."""
    try:
        _refuse_others(path)
        for folder in (partial(path), previous(path)):
            if folder.exists() and not _ours(folder):
                raise WrongValue(f"{str(folder)!r} must be what a save left, or nothing; move it away")
        if not _lock.lock(partial(path)):
            raise WrongValue(f"{str(path)!r} is being written by another process; one at a time may do so")
        if (previous(path) / METADATA).is_file() and nothing_at(path):
            previous(path).rename(path)
        shutil.rmtree(previous(path), ignore_errors=True)
        for left in partial(path).iterdir():
            left.unlink()
    except OSError as error:
        raise NoAccess(f"cannot write at {str(path)!r}: {error}") from error


def put_in_place(path: Path) -> None:
    """Give the complete folder its name. The one that it replaces is removed only then."""
    metadata(partial(path))
    try:
        _refuse_others(path)
        _sync(partial(path))
        rename(partial(path), path)
    except OSError as error:
        raise NoAccess(f"cannot rename {str(partial(path))!r} to {str(path)!r}: {error}") from error


def rename(new: Path, path: Path) -> None:
    """Give a complete file or folder its name, in place of one of its kind, which is there again if this fails.

    A folder cannot be renamed onto another: what is there is moved to where `find` looks, and removed last.
    """
    if new.is_file():
        new.replace(path)
        _sync(path.parent)
        return
    older = previous(path)
    try:
        if not nothing_at(path):
            shutil.rmtree(older, ignore_errors=True)
            path.rename(older)
        new.rename(path)
        _sync(path.parent)
        shutil.rmtree(older, ignore_errors=True)  # what stays of it, the next save removes
    except OSError:
        if not path.exists() and older.exists():
            older.rename(path)
        raise


def nothing_at(path: Path) -> bool:
    """An empty folder counts as nothing: programs make one for a checkpoint to come."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _refuse_others(path: Path) -> None:
    """Refuse to replace what is no checkpoint."""
    if not nothing_at(path) and not (path / METADATA).is_file():
        raise WrongValue(f"{str(path)!r} must be a checkpoint or nothing yet; move away what is there")


def _ours(folder: Path) -> bool:
    """Whether a save made the folder: a checkpoint, or a part of one."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = [x.name for x in folder.iterdir()]
    return METADATA in names or all(x.endswith(".distcp") or x == f"{METADATA}.tmp" for x in names)


def release(path: Path) -> None:
    """Let other processes write at `path`."""
    _lock.release(partial(path))


def discard(path: Path) -> None:
    """Remove what a failed save wrote, to give back its room."""
    shutil.rmtree(partial(path), ignore_errors=True)


def find(path: Path) -> Path:
    """The folder to read."""
    try:
        whole, older = ((folder / METADATA).is_file() for folder in (path, previous(path)))
        there, left = not nothing_at(path), partial(path).exists()
    except OSError as error:
        raise NoAccess(f"cannot read {str(path)!r}: {error}") from error
    if whole:
        return path
    if there:
        raise WrongValue(f"{str(path)!r} is no complete checkpoint: it has no {METADATA}, which is written last")
    if older:
        return previous(path)
    hint = f"; {partial(path).name!r} beside it is what an interrupted save left, and not complete" if left else ""
    raise NotThere(f"there is no checkpoint at {str(path)!r}{hint}")


def identity(path: Path) -> tuple[str, str] | None:
    """Which checkpoint is found, and where; None if none. Each save writes a uuid of its own into the metadata."""
    for folder in (path, previous(path)):
        try:
            return folder.name, hashlib.sha256((folder / METADATA).read_bytes()).hexdigest()
        except OSError:
            continue
    return None


def metadata(folder: Path) -> Any:
    """The account that torch keeps of the folder, if all files are there and as long as it says."""
    try:
        found = FileSystemReader(folder).read_metadata()
        ends = sorted(_ends(found).items())
        holes = [name for name, entry in found.state_dict_metadata.items() if not _covered(name, entry)]
    except Exception as error:  # unpickling what was cut short or spoilt raises almost anything, and so does the result
        raise WrongValue(f"cannot read {str(folder / METADATA)!r}, the file is damaged: {error}") from error
    if holes:
        raise WrongValue(f"the entry {holes[0]!r} of {str(folder)!r} is not whole; a rank did not write its part")
    for name, end in ends:
        file = folder / name
        if not file.is_file():
            raise WrongValue(f"the file {str(file)!r} of the checkpoint is missing")
        if file.stat().st_size < end:
            raise WrongValue(f"the file {str(file)!r} is truncated: it has {file.stat().st_size} bytes of {end}")
    return found


def _ends(found: Any) -> dict[str, int]:
    """How long each file must be."""
    ends: dict[str, int] = {}
    for where in found.storage_data.values():
        ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
    return ends


def _covered(name: str, entry: Any) -> bool:
    """Whether the parts of a tensor, which do not overlap, make up the whole; True for what is no tensor."""
    if not isinstance(name, str) or not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
        raise WrongType(f"it says {entry!r} of {name!r}")
    if isinstance(entry, BytesStorageMetadata):
        return True
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise WrongType(f"it says that {name!r} has dtype {entry.properties.dtype!r}")
    return sum(prod(part.sizes) for part in entry.chunks) == prod(entry.size)


def _sync(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
