"""to_torch: a state of ours as the state_dict of a torch.optim optimizer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.contract import interrupted
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.convert._kept import Kept
from functional_lowbit.convert._match import Sides, match
from functional_lowbit.convert._own import ENTRIES, is_own, is_own_state, kept_of, saved_of_own
from functional_lowbit.convert._place import Place, own_groups, place_of
from functional_lowbit.convert._read import read_step
from functional_lowbit.convert._saved import SavedParam, unflattened
from functional_lowbit.convert._shell import params_in_order, same_switches
from functional_lowbit.convert._slots import Slots, find_slots, listed, named_leaves
from functional_lowbit.optim._optimizer import Optimizer

SPEAKER = "to_torch"


class Owner(NamedTuple):
    """One parameter of the source that has moments."""

    moments: dict[str, Kept]  # by entry of torch
    step: int | None


class Source(NamedTuple):
    """What is converted."""

    params: Mapping[str, Tensor | None]  # all, by name and in order; None where they are not known
    owners: dict[str, Owner]
    place: Place | None = None  # its own groups, if they have all hyperparameters
    groups: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # the group of each parameter, where there are any


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
            amsgrad or dampening, and a source with two moments for one entry.
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
    place = given.place if target is None else place_of(SPEAKER, target)
    if place is None:
        raise ValueError(
            f"{SPEAKER}: target is needed, since source has not all hyperparameters; pass the torch.optim optimizer, "
            "or its groups"
        )
    found = match(
        Sides(SPEAKER, "target", "source", "source" if is_own_state(source) else ""),
        [p._replace(entries={"": None}) for p in place.params],
        given.params,
    )
    damped = isinstance(source, Optimizer) and all("dampening" in group for group in source.param_groups)
    makers = {}
    for name, p in found.items():
        if name in given.owners:  # a mask may have left out the others
            group = place.groups[p.group]
            same_switches(f"{SPEAKER}: parameter {name!r} of source", given.groups.get(name, {}), "target", group)
            makers[p.number] = _checked(given.owners[name], p, group, damped)
    state = {}
    for number, (moments, step) in sorted(makers.items()):
        made: dict[str, Any] = {} if step is None else {"step": torch.tensor(float(step), dtype=torch.float32)}
        for entry, kept in moments.items():
            made[entry] = kept.values().float().clone()
        if made:
            state[place.keys[number]] = made
    return {"state": state, "param_groups": place.groups}


def _source(source: Any, params: Tree, entries: Mapping[str, str]) -> Source:
    if isinstance(source, Optimizer):
        known: Mapping[str, Any] = params_in_order(SPEAKER, source)
        owners: dict[str, Owner] = {}
        for tree in source._trees:
            with speaking(SPEAKER):
                interrupted.refuse(tree.state)
            owners.update(_owners(find_slots(tree.state), entries))
        members = [group for group in source.param_groups for _ in group["params"]]
        place = own_groups(SPEAKER, source.state_dict()["param_groups"])
        return Source(known, owners, place, dict(zip(known, members, strict=True)))
    if is_own(source):
        saved = saved_of_own(SPEAKER, source)
        owners, groups = {}, source.get("param_groups", ())
        own: dict[str, Mapping[str, Any]] = {}
        for p in saved.params:
            moments = {entries[f]: kept_of(x) for f, x in p.entries.items() if f in entries}
            if moments:
                name = str(p.number) if p.name is None else p.name
                owners[name] = Owner(moments, read_step(SPEAKER, p))
                own[name] = groups[p.group] if groups else {}
        place = own_groups(SPEAKER, groups) if groups else None
        return Source(dict.fromkeys(owners), owners, place, own)
    with speaking(SPEAKER):
        interrupted.refuse(source)
    slots = find_slots(source)
    known = dict.fromkeys(slots.owners()) if params is None else dict(named_leaves(params))
    return Source(known, _owners(slots, entries))


def _owners(slots: Slots, entries: Mapping[str, str]) -> dict[str, Owner]:
    counters = {counter.path: int(counter.leaf) for counter in slots.counters}
    found: dict[str, Owner] = {}
    for slot in slots.slots:
        if slot.field not in entries:
            continue
        entry = entries[slot.field]
        step = counters.get(slot.counter or "")
        owner = found.setdefault(slot.owner, Owner({}, step))
        if entry in owner.moments:
            raise ValueError(
                f"{SPEAKER}: source has two moments of parameter {slot.owner!r} that {entry!r} may be, the second at "
                f"{slot.path}; torch keeps one"
            )
        owner.moments[entry] = kept_of(slot.leaf)
        if owner.step is None and step is not None:
            found[slot.owner] = owner._replace(step=step)
    return found


def _checked(owner: Owner, p: SavedParam, group: Mapping[str, Any], damped: bool) -> tuple[dict[str, Kept], int | None]:
    """What a parameter of a group gets, if its optimizer keeps that. Known ones are told by their group."""
    moments, step = owner.moments, owner.step
    wanted: set[str] | None = None
    if "ns_coefficients" in group:
        wanted, step = {"momentum_buffer"}, None
        if set(moments) == {"exp_avg"}:
            moments = {"momentum_buffer": moments["exp_avg"]}
    elif "dampening" in group:
        wanted, step = {"momentum_buffer"}, None
        for name, rule in (("dampening", damped or not group["dampening"]), ("momentum", bool(group.get("momentum")))):
            if not rule:
                raise ValueError(
                    f"{SPEAKER}: {name} of group {p.group} of target is {group[name]}, with which torch.optim.SGD "
                    "keeps no such momentum; change it"
                )
    elif "amsgrad" in group:
        wanted = {"exp_avg", "exp_avg_sq"}
        if group["amsgrad"]:
            raise ValueError(
                f"{SPEAKER}: group {p.group} of target has amsgrad, whose max_exp_avg_sq the source has not; switch it "
                "off"
            )
    if wanted is not None and set(moments) != wanted:
        raise ValueError(
            f"{SPEAKER}: source has {listed(moments)} of {p.words}, but the optimizer of group {p.group} of target "
            f"keeps {listed(wanted)}; it is of another kind"
        )
    for entry, kept in moments.items():
        if p.tensor is not None and kept.shape != tuple(p.tensor.shape):
            raise ValueError(
                f"{SPEAKER}: {entry!r} of {p.words} has shape {kept.shape}, but target's parameter has "
                f"{tuple(p.tensor.shape)}; it is the state of another model"
            )
    return moments, step
