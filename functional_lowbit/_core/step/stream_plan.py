"""Which leaf's state is copied where and when, while another leaf's is worked on: the plan of two staging buffers."""

from collections.abc import Sequence
from typing import NamedTuple

LANES = ("in", "run", "out")  # copies to the device, kernels, copies back: each does its work in order


class Op(NamedTuple):
    """One entry of a plan, queued behind the earlier ones of its lane."""

    lane: str  # of LANES
    bundle: int  # which leaves
    buffer: int  # 0 or 1; where their state is meanwhile
    after: int | None  # index of the operation, of another lane, that has to be over before this one begins


class Plan(NamedTuple):
    """What two staging buffers are used for, in order."""

    bundles: tuple[range, ...]  # leaves that are copied together
    buffers: tuple[int, ...]  # bytes of each; one buffer for a single bundle
    ops: tuple[Op, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes of state on the device at any time."""
        return sum(self.buffers)


def plan(sizes: Sequence[int], room: int) -> Plan:
    """Bundle leaves, and order their copies so that each hides behind a kernel.

    While one bundle is worked on in its buffer, the next one is copied into the other, as soon as what was there has
    been copied back. So no buffer is overwritten before its copy-out is over, and none is read before its copy-in is.

    Args:
        sizes: Bytes of each leaf's state, in order.
        room: Bytes of a buffer. Small leaves share one; a leaf that is larger has a bundle, and a buffer, of its size.

    Returns:
        A plan whose operations may be queued in the order given.

    References:
        The order is that of double buffering; `torchao.optim.CPUOffloadOptimizer` overlaps copies of gradients and
        parameters with a step on the CPU instead.
    """
    bundles = _bundles(sizes, room)
    totals = [sum(sizes[i] for i in bundle) for bundle in bundles]
    buffers = tuple(max(totals[b::2]) for b in range(min(2, len(bundles))))
    ops: list[Op] = []
    at: dict[tuple[str, int], int] = {}

    def queue(lane: str, bundle: int, after: tuple[str, int]) -> None:
        at[lane, bundle] = len(ops)
        ops.append(Op(lane, bundle, bundle % 2, at.get(after)))

    for k in range(len(bundles)):
        if k == 0:
            queue("in", 0, ("out", -2))
        if k + 1 < len(bundles):
            queue("in", k + 1, ("out", k - 1))
        queue("run", k, ("in", k))
        queue("out", k, ("run", k))
    return Plan(bundles, buffers, tuple(ops))


def _bundles(sizes: Sequence[int], room: int) -> tuple[range, ...]:
    """Neighbours, as many as there is room for, at least one."""
    found: list[range] = []
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > room:
            found.append(range(first, i))
            first, total = i, 0
        total += size
    return (*found, range(first, len(sizes))) if sizes else ()
