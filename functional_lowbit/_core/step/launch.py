"""The operations that are pending on leaves, run as kernels: one for each group of leaves that are treated alike."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.step import staging, streamed
from functional_lowbit._core.step.call import Call
from functional_lowbit._core.step.noise import Start
from functional_lowbit._core.step.plan import Plan
from functional_lowbit._core.step.slots import KernelKey, Result, Slot, Stage, numbers_of
from functional_lowbit.formats import Codec

ALWAYS = torch.ones((), dtype=torch.float32)  # the number 1, and a gate that is open


class Group(NamedTuple):
    """What leaves have in common that share a kernel."""

    ops: tuple[int, ...]
    codecs: tuple[tuple[Codec | None, ...], ...]  # for each operation, of each moment
    result: Result
    stochastic: bool
    is_widened: bool
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, call: Call, leaf: int, result: Result) -> "Group":
        """The group of a leaf. New parameters that a kernel cannot round are rounded behind it."""
        plan, ops = call.plan, tuple(call.pending[leaf])
        rounds = result is Result.APPLIED and plan.rounds(leaf)
        stochastic = rounds and _start(plan, ops, leaf) is not None
        return cls(
            ops,
            tuple([plan.moments[i][leaf].codecs for i in ops]),
            Result.KEPT if rounds and not stochastic else result,
            stochastic,
            plan.beside[leaf] is not None,
            plan.params.locals[leaf].dtype,
            call.updates[leaf].dtype,
            plan.params.locals[leaf].device,
        )

    def key(self, call: Call) -> KernelKey:
        """What their kernel is made for."""
        ops, widening = call.plan.ops, call.plan.program.widening
        stages = tuple(
            Stage.of(ops[i].rule, codecs, tuple(call.shared[i].scalars), ops[i].behind.gates)
            for i, codecs in zip(self.ops, self.codecs, strict=True)
        )
        pairing = widening.pairing if widening is not None and self.is_widened else None
        dtypes = self.param_dtype, self.grad_dtype
        return KernelKey(stages, len(call.gates), self.result, self.stochastic, pairing, *dtypes, self.device)


def flush(call: Call, leaves: Sequence[int]) -> None:
    """Run what is pending on some leaves, since what comes next looks at the result."""
    waiting = [i for i in leaves if call.pending[i] and call.updates[i] is not None]
    if waiting:
        launch(call, waiting, Result.KEPT)


def launch(call: Call, leaves: Sequence[int], result: Result) -> None:
    """Run what is pending on some leaves as one kernel for each group of them; those without an update are left out."""
    call.fill([i for i in leaves if call.pending[i]])
    call.localize()
    groups: dict[Group, list[int]] = {}
    for i in leaves:
        if call.updates[i] is not None and not (result is Result.APPLIED and i in call.zero):
            groups.setdefault(Group.of(call, i, result), []).append(i)
    outs: dict[int, Tensor] = {}
    batches = []
    for group, members in groups.items():
        if group.result is Result.KEPT:
            for i in members:
                outs[i] = torch.empty(call.plan.params.locals[i].shape, dtype=torch.float32, device=group.device)
        batches.append(_batch(call, group, members, outs))
    streamed.run(batches, call.begin_to_write)
    for i in leaves:
        call.pending[i] = []
        if result is Result.DISCARDED and call.updates[i] is not None:
            call.zero.add(i)
    for i, out in outs.items():
        if result is Result.KEPT:
            call.updates[i] = out
        else:
            noise, params = call.plan.noise, call.plan.params
            assert noise is not None
            noise.round_(params.locals[i], out, i, params.given[i].shape, params.specs[i])


def _batch(call: Call, group: Group, members: Sequence[int], outs: dict[int, Tensor]) -> streamed.Batch:
    """The leaves of a group with their kernel, and all that it is given."""
    plan, params, widening, key = call.plan, call.plan.params, call.plan.program.widening, group.key(call)
    kernel = call.kernels[key]
    numbers: dict[Any, Tensor] = {Slot.ONE: ALWAYS, **call.gates}
    for stage, i in enumerate(group.ops):
        numbers |= {(stage, name): x for name, x in call.shared[i].scalars.items()}
    scalars = vector([numbers[number] for number in numbers_of(key)], group.device)
    starts = [_start(plan, group.ops, i) if group.stochastic else None for i in members]
    grids = [plan.grid(group.ops, i) if start is None else start.grid for i, start in zip(members, starts, strict=True)]
    given: dict[str, Sequence[Any]] = {
        Slot.UPDATE: [call.updates[i] for i in members],
        Slot.PARAM: [params.locals[i] for i in members],
        Slot.OUT: [outs.get(i) for i in members],
    }
    for stage, op in enumerate(group.ops):
        names = [slot.name for slot in kernel.slots if slot.stage == stage]
        if names:
            given |= zip(names, zip(*(plan.moments[op][i].tensors() for i in members), strict=True), strict=True)
    if group.is_widened and widening is not None:
        given[Slot.BESIDE] = [widening.part(params.given[i], x) for i in members if (x := plan.beside[i]) is not None]
    if plan.noise is not None and group.stochastic:
        words = [plan.noise.words(i, start, group.device) for i, start in zip(members, starts, strict=True) if start]
        given |= zip(Slot.NOISE, zip(*words, strict=True), strict=True)
    rows = zip(*(given[slot.name] for slot in kernel.slots), strict=True)
    leaves = [staging.Filled(grid, tensors) for grid, tensors in zip(grids, rows, strict=True)]
    return streamed.Batch(kernel, leaves, scalars, tuple([_resting(call, group, slot) for slot in kernel.slots]))


def _start(plan: Plan, ops: Sequence[int], leaf: int) -> Start | None:
    """Where the noise of the blocks of a leaf starts; None if that is not one place for each block."""
    assert plan.noise is not None
    return plan.noise.start(plan.params.given[leaf].shape, plan.params.specs[leaf], plan.grid(ops, leaf))


def _resting(call: Call, group: Group, slot: Slot) -> Any:
    """Who says how what is given in a slot rests, if that is elsewhere."""
    widening = call.plan.program.widening
    if slot.stage is not None:
        return call.plan.ops[group.ops[slot.stage]].behind.resting
    return widening.resting if widening is not None and slot.name == Slot.BESIDE else None


def vector(scalars: list[Tensor], device: torch.device) -> Tensor:
    """0-d tensors, wherever they are, as one float32 vector on a device."""
    scalars = [x.float() for x in scalars]
    if all(x.device == scalars[0].device for x in scalars):
        return torch.stack(scalars).to(device)
    return torch.stack([x.to(device) for x in scalars])
