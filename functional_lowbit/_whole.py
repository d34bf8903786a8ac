"""Whole leaves for functions that need them: each leaf is gathered on one rank, worked on there, and handed back.

The work is spread: of all leaves that are cut over the same ranks, each rank takes about the same number of elements.
It goes in waves; in each, every rank has at most one leaf, and one message goes from each rank to each other, and back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._collectives import Coordinate, exchange, own_coordinate, team_of
from functional_lowbit.sharding import ShardSpec


@dataclass(frozen=True)
class Job:
    """One sharded leaf: what its function is given, and what it returns."""

    path: str
    spec: ShardSpec  # of the leaf
    given: tuple[ShardSpec, ...]  # of each tensor that the function is given
    returned: tuple[ShardSpec, ...]  # of each tensor that it returns
    read: Callable[[], Sequence[Tensor]]  # this rank's parts of what is given: float32


def run_whole(
    speaker: str, jobs: Sequence[Job], compute: Callable[[int, list[Tensor]], Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Work on whole leaves: this rank's parts of what each job returns, contiguous.

    Every rank must call it with the same jobs in the same order. Who works on which leaf follows from global shapes and
    that order. A rank needs memory for one whole leaf at a time, and for the messages.

    Args:
        speaker: For errors.
        jobs: The leaves.
        compute: `compute(i, whole tensors) -> whole tensors`, float32, for job i.

    Raises:
        RuntimeError: if `compute` failed on the rank that worked on a leaf; there, its own error is raised.
    """
    results: list[Any] = [None] * len(jobs)
    alike: dict[Any, list[int]] = {}
    for i, job in enumerate(jobs):
        alike.setdefault((job.spec.mesh, job.spec.sharded_mesh_dims), []).append(i)
    for members in alike.values():
        team = team_of(jobs[members[0]].spec)
        for wave in waves([prod(jobs[i].spec.shape) for i in members], len(team)):
            owners = [(members[k], team[rank]) for k, rank in wave]
            _run_wave(speaker, jobs, owners, team, compute, results)
    return results


def waves(sizes: Sequence[int], ranks: int) -> list[list[tuple[int, int]]]:
    """Who takes what: lists of (index, rank) in which each rank is named once at most.

    The largest goes first, each to the rank with the least so far.

    Example:
        >>> waves([1, 4, 2, 3], 2)
        [[(1, 0), (3, 1)], [(0, 0), (2, 1)]]
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = min(range(ranks), key=loads.__getitem__)
        queues[rank].append(i)
        loads[rank] += max(1, sizes[i])
    longest = max(map(len, queues))
    return [[(q[w], rank) for rank, q in enumerate(queues) if w < len(q)] for w in range(longest)]


def _run_wave(
    speaker: str,
    jobs: Sequence[Job],
    owners: Sequence[tuple[int, Coordinate]],
    team: Sequence[Coordinate],
    compute: Callable[[int, list[Tensor]], Sequence[Tensor]],
    results: list[Any],
) -> None:
    """One leaf for each owner: gather, compute, hand back."""
    spec = jobs[owners[0][0]].spec
    own = own_coordinate(spec)
    sends: list[tuple[Coordinate, Tensor]] = []
    arriving: list[tuple[Coordinate, Tensor]] = []
    mine: tuple[int, list[Tensor]] | None = None
    device = torch.device("cpu")
    for i, owner in owners:
        parts, job = jobs[i].read(), jobs[i]
        device = parts[0].device
        if owner == own:
            wholes = [torch.empty(s.shape, dtype=torch.float32, device=device) for s in job.given]
            for whole, part, s in zip(wholes, parts, job.given, strict=True):
                _part(whole, s, own).copy_(part)
            mine = (i, wholes)
            for rank in team:
                size = sum(prod(s.local_shape(rank)) for s in job.given if _is_sent(job, s, rank, own))
                if size and rank != own:
                    arriving.append((rank, torch.empty(size, dtype=torch.float32, device=device)))
            continue
        flat = [part.reshape(-1) for part, s in zip(parts, job.given, strict=True) if _is_sent(job, s, own, owner)]
        if sum(x.numel() for x in flat):
            sends.append((owner, torch.cat(flat)))
    exchange(spec, sends, arriving)

    failure: Exception | None = None
    sends = []
    if mine is not None:
        i, wholes = mine
        job = jobs[i]
        for rank, flat in arriving:
            places = [_part(w, s, rank) for w, s in zip(wholes, job.given, strict=True) if _is_sent(job, s, rank, own)]
            for place, values in zip(places, flat.split([x.numel() for x in places]), strict=True):
                place.copy_(values.view(place.shape))
        news: Sequence[Tensor] = ()
        try:
            news = compute(i, wholes)
        except Exception as error:  # the others wait for an answer
            failure = error
        del wholes, mine
        done = torch.full((1,), float(failure is None), dtype=torch.float32, device=device)
        for rank in team:
            cut = [_part(x, s, rank) for x, s in zip(news, job.returned, strict=failure is None)]
            if rank == own:
                results[i] = [x.clone(memory_format=torch.contiguous_format) for x in cut]
            elif failure is None:
                sends.append((rank, torch.cat([done, *(x.reshape(-1) for x in cut)])))
            else:
                sends.append((rank, done.new_zeros(_answer(job, rank))))
        del news
    arriving = [
        (owner, torch.empty(_answer(jobs[i], own), dtype=torch.float32, device=device))
        for i, owner in owners
        if owner != own
    ]
    exchange(spec, sends, arriving)
    if failure is not None:
        raise failure
    answers = iter(arriving)
    for i, owner in owners:
        if owner != own:
            _, flat = next(answers)
            if not flat[0]:
                raise RuntimeError(
                    f"{speaker}: the leaf function failed for {jobs[i].path!r} on the rank at {owner} of the mesh, "
                    "which had the whole leaf; its error is raised there"
                )
            shapes = [s.local_shape(own) for s in jobs[i].returned]
            parts = flat[1:].split([prod(shape) for shape in shapes])
            results[i] = [x.clone().view(shape) for x, shape in zip(parts, shapes, strict=True)]


def _is_sent(job: Job, spec: ShardSpec, rank: Coordinate, owner: Coordinate) -> bool:
    """Whether a rank sends its part of a tensor to the leaf's owner. Of equal parts, the one nearest to it is sent."""
    return all(rank[d] == owner[d] for d in job.spec.sharded_mesh_dims if d not in spec.sharded_mesh_dims)


def _answer(job: Job, rank: Coordinate) -> int:
    """Length of what an owner sends to a rank: whether it went well, and the rank's parts."""
    return 1 + sum(prod(s.local_shape(rank)) for s in job.returned)


def _part(whole: Tensor, spec: ShardSpec, rank: Coordinate) -> Tensor:
    """A view of a rank's part."""
    shape, offset = spec.local_shape(rank), spec.local_offset(rank)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
