"""Whole leaves for functions that need them: each leaf is gathered on one rank, worked on there, and handed back.

The work is spread: of all leaves that are cut over the same ranks, each rank takes about the same number of elements.
It goes in waves; in each, every rank has at most one leaf, and one message goes from each rank to each other, and back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import WrongState
from functional_lowbit.sharding import ShardSpec, part_of, wrap
from functional_lowbit.sharding._collectives import Coordinate, exchange, own_coordinate, team_of


@dataclass(frozen=True)
class Task:
    """A leaf with all that its function is given."""

    path: str
    update: Tensor
    fields: Mapping[str, Any]  # moments and statistics, as they rest
    param: Tensor | None

    @property
    def spec(self) -> ShardSpec | None:
        """Of the leaf; None for a plain tensor."""
        return ShardSpec.of(self.update)

    def parts(self) -> list[Tensor]:
        """What this rank holds of the update, the fields and the parameter: float32."""
        tensors = [self.update, *self.fields.values(), *([] if self.param is None else [self.param])]
        return [part_of(x).float() for x in tensors]

    def specs(self) -> list[ShardSpec]:
        """Of the update and the fields, all of them sharded; the parameter's is the update's."""
        found = [ShardSpec.of(x) for x in (self.update, *self.fields.values())]
        return [spec for spec in found if spec is not None]

    def wrapped(self, update: Tensor, new: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new update, in the old one's dtype, and the new fields, sharded as the old ones."""
        wrapped = {name: wrap(x, ShardSpec.of(self.fields[name])) for name, x in new.items()}
        return wrap(update.to(self.update.dtype), self.spec), wrapped


Compute = Callable[[Task, list[Tensor]], Sequence[Tensor]]
Message = tuple[Coordinate, Tensor]  # (from or to whom, flat numbers)


def run_whole(tasks: Sequence[Task], compute: Compute) -> list[list[Tensor]]:
    """Work on whole leaves: this rank's parts of each leaf's new update and new fields, contiguous.

    Every rank must call it with the same leaves in the same order. Who works on which leaf follows from global shapes
    and that order. A rank needs memory for one whole leaf at a time, and for the messages.

    Args:
        tasks: The leaves, all sharded.
        compute: `compute(task, [update, *fields, parameter if there is one]) -> [update, *fields]`, of whole tensors,
            float32.
    """
    results: list[Any] = [None] * len(tasks)
    alike: dict[Any, list[int]] = {}
    for i, task in enumerate(tasks):
        spec = task.specs()[0]
        alike.setdefault((spec.mesh, spec.sharded_mesh_dims), []).append(i)
    for members in alike.values():
        team = team_of(tasks[members[0]].specs()[0])
        for wave in waves([prod(tasks[i].update.shape) for i in members], len(team)):
            owners = {team[rank]: members[k] for k, rank in wave}
            for i, parts in _run_wave({r: (i, tasks[i]) for r, i in owners.items()}, team, compute):
                results[i] = parts
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
    wave: dict[Coordinate, tuple[int, Task]], team: Sequence[Coordinate], compute: Compute
) -> list[tuple[int, list[Tensor]]]:
    """One leaf for each owner: gather, compute, hand back. This rank's parts of each leaf, by the leaf's index."""
    own = own_coordinate(next(iter(wave.values()))[1].specs()[0])
    wholes = _gather(wave, team, own)
    news: Sequence[Tensor] = ()
    failure: Exception | None = None
    if own in wave:
        try:
            news = compute(wave[own][1], wholes)
        except Exception as error:  # the others wait for an answer
            failure = error
    del wholes
    answers = _hand_back(wave, team, own, news, failure is not None)
    if failure is not None:
        raise failure
    parts = []
    for owner, (i, task) in wave.items():
        if owner == own:
            cut = [_part(x, s, own) for x, s in zip(news, task.specs(), strict=True)]
            parts.append((i, [x.clone(memory_format=torch.contiguous_format) for x in cut]))
            continue
        flat = answers[owner]
        if not flat[0]:
            raise WrongState(
                f"the leaf function failed for {task.path!r} on the rank at {owner} of the mesh, which had the whole "
                "leaf; its error is raised there",
                task.path,
            )
        shapes = [s.local_shape(own) for s in task.specs()]
        values = flat[1:].split([prod(shape) for shape in shapes])
        parts.append((i, [x.clone().view(shape) for x, shape in zip(values, shapes, strict=True)]))
    return parts


