"""The end of a compiled step: counters and other shared state go on, in the tensors that hold them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state.moments import changed
from functional_lowbit._core.step.program import HostGateOp, LeafOp, OpaqueOp
from functional_lowbit._core.step.run import Run
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import local_of


def write_shared(run: Run, new_states: list[Any]) -> None:
    """Let counters and other shared state go on, where the gates are open."""
    run.written = True
    for i, op in enumerate(run.ops):
        old = run.states[i]
        if isinstance(op, OpaqueOp) or not run.closed.isdisjoint(op.behind.hosts):
            continue
        if isinstance(op, (LeafOp, HostGateOp)):
            news = run.shared[i].state
        else:
            news = {n: v for n, v in new_states[i]._asdict().items() if v is not getattr(old, n)}
        gates = [run.gates[gate] for gate in op.behind.gates]
        if isinstance(op, HostGateOp):
            for k in run.missed[i]:
                for moment in run.moments[i][k]:
                    _write(moment, changed(partial(op.part.missed, state=old), moment), gates)
        for name, new in news.items():
            _write(getattr(old, name), new, gates)
        new_states[i] = old


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
