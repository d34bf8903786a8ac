"""A tensor that is still in its file."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._private import sparse_parts


class Pending(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.dtype.itemsize * prod(self.shape)


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor, read or not."""
    return isinstance(x, (Tensor, Pending))


def size_of(x: Tensor | Pending) -> int:
    """Bytes of a tensor as it is stored; a sparse one's indices count too."""
    return x.nbytes if isinstance(x, Pending) else sum(part.nbytes for part in dense_parts(x))


def dense_parts(x: Tensor) -> list[Tensor]:
    """The tensors with strides that a tensor is made of, numbers last: itself, but for sparse and nested ones."""
    if x.is_nested:
        return list(x.unbind())
    if x.layout is torch.strided:
        return [x]
    if x.layout is torch.sparse_coo:
        return sparse_parts(x)
    by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    return [*((x.crow_indices(), x.col_indices()) if by_rows else (x.ccol_indices(), x.row_indices())), x.values()]


def take(x: Any) -> Any:
    """The tensor itself; anything else as it is."""
    return x.read() if isinstance(x, Pending) else x


def no_checksum(advance: Callable[..., None]) -> list[str]:
    """For files that keep no checksums of their parts."""
    return []
