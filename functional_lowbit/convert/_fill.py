"""A new functional state with the moments and steps that were read: what it keeps where, compared before it is made."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.donate import copy_leaf
from functional_lowbit._core.state.parts import moments_in
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._flashoptim import master_codes
from functional_lowbit.convert._kept import Kept, write
from functional_lowbit.convert._match import named_leaves
from functional_lowbit.convert._read import LARGEST_STEP, Read
from functional_lowbit.sharding import local_of

COUNTERS = ("step", "gradient_step")  # fields that count the updates made; int64[]


class Slot(NamedTuple):
    """One leaf of a declared moment."""

    path: str  # in the state: 0.mu.layers.0.weight
    field: str
    owner: str  # the parameter's path
    leaf: Any
    counter: str | None  # path of the counter in the same state


class Counter(NamedTuple):
    """A step counter, and the parameters whose updates it counts."""

    path: str
    owners: frozenset[str]  # those with a moment in the same state; else in the smallest state around it with any
    leaf: Tensor


class Slots(NamedTuple):
    """All of a state."""

    slots: list[Slot]
    counters: list[Counter]
    whole: bool  # whether no mask has taken a parameter out of a moment's tree

    def owners(self) -> list[str]:
        """Paths of the parameters, in order."""
        return list(dict.fromkeys(slot.owner for slot in self.slots))


def find_slots(state: Any) -> Slots:
    """Moments go by what a state's class declares, however deep it sits in chains and wrappers."""
    places = list(_optree.nodes(state, moments_in))
    counting = {at.names[:-1]: at.path for at in places if at.name == "step"}
    slots: list[Slot] = []
    owners: dict[tuple[str, ...], set[str]] = {}  # by every node around a moment
    whole = True
    for at in places:
        if at.mark is None:
            continue
        for owner, leaf in named_leaves(at.node):
            if leaf is None:
                whole = False
                continue
            path = f"{at.path}.{owner}" if owner else at.path
            slots.append(Slot(path, at.name, owner, leaf, counting.get(at.names[:-1])))
            for n in range(len(at.names)):
                owners.setdefault(at.names[:n], set()).add(owner)
    counters = []
    for at in places:
        if at.mark is None and at.name in COUNTERS and _is_count(at.node):
            around = (owners[at.names[:n]] for n in reversed(range(len(at.names))) if at.names[:n] in owners)
            counters.append(Counter(at.path, frozenset(next(around, ())), at.node))
    return Slots(slots, counters, whole)


def _is_count(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.dtype == torch.int64


def filled(state: Any, makers: Mapping[str, Callable[[], Any]]) -> Any:
    """A new state with other leaves where `makers` has their path, and copies of its own elsewhere."""
    for at in _optree.stored_leaves(state):
        part = at.node.codes if isinstance(at.node, QuantizedTensor) else at.node
        if at.path not in makers and isinstance(part, Tensor) and local_of(part).device.type == "meta":
            raise WrongValue(
                f"{at.path} of the target is on the meta device, and saved has nothing for it; make the "
                "target of parameters that have memory"
            )

    def new(at: _optree.Place) -> Any:
        return makers[at.path]() if at.path in makers else _optree.map_leaves(copy_leaf, at.node)

    return _optree.map_stored(new, state)


def listed(words: Collection[str]) -> str:
    """Words for an error."""
    return ", ".join(sorted(words)) or "none"


FILLED = ("mu", "nu", "trace")  # fields that hold an optimizer's moments; of others, what was not saved stays as it is


def fill(state: Any, reads: Mapping[str, Read], step: int | None, params: Mapping[str, Any]) -> Any:
    """A state like `state`, with what was read. It shares no memory with either.

    A parameter without moments and step never had a gradient: its leaves stay as they are. `step` is for every counter,
    instead of those that were read; `params` are needed for master weights only.
    """
    found = find_slots(state)
    by_owner: dict[str, list[Slot]] = {}
    for slot in found.slots:
        by_owner.setdefault(slot.owner, []).append(slot)
    pairs: list[tuple[Slot, Kept]] = []
    for owner, read in reads.items():
        pairs += _pairs(read, by_owner.get(owner, []))
    counts = {c: _count(c, reads, step) for c in found.counters}
    masters = master_codes(state, reads, params)
    makers: dict[str, Callable[[], Any]] = {slot.path: partial(write, kept, slot.leaf) for slot, kept in pairs}
    makers.update(masters)
    for counter, count in counts.items():
        if count is not None:
            device = "cpu" if counter.leaf.device.type == "meta" else counter.leaf.device
            makers[counter.path] = partial(torch.tensor, count, dtype=torch.int64, device=device)
    return filled(state, makers)


def _pairs(read: Read, slots: list[Slot]) -> list[tuple[Slot, Kept]]:
    """Each saved moment of a parameter, with the leaf that it is for."""
    pairs: list[tuple[Slot, Kept]] = []
    for entry, kept in read.moments.items():
        fields = read.fields[entry]
        fitting = [slot for slot in slots if slot.field in fields]
        if not fitting:
            raise WrongValue(
                f"{read.words} has {entry!r}, which is {' or '.join(fields)} here, but the target's moments "
                f"of it are {listed({s.field for s in slots})}; it is the state of another kind of optimizer"
            )
        if len(fitting) > 1:
            raise WrongValue(
                f"{entry!r} of {read.words} may be {' or '.join(s.path for s in fitting)} of the target; "
                "convert into a transformation that has one of them"
            )
        if kept.shape != tuple(fitting[0].leaf.shape):
            raise WrongValue(
                f"{entry!r} of {read.words} has shape {kept.shape}, but the target's "
                f"{fitting[0].owner!r} has {tuple(fitting[0].leaf.shape)}; it is the state of another model"
            )
        pairs.append((fitting[0], kept))
    filled = {slot.path for slot, _ in pairs}
    for slot in slots:
        if read.moments and slot.field in FILLED and slot.path not in filled:
            raise WrongValue(
                f"{read.words} has {listed(read.moments)}, and nothing for {slot.path} of the target; it is "
                "the state of another kind of optimizer"
            )
    return pairs


def _count(counter: Counter, reads: Mapping[str, Read], step: int | None) -> int | None:
    """What a counter counts; None if that was not saved."""
    if step is not None:
        return step
    owners: Iterable[str] = counter.owners or reads
    for owner in owners:
        read = reads.get(owner)
        if read is not None and read.step is None and any("nu" in read.fields[entry] for entry in read.moments):
            raise WrongValue(f"{read.words} has no 'step', which Adam's moments need; pass step= to set all counters")
    counts = [(reads[o].step, reads[o].words) for o in owners if o in reads and reads[o].step is not None]
    counts.sort(key=lambda pair: (pair[0] or 0, pair[1]))
    if not counts:
        return None
    (least, its), (most, whose) = counts[0], counts[-1]
    if least != most:
        raise WrongValue(
            f"{its} has made {least} steps, {whose} {most}, but {counter.path} of the target counts those "
            "of both; give them transformations of their own (partition), or pass step= to set all counters"
        )
    return most


def check_step(step: Any) -> None:
    """A number of steps given by hand."""
    if step is None:
        return
    if isinstance(step, (bool, Tensor)) or not isinstance(step, int) or not 0 <= step <= LARGEST_STEP:
        raise WrongValue(f"step must be an int of at least 0 and below 2**63, got {step!r}")
