"""The operations of a step, one after the other: leaf functions wait for each other, all else looks at the result."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import call_update
from functional_lowbit._core.state.donate import into_old, storages, unshared
from functional_lowbit._core.state.moments import changed, read_moments
from functional_lowbit._core.step.call import Call
from functional_lowbit._core.step.launch import ALWAYS, flush, launch
from functional_lowbit._core.step.program import GateOp, HostGateOp, LeafOp, ObserveOp, OpaqueOp, RenewOp, RuleOp
from functional_lowbit._core.step.slots import Result
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import local_of


def run(call: Call, state: Any) -> Any:
    """Run all operations: the new state, in the old one's place."""
    call.take(call.updates)
    for i, op in enumerate(call.plan.ops):
        if not call.closed.isdisjoint(op.behind.hosts):
            if isinstance(op, GateOp):
                call.gates[op.gate] = ALWAYS  # kernels are told of gates by position
            continue
        match op:
            case LeafOp():
                _add(call, i)
            case HostGateOp():
                _add(call, i)
                _ask_host(call, i, op)
            case GateOp():
                _decide(call, i, op)
            case ObserveOp():
                _observe(call, i, op)
            case RenewOp():
                call.states[i] = call.moved[i]
            case OpaqueOp():
                _call_opaque(call, i, op)
    launch(call, range(len(call.updates)), Result.APPLIED)
    return call.plan.program.rebuild(state, iter(write_shared(call)))


def _add(call: Call, i: int) -> None:
    """Let a leaf function wait for what comes next, together with those before it where that is possible."""
    plan, rule, state = call.plan, call.plan.ops[i].rule, call.plan.states[i]
    active, seen = plan.active[i], plan.seen(i)
    if rule.prepare is None:
        if rule.moments:
            flush(call, [k for k in seen if _has_other_blocks(call, i, k)])
        call.shared[i] = rule.share(None, state, None, call.hypers[i])
    else:
        flush(call, seen)
        updates, read = call.update_tree(active, rule.prepare), read_moments(state) if rule.moments else state
        call.shared[i] = rule.share(updates, read, plan.param_tree(active), call.hypers[i])
    for k in seen:
        call.pending[k].append(i)


def _has_other_blocks(call: Call, i: int, leaf: int) -> bool:
    """Whether a leaf's moments are blocked differently in a pending operation (two `low_bit`s in one chain)."""
    mine, waiting = call.plan.moments[i][leaf].layout, call.plan.layout(call.pending[leaf], leaf)
    return mine is not None and waiting is not None and mine.block_size != waiting.block_size


def _ask_host(call: Call, i: int, op: HostGateOp) -> None:
    """Close the gate behind a leaf function, if what is behind it is not to run at this step."""
    seen = call.plan.seen(i)
    call.missed[i] = [k for k in seen if call.updates[k] is None]
    if not op.part.opens(call.plan.states[i]):
        call.closed.add(op.host)
        launch(call, seen, Result.DISCARDED)


def _decide(call: Call, i: int, op: GateOp) -> None:
    """Open or close a gate, and make updates zero, if it is closed, that no leaf function behind it sees."""
    plan, seen = call.plan, call.plan.seen(i)
    flush(call, seen)
    gate, call.states[i] = op.part.decide(call.update_tree(plan.active[i]), plan.states[i])
    call.gates[op.gate] = gate
    behind = [j for j, o in enumerate(plan.ops) if isinstance(o, RuleOp) and op.gate in o.behind.gates]
    # Masks let them pass.
    bare = [k for k in seen if call.updates[k] is not None and not any(plan.active[j][k] for j in behind)]
    if bare:
        call.localize()
    for k in bare:
        update = call.updates[k]
        call.updates[k] = torch.where(gate.to(update.device), update, torch.zeros_like(update))


def _observe(call: Call, i: int, op: ObserveOp) -> None:
    """Let a part look at the updates, if it wants to at this step."""
    plan, state = call.plan, call.plan.states[i]
    if not op.part.wants(state):
        call.states[i] = op.part.pass_by(state)
        return
    flush(call, plan.seen(i))
    updates, params = call.update_tree(plan.active[i]), plan.param_tree(plan.active[i])
    call.states[i] = op.part.observe(updates, state, params, call.extra)


def _call_opaque(call: Call, i: int, op: OpaqueOp) -> None:
    """Call an update whose inside is not known, on the trees that the user would see."""
    plan, state = call.plan, call.plan.states[i]
    flush(call, range(len(call.updates)))
    updates, new_state = call_update(op.part, call.update_tree(), state, plan.param_tree(), call.extra)
    # What comes back may be a part of the old state or of the parameters, which are written to from here on.
    written = storages(state) | storages(plan.params.given)
    us = plan.params.updates("updates", updates)
    call.begin_to_write()
    call.take([unshared(u, written) for u in us])
    call.states[i] = into_old(new_state, state, written)


def write_shared(call: Call) -> list[Any]:
    """Let counters and other shared state go on, where the gates are open; returns the state of each operation."""
    call.begin_to_write()
    states = list(call.plan.states)
    for i, (op, old) in enumerate(zip(call.plan.ops, call.plan.states, strict=True)):
        if isinstance(op, OpaqueOp):
            states[i] = call.states.get(i, old)
            continue
        gates = [call.gates[gate] for gate in op.behind.gates]
        if isinstance(op, HostGateOp):
            for k in call.missed.get(i, ()):
                for moment in call.plan.moments[i][k].kept:
                    _write_(moment, changed(partial(op.part.missed, state=old), moment), gates)
        for name, new in _news(call, i).items():
            _write_(getattr(old, name), new, gates)
    return states


def _news(call: Call, i: int) -> dict[str, Any]:
    """The fields that an operation has moved on, if it was made."""
    if i in call.shared:
        return call.shared[i].state
    old, new = call.plan.states[i], call.states.get(i)
    return {} if new is None else {name: x for name, x in new._asdict().items() if x is not getattr(old, name)}


def _write_(old: Tree, new: Tree, gates: list[Tensor]) -> None:
    """Write a tree into an old one's tensors. In a dict of numbers, one may be a Python number that a user has set."""
    if isinstance(old, dict):
        for name, value in new.items():
            if isinstance(value, Tensor) and not _fits(value, old[name]):
                old[name] = _gated(value, torch.as_tensor(old[name], dtype=value.dtype, device=value.device), gates)
            else:
                _write_(old[name], value, gates)
        return
    for place, value in zip(_optree.leaves(old), _optree.leaves(new), strict=True):
        if place is not value:
            local_of(place).copy_(_gated(local_of(value), local_of(place), gates))


def _fits(new: Tensor, place: Any) -> bool:
    return isinstance(place, Tensor) and place.dtype == new.dtype


def _gated(new: Tensor, old: Tensor, gates: list[Tensor]) -> Tensor:
    """The new numbers, or the old ones where a gate is closed."""
    for gate in gates:
        new = torch.where(gate.to(new.device), new, old)
    return new
