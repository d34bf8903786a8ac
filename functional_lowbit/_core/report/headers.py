"""The headers of safetensors files, and the parameters in them: no number is read, and no package is needed.

A file is 8 bytes (the header's length, little-endian), the header (JSON: for each tensor its dtype, shape, and where
its bytes begin and end behind the header), and the bytes of all tensors.

References:
    https://github.com/huggingface/safetensors#format
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import NotThere, WrongValue

INDEX = ".safetensors.index.json"  # ends the name of a file that says which file holds which tensor
STATE = "schema"  # in the metadata of what `checkpoint.save_safetensors` writes, and nobody else
LIMIT = 100_000_000  # bytes of a header, by the format's own rule: a length beyond is a damaged one
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
}


def header_text(file: Path) -> tuple[int, bytes]:
    """How many bytes a file's header is said to have, and the bytes that are there; none if so many cannot be meant."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return length, opened.read(length) if length <= LIMIT else b""


def read_params(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The floating-point tensors of a checkpoint, by name, on the meta device.

    Args:
        path: A safetensors file, an index of several (`model.safetensors.index.json`), or a folder with either. A
            folder's index says which of its files count; states of `save_safetensors` there do not.
        notes: Takes what there is to say about them.
    """
    found: dict[str, Tensor] = {}
    left_out: list[str] = []
    for file in _files(path):
        for name, entry in _header(file).items():
            if name in found:
                raise WrongValue(f"{str(file)!r} holds {name!r}, and so does another file; give the files of one model")
            dtype = DTYPES.get(entry["dtype"])
            if dtype is not None and dtype.is_floating_point:
                found[name] = torch.empty(entry["shape"], dtype=dtype, device="meta")
            else:
                left_out.append(f"{name!r} ({entry['dtype']})")
    if left_out:
        notes.append(
            f"{len(left_out)} tensors of {str(path)!r} are not floating-point and were left out, the first is "
            f"{left_out[0]}"
        )
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX}"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise WrongValue(f"{str(path)!r} holds several indices ({names}); give the path of one")
        if indices:
            return _files(indices[0])
        models = [file for file in sorted(path.glob("*.safetensors")) if not _is_state(file)]
        if not models:
            raise WrongValue(f"the folder {str(path)!r} holds states of optimizers, and no model")
        return models
    if not path.name.endswith(INDEX):
        return [path]
    document = _json(path, path.read_bytes())
    names = document.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise WrongValue(
            f"{str(path)!r} has no 'weight_map' from tensors to files; it is no index of safetensors files"
        )
    files = [path.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise NotThere(f"{str(path)!r} names the file {file.name!r}, which is not there")
    return files


def _is_state(file: Path) -> bool:
    """Whether a file is one of `checkpoint.save_safetensors`, which may lie beside the model."""
    metadata = _document(file).get("__metadata__")
    return isinstance(metadata, dict) and STATE in metadata


def _header(file: Path) -> dict[str, Any]:
    """Name to dtype and shape, of one file."""
    document = _document(file)
    document.pop("__metadata__", None)
    for name, entry in document.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or not _is_shape(entry.get("shape")):
            raise WrongValue(f"{str(file)!r} is damaged: its header gives {name!r} no dtype and shape")
    return document


def _document(file: Path) -> dict[str, Any]:
    length, header = header_text(file)
    if not header.startswith(b"{") or len(header) < length:
        raise WrongValue(f"{str(file)!r} has no safetensors header; it is damaged, or of another kind")
    return _json(file, header)


def _is_shape(x: Any) -> bool:
    sizes = isinstance(x, list) and all(isinstance(n, int) and n >= 0 for n in x)
    return sizes and prod(x) < 1 << 60  # torch counts the bytes in 63 bits


def _json(file: Path, text: bytes) -> Any:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongValue(f"{str(file)!r} is not JSON where it should be: {error}") from error
    if not isinstance(document, dict):
        raise WrongValue(f"{str(file)!r} must hold an object, got {type(document).__name__}")
    return document
