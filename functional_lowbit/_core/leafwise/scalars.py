"""Numbers that all leaves share: hyperparameters as tensors, and the record that a leaf function is given."""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_param(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)


def constant(cache: dict[str, Tensor], name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """A number as a tensor, kept for the next step; made so that it serves outside the caller's modes too."""
    if name not in cache:
        with torch.inference_mode(False):
            made = torch.tensor(value, dtype=dtype, device="cpu")
        if type(made) is not Tensor:  # fake, or wrapped by a function transform
            return made
        cache[name] = made
    return cache[name]


def plain(value: Any) -> Tensor:
    """A number of the whole tree, where it is, or on the CPU, whatever the default device.

    torch's norm of a DTensor is a DTensor, which has no address for a kernel.
    """
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


@contextmanager
def at_least_float32() -> Iterator[None]:
    """A schedule that divides an int64 step must not round to a default dtype of bfloat16."""
    default = torch.get_default_dtype()
    if default in (torch.float32, torch.float64):
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


_records: dict[tuple[str, ...], Any] = {}


def record(names: tuple[str, ...]) -> Any:
    """One namedtuple class for each set of names, so that compiled code sees the same class again."""
    if names not in _records:
        _records[names] = namedtuple("Scalars", names)
    return _records[names]
