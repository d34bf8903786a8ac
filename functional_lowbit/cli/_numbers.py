"""Tensors that may still be in their file, and their numbers: smallest, largest, and how many of them are none."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._private import sparse_parts
from functional_lowbit.sharding import local_of

CHUNK = 1 << 22  # numbers that are decoded at a time, so that a large leaf needs little memory


class Pending(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor, read or not."""
    return isinstance(x, (Tensor, Pending))


def take(x: Any) -> Any:
    """The tensor itself; anything else as it is."""
    return x.read() if isinstance(x, Pending) else x


def bytes_of(x: Tensor | Pending) -> int:
    """Bytes of a tensor as it is stored, read or not: of a DTensor's shard; of a sparse one's indices, too."""
    if isinstance(x, Pending):
        return x.dtype.itemsize * prod(x.shape)
    return sum(part.nbytes for part in dense_parts(local_of(x)))


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


def unreadable(x: Tensor) -> str | None:
    """Why the numbers of a tensor cannot be looked at; None if they can."""
    if x.is_nested or x.layout is not torch.strided:
        return f"a tensor of the layout {'nested' if x.is_nested else str(x.layout).removeprefix('torch.')}"
    if x.device.type == "meta":
        return "a tensor without numbers (of the meta device)"
    return "a tensor that torch has quantized" if x.is_quantized else None


class Numbers(NamedTuple):
    """What was counted. The extremes are those of finite numbers; None if there are none."""

    low: float | None = None
    high: float | None = None
    total: int = 0
    zeros: int = 0
    negative: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def largest(self) -> float | None:
        """The largest magnitude."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


def count(chunks: Iterable[Tensor]) -> Numbers:
    """The numbers of some tensors of any shape and dtype."""
    ends: list[float] = []
    counts: Counter[str] = Counter()
    for x in chunks:
        x = torch.view_as_real(x) if x.is_complex() else x
        x = x.float() if x.is_floating_point() and x.itemsize < 4 else x.int() if x.dtype == torch.bool else x
        x = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
        finite = x[x.isfinite()] if x.is_floating_point() else x
        ends += [end.item() for end in finite.aminmax()] if finite.numel() else []
        found = {"zeros": x == 0, "negative": x < 0, "nan": x.isnan(), "inf": x.isinf()}
        counts.update({"total": x.numel(), **{name: int(which.sum()) for name, which in found.items()}})
    return Numbers(min(ends, default=None), max(ends, default=None), **counts)


def pieces(x: Tensor) -> Iterator[Tensor]:
    """A tensor in pieces of at most `CHUNK` numbers."""
    flat = x.detach().reshape(-1)
    for first in range(0, flat.numel(), CHUNK):
        yield flat[first : first + CHUNK]


def decoded(leaf: QuantizedTensor) -> Iterator[Tensor]:
    """The numbers that a leaf stands for, in pieces; padding is left out."""
    codec = leaf.format.codec(leaf.layout.signed)
    codes, scales = leaf.local_blocks()
    if scales is None:
        yield from (codec.read(piece, None, 1) for piece in pieces(codes))
        return
    grid = leaf.layout.local_grid()
    lengths = grid.lengths(codes.device)
    at_once = max(1, CHUNK // max(1, grid.block))
    for first in range(0, grid.n_blocks, at_once):
        part = slice(first, first + at_once)
        values = codec.read(codes[part], scales[part], grid.block)
        yield values[torch.arange(grid.block) < lengths[part]] if grid.padding else values
