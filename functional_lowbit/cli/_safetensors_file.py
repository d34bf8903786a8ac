"""A safetensors file, opened without the package: what it holds, before anything of it is loaded."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.report.headers import DTYPES, header_text
from functional_lowbit.checkpoint._safetensors import NUMBERS
from functional_lowbit.checkpoint._schema import SCHEMA
from functional_lowbit.cli._numbers import Pending
from functional_lowbit.cli._output import Broken


def read_header(path: Path) -> Mapping[str, Any]:
    """Tensors by name, none of them read yet; and what `fl.checkpoint.save_safetensors` puts beside them.

    Raises:
        Broken: for a file that is cut short or whose header is not one.
    """
    size = path.stat().st_size
    length, text = header_text(path)
    if size < 8 or len(text) < length:
        raise Broken(f"{str(path)!r} is truncated: its header alone needs {length + 8} bytes of {size}")
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
