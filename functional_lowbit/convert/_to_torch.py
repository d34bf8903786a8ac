"""to_torch: a state of ours as the state_dict of a torch.optim optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.contract import interrupted
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.convert._fill import Slots, find_slots, listed
from functional_lowbit.convert._match import (
    Shell,
    Sides,
    are_whole,
    match,
    named_leaves,
    params_in_order,
    same_switches,
)
from functional_lowbit.convert._own import ENTRIES, is_own, is_own_state, kept_of, saved_of_own
from functional_lowbit.convert._read import Read, read_step
from functional_lowbit.convert._saved import Saved, SavedParam, of_groups, unflattened, with_tensors


class Source(NamedTuple):
    """What is converted."""

    params: Mapping[str, Tensor | None]  # all, by name and in order; None where they are not known
    reads: dict[str, Read]  # of those that have moments: these by entry of torch
    groups: Sequence[Mapping[str, Any]] = ()  # with "params", where there are any


@speaking("to_torch")
def to_torch(
    source: Any,
    target: Any = None,
    params: Tree = None,
    *,
    fields: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A state of ours as the state_dict of a `torch.optim` optimizer, in float32.

    `mu` becomes `exp_avg` (Muon's `momentum_buffer`), `nu` becomes `exp_avg_sq`, `trace` becomes `momentum_buffer`,
    and `step` a float32 tensor, as torch keeps it (exact up to 2**24). Moments in few bits are read; torch rounds to
    the parameters' dtype when it loads, and so keeps less for bfloat16 parameters. Every parameter gets a state, also
    one that never had a gradient.

    Args:
        source: A state; an `fl.optim.Optimizer`; or what `fl.state_dict`, or such an optimizer's `state_dict()`,
            returned. Not written to.
        target: The torch optimizer that will load the result; or its groups, as in its `state_dict()["param_groups"]`
            or with names as `params`. They give the hyperparameters, and the order. Needed unless `source` has groups
            with all hyperparameters that Adam or SGD has.
        params: For a state, the tree that it was made for, as in `from_torch`.
        fields: Field of the source's state by entry of torch, for entries and fields of other names.

    Returns:
        A dict for `target.load_state_dict`; with names as keys, if the groups' `params` are names, for
        `set_optimizer_state_dict`. Sharded moments are DTensors. No memory is shared with `source`.

    Raises:
        TypeError: if `target` is neither an optimizer nor groups.
        ValueError: for parameters that only one side has, a kind of optimizer that keeps other moments, one with
            amsgrad or dampening, a source without moments, and one with two for one entry.
        RuntimeError: for a state that an interrupted step has left half-updated.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> model = torch.nn.Linear(64, 64)
        >>> params = dict(model.named_parameters())
        >>> state = fl.adamw8bit(1e-3).init(params)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer.load_state_dict(fl.convert.to_torch(state, optimizer, params))
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    entries = {**ENTRIES, **{f: e for e, f in (fields or {}).items()}}
    given = _source(unflattened(source), params, entries)
    if target is None and not are_whole(given.groups):
        raise WrongValue(
            "target is needed, since source has not all hyperparameters; pass the torch.optim optimizer, or its groups"
        )
    place = _place(given.groups if target is None else target)
    if not given.reads and not all("dampening" in group and not group.get("momentum") for group in place.groups):
        raise WrongValue(
            "source has no moments; pass a state with some, an fl.optim optimizer, or what was saved of either"
        )
    sides = Sides("target", "source", "source" if is_own_state(source) else "")
    found = match(sides, place.params, given.params)
    damped = isinstance(source, Shell) and all("dampening" in group for group in source.param_groups)
    reads = {}
    for name, p in found.items():
        if name in given.reads:  # a mask may have left out the others
            read, group = given.reads[name], place.groups[p.group]
            own = given.groups[read.group] if given.groups else {}
            same_switches(f"parameter {name!r} of source", own, "target", group)
            reads[p.number] = _checked(read, p, group, damped)
    state = {}
    for number, read in sorted(reads.items()):
        made = {} if read.step is None else {"step": torch.tensor(float(read.step), dtype=torch.float32)}
        made |= {entry: kept.values().float().clone() for entry, kept in read.moments.items()}
        if made:
            state[place.params[number].key] = made
    keys = [[p.key for p in place.params if p.group == i] for i in range(len(place.groups))]
    groups = [{**group, "params": own} for group, own in zip(place.groups, keys, strict=True)]
    return {"state": state, "param_groups": groups}


def _place(target: Any) -> Saved:
    """The parameters of an optimizer, or of a list of groups. Any of them may get a state."""
    is_optimizer = isinstance(target, torch.optim.Optimizer)
    groups = target.state_dict()["param_groups"] if is_optimizer else target
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise WrongType(f"target must be a torch.optim.Optimizer or a list of its groups, got {type(target).__name__}")
    place = of_groups({}, groups)
    place = with_tensors(place, target) if is_optimizer else place
    return place._replace(params=[p._replace(entries={"": None}) for p in place.params])


def _source(source: Any, params: Tree, entries: Mapping[str, str]) -> Source:
    if isinstance(source, Shell):
        known, reads = params_in_order(source), {}
        for state, _ in source.parts():
            interrupted.refuse(state)
            reads |= _reads(find_slots(state), entries)
        members = [i for i, group in enumerate(source.param_groups) for _ in group["params"]]
        group_of = dict(zip(known, members, strict=True))
        reads = {name: read._replace(group=group_of[name]) for name, read in reads.items()}
        return Source(known, reads, source.state_dict()["param_groups"])
    if is_own(source):
        reads = {}
        for p in saved_of_own(source).params:
            moments = {entries[f]: kept_of(x) for f, x in p.entries.items() if f in entries}
            if moments:
                reads[p.label] = Read(p.words, moments, {}, p.group, read_step(p))
        return Source(dict.fromkeys(reads), reads, source.get("param_groups", ()))
    interrupted.refuse(source)
    slots = find_slots(source)
    known = dict.fromkeys(slots.owners()) if params is None else dict(named_leaves(params))
    return Source(known, _reads(slots, entries))


def _reads(slots: Slots, entries: Mapping[str, str]) -> dict[str, Read]:
    counters = {counter.path: int(counter.leaf) for counter in slots.counters}
    found: dict[str, Read] = {}
    for slot in slots.slots:
        if slot.field not in entries:
            continue
        entry, step = entries[slot.field], counters.get(slot.counter or "")
        read = found.setdefault(slot.owner, Read("", {}, {}, step=step))
        if entry in read.moments:
            raise WrongValue(
                f"source has two moments of parameter {slot.owner!r} that {entry!r} may be, the second at "
                f"{slot.path}; torch keeps one"
            )
        found[slot.owner] = read._replace(
            moments={**read.moments, entry: kept_of(slot.leaf)}, step=step if read.step is None else read.step
        )
    return found


def _checked(read: Read, p: SavedParam, group: Mapping[str, Any], damped: bool) -> Read:
    """What a parameter of a group gets, if its optimizer keeps that. Known ones are told by their group."""
    moments, step = read.moments, read.step
    wanted: set[str] | None = None
    if "ns_coefficients" in group:
        wanted, step = {"momentum_buffer"}, None
        if set(moments) == {"exp_avg"}:
            moments = {"momentum_buffer": moments["exp_avg"]}
    elif "dampening" in group:
        wanted, step = {"momentum_buffer"}, None
        for name, rule in (("dampening", damped or not group["dampening"]), ("momentum", bool(group.get("momentum")))):
            if not rule:
                raise WrongValue(
                    f"{name} of group {p.group} of target is {group[name]}, with which torch.optim.SGD "
                    "keeps no such momentum; change it"
                )
    elif "amsgrad" in group:
        wanted = {"exp_avg", "exp_avg_sq"}
        if group["amsgrad"]:
            raise WrongValue(
                f"group {p.group} of target has amsgrad, whose max_exp_avg_sq the source has not; switch it off"
            )
    if wanted is not None and set(moments) != wanted:
        raise WrongValue(
            f"source has {listed(moments)} of {p.words}, but the optimizer of group {p.group} of target "
            f"keeps {listed(wanted)}; it is of another kind"
        )
    for entry, kept in moments.items():
        if p.tensor is not None and kept.shape != tuple(p.tensor.shape):
            raise WrongValue(
                f"{entry!r} of {p.words} has shape {kept.shape}, but target's parameter has "
                f"{tuple(p.tensor.shape)}; it is the state of another model"
            )
    return read._replace(moments=moments, step=step)
