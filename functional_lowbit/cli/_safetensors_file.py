"""The header of a safetensors file, read without the package: what a file holds, before anything of it is loaded.

A file is 8 bytes (the header's length, little-endian), the header (JSON: for each tensor its dtype, shape, and where
its bytes begin and end behind the header), and the bytes of all tensors.

References:
    https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit.checkpoint._safetensors import NUMBERS
from functional_lowbit.checkpoint._schema import SCHEMA
from functional_lowbit.cli._numbers import Pending
from functional_lowbit.cli._output import Broken

LONGEST_HEADER = 100_000_000  # bytes, as the package has it: a length beyond is a damaged one
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def read_header(path: Path) -> Mapping[str, Any]:
    """Tensors by name, none of them read yet; and what `fl.checkpoint.save_safetensors` puts beside them.

    Raises:
        Broken: for a file that is cut short or whose header is not one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise Broken(f"{str(path)!r} is truncated: its header alone needs {length + 8} bytes of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        tree: dict[str, Any] = {
            name: _entry(path, name, entry, length + 8, size) for name, entry in sorted(header.items())
        }
        tree.update(json.loads(metadata.get(NUMBERS, "{}")))
        end = length + 8 + max((entry["data_offsets"][1] for entry in header.values()), default=0)
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
        return (
            torch.frombuffer(stored, dtype=torch.uint8).view(dtype).view(shape)
            if stored
            else torch.empty(shape, dtype=dtype)
        )

    return Pending(dtype, shape, read)
