"""The end of a compiled step: counters and other shared state go on, in the tensors that hold them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.moments import changed
from functional_lowbit._core.step.call import Call
from functional_lowbit._core.step.program import HostGateOp, OpaqueOp
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import local_of


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
                    _write(moment, changed(partial(op.part.missed, state=old), moment), gates)
        for name, new in _news(call, i).items():
            _write(getattr(old, name), new, gates)
    return states


def _news(call: Call, i: int) -> dict[str, Any]:
    """The fields that an operation has moved on, if it was made."""
    if i in call.shared:
        return call.shared[i].state
    old, new = call.plan.states[i], call.states.get(i)
    return {} if new is None else {name: x for name, x in new._asdict().items() if x is not getattr(old, name)}


def _write(old: Tree, new: Tree, gates: list[Tensor]) -> None:
    """Write a tree into an old one's tensors. In a dict of numbers, one may be a Python number that a user has set."""
    if isinstance(old, dict):
        for name, value in new.items():
            if isinstance(value, Tensor) and not _fits(value, old[name]):
                old[name] = _gated(value, torch.as_tensor(old[name], dtype=value.dtype, device=value.device), gates)
            else:
                _write(old[name], value, gates)
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
