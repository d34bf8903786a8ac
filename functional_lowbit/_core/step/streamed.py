"""Kernels over a state that rests on another device: it passes through two staging buffers, a few leaves at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_lowbit._core.state import lanes as lanes_
from functional_lowbit._core.step import staging, stream_plan

ALIGNED = 256  # bytes; what allocators of devices give, and more than any kernel asks for


class Resting(Protocol):
    """Says how a state that rests on another device gets to the parameters'."""

    buffer_size: int  # bytes of one of the two staging buffers
    lanes: Callable[[torch.device], lanes_.Lanes] | None  # None: those of the device, if the state is not there already


class Call(NamedTuple):
    """Leaves that share a kernel."""

    kernel: Any
    leaves: list[staging.Leaf]
    shaped: list[bool]  # as in `Kernel.run`
    scalars: Tensor
    resting: Resting | None = None  # None: everything is where the kernel runs
    at: tuple[int, ...] = ()  # which of a leaf's tensors rest elsewhere


class Piece(NamedTuple):
    """What is worked on at once: a small leaf, or a part of a large one."""

    call: Call
    leaf: staging.Leaf

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that the state takes."""
        return sum(_aligned(self.leaf.tensors[i].nbytes) for i in self.call.at)


def resting(ops: Sequence[tuple[Resting | None, Sequence[Any]]]) -> tuple[Resting | None, tuple[int, ...]]:
    """Who says how the state of some operations rests, and which of a leaf's tensors rest elsewhere.

    Args:
        ops: For each, who says it (None: its moments are with the parameters), and the codec of each moment. The errors
            of master weights, which come behind all moments, count as those of one more.
    """
    found: Resting | None = None
    at: list[int] = []
    first = 2  # behind gradient and parameter
    for who, codecs in ops:
        n = sum(1 if codec is None else codec.parts for codec in codecs)
        if who is not None and n:
            found = found or who
            at += range(first, first + n)
        first += n
    return found, tuple(at)


def run(calls: Sequence[Call], begin: Callable[[], None]) -> None:
    """Run kernels, those whose state rests elsewhere behind the others, one device after the other.

    `begin` is called before anything is written, and after what may fail before: the memory of the buffers.
    """
    streamed: dict[torch.device, list[Call]] = {}
    for call in calls:
        device = call.scalars.device
        if call.resting is None or (call.resting.lanes is None and device.type == "cpu"):
            begin()
            call.kernel.run(call.leaves, call.shaped, call.scalars)
        else:
            streamed.setdefault(device, []).append(call)
    for device, several in streamed.items():
        _stream(device, several, begin)


def _stream(device: torch.device, calls: Sequence[Call], begin: Callable[[], None]) -> None:
    resting = calls[0].resting
    assert resting is not None
    room = min(call.resting.buffer_size for call in calls if call.resting is not None)
    pieces = [Piece(call, leaf) for call in calls for leaf in _pieces(call, room)]
    plan = stream_plan.plan([piece.nbytes for piece in pieces], room)
    if not pieces:
        return
    buffers = [torch.empty(n, dtype=torch.uint8, device=device) for n in plan.buffers]
    lanes = (resting.lanes or lanes_.lanes_of)(device)
    begin()
    marks: list[Any] = []
    staged: dict[int, list[Piece]] = {}
    try:
        for op in plan.ops:
            own = [pieces[i] for i in plan.bundles[op.bundle]]
            if op.lane == "in":
                staged[op.bundle] = list(_carved(buffers[op.buffer], own))
            there = staged[op.bundle] if op.lane != "out" else staged.pop(op.bundle)
            job = {"in": partial(_copy, there, own), "run": partial(_run, there), "out": partial(_copy, own, there)}
            marks.append(lanes.submit(op.lane, job[op.lane], [] if op.after is None else [marks[op.after]]))
    finally:
        lanes.finish()


def _pieces(call: Call, room: int) -> Iterator[staging.Leaf]:
    """The leaves that hold something, cut so that the state of each piece fits a buffer, if its blocks let it."""
    for leaf in call.leaves:
        if leaf.numel == 0:
            continue
        rested = sum(leaf.tensors[i].nbytes for i in call.at)
        free = max(room - ALIGNED * len(call.at), 1)
        yield from staging.pieces(leaf, call.shaped, max(1, free * leaf.numel // max(rested, 1)))


def _carved(buffer: Tensor, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces with a place in the buffer for each tensor that rests elsewhere."""
    first = 0
    for call, leaf in pieces:
        tensors = list(leaf.tensors)
        for i in call.at:
            x = tensors[i]
            tensors[i] = buffer[first : first + x.nbytes].view(x.dtype).view(x.shape)
            first += _aligned(x.nbytes)
        yield Piece(call, staging.Leaf(leaf.grid, tuple(tensors)))


def _copy(to: Sequence[Piece], source: Sequence[Piece]) -> None:
    for new, old in zip(to, source, strict=True):
        for i in new.call.at:
            new.leaf.tensors[i].copy_(old.leaf.tensors[i], non_blocking=True)


def _run(pieces: Sequence[Piece]) -> None:
    """One call of each kernel for all neighbours that share it."""
    together: list[tuple[Call, list[staging.Leaf]]] = []
    for call, leaf in pieces:
        if not together or together[-1][0] is not call:
            together.append((call, []))
        together[-1][1].append(leaf)
    for call, leaves in together:
        call.kernel.run(leaves, call.shaped, call.scalars)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
