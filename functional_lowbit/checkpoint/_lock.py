"""A lock on a folder, which ends with the process that holds it."""

import os
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None

_held: dict[Path, int] = {}  # file descriptor of each locked folder


def lock(folder: Path) -> bool:
    """Make a folder and keep other processes out of it until `release`; False if one of them is in it.

    On a file system without locks, as some network disks are, it is always True.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.stat(folder), os.fstat(handle))  # and was not renamed before it was locked
    except (BlockingIOError, FileNotFoundError):
        same = False
    except OSError:
        same = True
    if same:
        _held[folder] = handle
    else:
        os.close(handle)
    return same


def release(folder: Path) -> None:
    """Let other processes in; nothing happens if the folder is not locked here."""
    handle = _held.pop(folder, None)
    if handle is None:
        return
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # to close it is not enough where a child has inherited it
    os.close(handle)


def _forget() -> None:
    """A forked child holds no lock: they are its parent's."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