def _gather(wave: dict[Coordinate, tuple[int, Task]], team: Sequence[Coordinate], own: Coordinate) -> list[Tensor]:
    """The whole tensors of the leaf that this rank works on; empty, if it has none."""
    sends: list[Message] = []
    arriving: list[Message] = []
    wholes: list[Tensor] = []
    specs: list[ShardSpec] = []
    for owner, (_, task) in wave.items():
        parts, given = task.parts(), _given(task)
        if owner == own:
            specs = given
            wholes = [x.new_empty(s.shape) for x, s in zip(parts, given, strict=True)]
            for whole, part, s in zip(wholes, parts, given, strict=True):
                _part(whole, s, own).copy_(part)
            for rank in team:
                size = sum(prod(s.local_shape(rank)) for s in given if _is_sent(given[0], s, rank, own))
                if size and rank != own:
                    arriving.append((rank, parts[0].new_empty(size)))
            continue
        flat = [x.reshape(-1) for x, s in zip(parts, given, strict=True) if _is_sent(given[0], s, own, owner)]
        if sum(x.numel() for x in flat):
            sends.append((owner, torch.cat(flat)))
    exchange(next(iter(wave.values()))[1].specs()[0], sends, arriving)
    for rank, flat in arriving:
        places = [_part(x, s, rank) for x, s in zip(wholes, specs, strict=True) if _is_sent(specs[0], s, rank, own)]
        for place, values in zip(places, flat.split([x.numel() for x in places]), strict=True):
            place.copy_(values.view(place.shape))
    return wholes


def _hand_back(
    wave: dict[Coordinate, tuple[int, Task]],
    team: Sequence[Coordinate],
    own: Coordinate,
    news: Sequence[Tensor],
    failed: bool,
) -> dict[Coordinate, Tensor]:
    """The answer of each other owner: a 1 and this rank's parts of its leaf, or a 0 if it failed."""
    sends: list[Message] = []
    answers: dict[Coordinate, Tensor] = {}
    for owner, (_, task) in wave.items():
        specs = task.specs()
        like = torch.empty(0, dtype=torch.float32, device=task.update.device)
        if owner != own:
            answers[owner] = like.new_empty(1 + sum(prod(s.local_shape(own)) for s in specs))
            continue
        for rank in team:
            if rank != own and failed:
                sends.append((rank, like.new_zeros(1 + sum(prod(s.local_shape(rank)) for s in specs))))
            elif rank != own:
                cut = [_part(x, s, rank).reshape(-1) for x, s in zip(news, specs, strict=True)]
                sends.append((rank, torch.cat([like.new_ones(1), *cut])))
    exchange(next(iter(wave.values()))[1].specs()[0], sends, list(answers.items()))
    return answers


def _given(task: Task) -> list[ShardSpec]:
    """The specs of what a leaf's function is given, the leaf's own first."""
    specs = task.specs()
    return specs if task.param is None else [*specs, specs[0]]


def _is_sent(leaf: ShardSpec, spec: ShardSpec, rank: Coordinate, owner: Coordinate) -> bool:
    """Whether a rank sends its part of a tensor to the leaf's owner: of ranks with equal parts, the nearest does."""
    return all(rank[d] == owner[d] for d in leaf.sharded_mesh_dims if d not in spec.sharded_mesh_dims)


def _part(whole: Tensor, spec: ShardSpec, rank: Coordinate) -> Tensor:
    """A view of a rank's part."""
    shape, offset = spec.local_shape(rank), spec.local_offset(rank)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
