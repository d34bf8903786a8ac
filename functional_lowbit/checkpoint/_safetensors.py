"""A plain state in one safetensors file, for what is not torch."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor
from torch.distributed.tensor import DTensor

from functional_lowbit._refused import NoAccess, NotInstalled, NotThere, WrongValue, speaking
from functional_lowbit.checkpoint import _folder, _schema, _state_dict

NUMBERS = "numbers"  # beside the schema in the file's metadata: JSON of the leaves that are no tensors


def save_safetensors(state: Any, file: str | os.PathLike[str]) -> None:
    """Write a state of plain tensors as a safetensors file. Needs the package `safetensors`.

    The names are those of `state_dict`; the schema is in the file's metadata. The file has its name only when it is
    complete.

    Args:
        state: Any tree that `state_dict` takes, without DTensors.
        file: Where to write; an older file is replaced.

    Raises:
        ImportError: without the package `safetensors`.
        ValueError: for a DTensor, by its leaf's name.
        OSError: where nothing can be written.

    Example:
        >>> import tempfile, torch, functional_lowbit as fl
        >>> state = fl.adam8bit(1e-3).init({"w": torch.ones(64, 64)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fl.checkpoint.save_safetensors(state, f"{folder}/state.safetensors")
        ...     fl.checkpoint.load_safetensors(state, f"{folder}/state.safetensors")[0].step
        tensor(0)
    """
    write(file, lambda: _state_dict.state_dict(state))


@speaking("checkpoint.save_safetensors")
def write(file: str | os.PathLike[str], entries: Callable[[], dict[str, Any]]) -> None:
    """As `save_safetensors`, of what `state_dict` returns."""
    target = Path(file).absolute()
    library, flat = _library(), entries()
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise WrongValue(
                f"{name!r} must be a plain tensor, got a DTensor; gather it first (full_tensor), or use checkpoint.save"
            )
    numbers = {name: x for name, x in flat.items() if name not in tensors and name != _schema.SCHEMA}
    metadata = {_schema.SCHEMA: flat[_schema.SCHEMA], NUMBERS: json.dumps(numbers)}
    partial = target.with_name(f".{target.name}.{uuid4().hex}")  # others may be writing the same file
    try:
        # Each tensor with memory of its own, which the file format wants.
        library.torch.save_file(
            {k: x.detach().contiguous().clone() for k, x in tensors.items()}, partial, metadata=metadata
        )
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        _folder.rename(partial, target)
    except Exception as error:
        partial.unlink(missing_ok=True)
        raise NoAccess(f"could not write {str(target)!r}: {error}") from error


@speaking("checkpoint.load_safetensors")
def load_safetensors(state: Any, file: str | os.PathLike[str], *, convert: bool = False) -> Any:
    """A state like `state`, read from a file of `save_safetensors`.

    Args:
        state: As in `load_state_dict`.
        file: The file.
        convert: As in `load_state_dict`.

    Raises:
        ImportError: without the package `safetensors`.
        FileNotFoundError: if there is no such file.
        ValueError: for a damaged file, and as in `load_state_dict`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.checkpoint.load_safetensors({"w": torch.ones(2)}, "missing.safetensors")
        Traceback (most recent call last):
            ...
        functional_lowbit._refused.NotThere: checkpoint.load_safetensors: there is no file '...missing.safetensors'
    """
    target = Path(file).absolute()
    library = _library()
    if not target.is_file():
        raise NotThere(f"there is no file {str(target)!r}")
    try:
        with library.safe_open(target, "pt") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
            saved: dict[str, Any] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            saved.update(json.loads(metadata.get(NUMBERS, "{}")))
    except Exception as error:
        raise WrongValue(f"cannot read {str(target)!r}, the file is damaged: {error}") from error
    if _schema.SCHEMA not in metadata:
        raise WrongValue(
            f"{str(target)!r} has no metadata {_schema.SCHEMA!r}; it must come from checkpoint.save_safetensors"
        )
    return _state_dict.read(state, {**saved, _schema.SCHEMA: metadata[_schema.SCHEMA]}, convert)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise NotInstalled("needs the package safetensors; pip install 'functional-lowbit[safetensors]'") from error
    return safetensors
