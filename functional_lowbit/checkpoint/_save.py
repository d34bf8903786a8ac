"""Writing a checkpoint: by any number of ranks, whole or not at all, now or in a thread."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from functional_lowbit._refused import NoAccess, WrongState, WrongValue, kind_of, speaking
from functional_lowbit.checkpoint import _files, _folder, _ranks, _schema, _state_dict

_log = logging.getLogger("functional_lowbit.checkpoint")
_writer: list[ThreadPoolExecutor] = []  # one thread, so that all ranks write the checkpoints in one order
_running: dict[Path, object] = {}  # the call that writes each path


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a checkpoint: params, optimizer states and numbers, in one tree. Every rank must call this.

    The files are written beside an older checkpoint of the same name, forced to the disk, and renamed at the end. So a
    process that is killed, or a disk that is full, leaves the older one as it was. The tree is not changed.

    Args:
        path: A folder; made if it is not there, with its parents. What it replaces must be a checkpoint, and goes with
            all that was put into it. One job at a time may write there.
        tree: A tree of tensors, DTensors, states and numbers, for instance `{"params": params, "state": state,
            "extra": {"epoch": 3}}`. Tensors that are no DTensors, and numbers, must be equal on all ranks.

    Raises:
        OSError: where nothing can be written: a read-only folder, a full disk. On all ranks.
        ValueError: if `path` is something else than a checkpoint, or is being written by another call or process;
            if ranks give different paths, structures or numbers.
        RuntimeError: if another rank ended, or if there is no process group any more for DTensors of several ranks.
        TypeError: for a leaf that cannot be saved.

    Example:
        >>> import tempfile, torch, functional_lowbit as fl
        >>> tx, params = fl.adam8bit(1e-3), {"w": torch.ones(64, 64)}
        >>> tree = {"params": params, "state": tx.init(params), "epoch": 3}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fl.checkpoint.save(f"{folder}/last", tree)
        ...     loaded = fl.checkpoint.load(f"{folder}/last", {**tree, "epoch": 0})
        >>> loaded["epoch"], loaded["state"][0].mu["w"]
        (3, QuantizedTensor(companded8, shape=(64, 64), block_size=256))
    """
    write(path, lambda: _state_dict.state_dict(tree))


@speaking("checkpoint.save")
def write(path: str | os.PathLike[str], entries: Callable[[], dict[str, Any]]) -> None:
    """As `save`, of what `state_dict` returns."""
    target, call = _folder.real(path), object()
    try:
        flat = _ranks.together(lambda: _begun(target, entries, call))
        _same_on_all(target, flat)
        _write(target, flat, None, _ranks.number())
    finally:
        _leave(target, call)


@speaking("checkpoint.async_save")
def async_save(path: str | os.PathLike[str], tree: Any) -> "Future[None]":
    """As `save`, in a thread. The tree is copied before this returns, so that training may go on at once.

    Every rank must call this. Several calls are written one after the other. The process group must be there until the
    result is; what fails is also logged, as a warning of the logger `functional_lowbit.checkpoint`.

    Args:
        path: As in `save`.
        tree: As in `save`.

    Returns:
        A future; `.result()` waits until the checkpoint is in place, and raises what `save` would have raised.

    Raises:
        ValueError: if `path` is already being written; if ranks give different paths, structures or numbers.
        TypeError: for a leaf that cannot be saved.

    Example:
        >>> import tempfile, torch, functional_lowbit as fl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = fl.checkpoint.async_save(f"{folder}/last", {"w": torch.ones(2)})
        ...     saving.result()
        ...     fl.checkpoint.load(f"{folder}/last", {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    target, call = _folder.real(path), object()

    def entries() -> dict[str, Any]:
        return _state_dict.state_dict(tree)

    def write_in_thread() -> None:
        try:
            with speaking("checkpoint.async_save"):
                _write(target, flat, group, rank)
        except Exception as error:
            _log.warning("%s", error)  # the future tells only who asks
            raise
        finally:
            _leave(target, call)

    try:
        flat = _ranks.together(lambda: _files.copied(_begun(target, entries, call)))
        _same_on_all(target, flat)
        group, rank = _ranks.own_group(), _ranks.number()
        if not _writer:
            _writer.append(ThreadPoolExecutor(1, "functional_lowbit.checkpoint"))
        return _writer[0].submit(write_in_thread)
    except BaseException:
        _leave(target, call)
        raise


def _begun(target: Path, entries: Callable[[], dict[str, Any]], call: object) -> dict[str, Any]:
    """What is written; from here to `_leave` no other call of this process may write at `target`."""
    if _running.setdefault(target, call) is not call:
        raise WrongValue(f"{str(target)!r} is being written by another save; wait for its result first")
    return entries()


def _leave(target: Path, call: object) -> None:
    if _running.get(target) is call:
        _folder.release(target)
        del _running[target]


def _forget() -> None:
    """A forked child has no thread that writes, and writes nothing yet."""
    _writer.clear()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _same_on_all(target: Path, flat: Mapping[str, Any]) -> None:
    _ranks.same("path", str(target))
    _ranks.same("the tree's structure", flat[_schema.SCHEMA])
    numbers = {name: repr(x) for name, x in flat.items() if not isinstance(x, Tensor)}  # nan is not nan, 'nan' is
    _ranks.same("a number in the tree", numbers)


def _write(target: Path, flat: dict[str, Any], group: Any, rank: int | None) -> None:
    """Write the files and put them in place; `rank` is what it was when the caller asked, None without ranks."""
    if rank is None and any(map(_on_several, flat.values())):
        raise _no_group(target)
    _on_first(target, group, rank, _folder.prepare)
    try:
        if rank is not None:
            _files.write_on_ranks(_folder.partial(target), flat, group)
        else:
            _files.write_alone(_folder.partial(target), flat)
    except CheckpointException as failed:  # on all ranks
        if not rank:
            _folder.discard(target)
        rank, (error, _) = next(iter(failed.failures.items()))
        raise _cannot_write(target, error, f" on rank {rank}") from failed
    except Exception as error:
        if rank is not None and not _ranks.here():
            raise _no_group(target) from error
        if rank is not None:
            text = f"another rank ended, or did not come, while {str(target)!r} was written: {error}"
            raise WrongState(text) from error
        _folder.discard(target)
        raise _cannot_write(target, error, "") from error
    _on_first(target, group, rank, _folder.put_in_place)


def _on_first(target: Path, group: Any, rank: int | None, action: Callable[[Path], None]) -> None:
    """What one rank does for all."""
    if rank is not None and not _ranks.here():
        raise _no_group(target)
    _ranks.together(lambda: None if rank else action(target), group)


def _no_group(target: Path) -> WrongState:
    return WrongState(
        f"{str(target)!r} was not written, its ranks have no process group any more; destroy it when the "
        "checkpoint is in place"
    )


def _on_several(x: Any) -> bool:
    return isinstance(x, DTensor) and x.device_mesh.size() > 1


def _cannot_write(target: Path, error: BaseException, where: str) -> NoAccess:
    kind = "" if isinstance(error, OSError) else f"{kind_of(error)}: "
    return NoAccess(f"could not write {str(target)!r}{where}: {kind}{error}; what was saved there before is untouched")
