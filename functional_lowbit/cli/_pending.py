"""A tensor that is still in its file."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def take(x: Any) -> Any:
    """The tensor itself; anything else as it is."""
    return x.read() if isinstance(x, Pending) else x


def no_checksum(advance: Callable[..., None]) -> list[str]:
    """For files that keep no checksums of their parts."""
    return []
