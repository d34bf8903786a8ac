"""Kernels over a state that rests on another device: it passes through two staging buffers, a few leaves at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_lowbit._core.state import lanes as queues
from functional_lowbit._core.step import staging, stream_plan
from functional_lowbit._core.step.backends import Kernel

ALIGNED = 256  # bytes; what allocators of devices give, and more than any kernel asks for


class Resting(Protocol):
    """Says how a state that rests on another device gets to the parameters'."""

    buffer_size: int  # bytes of one of the two staging buffers
    lanes: Callable[[torch.device], queues.Lanes] | None  # None: those of the device, if the state is not there already


class Batch(NamedTuple):
    """Leaves that share a kernel."""

    kernel: Kernel
    leaves: list[staging.Filled]
    scalars: Tensor
    rests: tuple[Resting | None, ...]  # for each slot, who says how it rests; None: it is where the kernel runs

    @property
    def resting(self) -> Resting | None:
        """Who says how its state rests; None if all of it is where the kernel runs."""
        return next((resting for resting in self.rests if resting is not None), None)

    @property
    def at(self) -> list[int]:
        """The slots that rest elsewhere."""
        return [i for i, resting in enumerate(self.rests) if resting is not None]


class Piece(NamedTuple):
    """What is worked on at once: a small leaf, or a part of a large one."""

    batch: Batch
    leaf: staging.Filled

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that the state takes."""
        return sum(_aligned(self.leaf.tensors[i].nbytes) for i in self.batch.at)


def run(batches: Sequence[Batch], begin: Callable[[], None]) -> None:
    """Run kernels, those whose state rests elsewhere behind the others, one device after the other.

    `begin` is called before anything is written, and after what may fail before: the memory of the buffers.
    """
    streamed: dict[torch.device, list[Batch]] = {}
    for batch in batches:
        device, resting = batch.scalars.device, batch.resting
        if resting is None or (resting.lanes is None and device.type == "cpu"):
            begin()
            batch.kernel.run(batch.leaves, batch.scalars)
        else:
            streamed.setdefault(device, []).append(batch)
    for device, several in streamed.items():
        _stream(device, several, begin)


def _stream(device: torch.device, batches: Sequence[Batch], begin: Callable[[], None]) -> None:
    resting = [batch.resting for batch in batches if batch.resting is not None]
    room = min(each.buffer_size for each in resting)
    pieces = [Piece(batch, leaf) for batch in batches for leaf in _pieces(batch, room)]
    plan = stream_plan.plan([piece.nbytes for piece in pieces], room)
    if not pieces:
        return
    buffers = [torch.empty(n, dtype=torch.uint8, device=device) for n in plan.buffers]
    lanes = (resting[0].lanes or queues.lanes_of)(device)
    begin()
    marks: list[Any] = []
    staged: dict[int, list[Piece]] = {}
    try:
        for op in plan.ops:
            own = [pieces[i] for i in plan.bundles[op.bundle]]
            if op.lane == "in":
                staged[op.bundle] = list(_carved(buffers[op.buffer], own))
            there = staged[op.bundle] if op.lane != "out" else staged.pop(op.bundle)
            job = {"in": partial(_copy_, there, own), "run": partial(_run, there), "out": partial(_copy_, own, there)}
            marks.append(lanes.submit(op.lane, job[op.lane], [] if op.after is None else [marks[op.after]]))
    finally:
        lanes.finish()


def _pieces(batch: Batch, room: int) -> Iterator[staging.Filled]:
    """The leaves that hold something, cut so that the state of each piece fits a buffer, if its blocks let it."""
    for leaf in batch.leaves:
        if leaf.numel == 0:
            continue
        rested = sum(leaf.tensors[i].nbytes for i in batch.at)
        free = max(room - ALIGNED * len(batch.at), 1)
        yield from staging.pieces(leaf, batch.kernel.slots, max(1, free * leaf.numel // max(rested, 1)))


def _carved(buffer: Tensor, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces with a place in the buffer for each tensor that rests elsewhere."""
    first = 0
    for batch, leaf in pieces:
        tensors = list(leaf.tensors)
        for i in batch.at:
            x = tensors[i]
            tensors[i] = buffer[first : first + x.nbytes].view(x.dtype).view(x.shape)
            first += _aligned(x.nbytes)
        yield Piece(batch, staging.Filled(leaf.grid, tuple(tensors)))


def _copy_(to: Sequence[Piece], source: Sequence[Piece]) -> None:
    for new, old in zip(to, source, strict=True):
        for i in new.batch.at:
            new.leaf.tensors[i].copy_(old.leaf.tensors[i], non_blocking=True)


def _run(pieces: Sequence[Piece]) -> None:
    """One call of each kernel for all neighbours that share it."""
    for _, own in groupby(pieces, key=lambda piece: id(piece.batch)):
        together = list(own)
        together[0].batch.kernel.run([piece.leaf for piece in together], together[0].batch.scalars)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
