"""The operations that are pending on leaves, run as kernels: one for each group of leaves that are treated alike."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.state.masters import local_codes
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.step import staging, streamed
from functional_lowbit._core.step.backends import Kernel, kernel_for
from functional_lowbit._core.step.kernel import KernelKey, Stage
from functional_lowbit._core.step.noise import Start
from functional_lowbit._core.step.run import Run, codec_of, grid_of_moments, shapes_of, vector
from functional_lowbit.sharding import local_of

ONE = torch.ones((), dtype=torch.float32)


class Result(Enum):
    """What becomes of the updates."""

    APPLIED = "added to the parameters"
    KEPT = "handed to what comes next"
    DISCARDED = "taken for 0 from here on"


def flush(run: Run, used: dict[KernelKey, Kernel], leaves: Sequence[int]) -> None:
    """Run what is pending on some leaves, since what comes next looks at the result."""
    waiting = [i for i in leaves if run.pending[i] and run.updates[i] is not None]
    if waiting:
        launch(run, used, waiting, Result.KEPT)


def launch(run: Run, used: dict[KernelKey, Kernel], leaves: Sequence[int], result: Result) -> None:
    """Run what is pending on some leaves as one kernel for each group of them.

    Args:
        run: The call.
        used: Kernels of the step; new ones are added.
        leaves: Their indices; those without an update are left out.
        result: What becomes of the updates.
    """
    apply = result is Result.APPLIED
    run.fill([i for i in leaves if run.pending[i]])
    run.localize()
    groups: dict[Any, list[int]] = {}
    for i in leaves:
        update = run.updates[i]
        if update is None or (apply and i in run.zero):
            continue
        ops = tuple(run.pending[i])
        codecs = tuple(tuple(codec_of(m) for m in run.moments[j][i]) for j in ops)
        place = run.locals[i]
        rounds = apply and run.rounds(i)
        fused = rounds and _start(run, ops, i) is not None
        kind = (place.dtype, update.dtype, place.device)
        bits = 0 if run.codes[i] is None else run.master_bits
        groups.setdefault((ops, codecs, *kind, apply and rounds == fused, fused, bits), []).append(i)
    outs: dict[int, Tensor] = {}
    calls = []
    for (ops, codecs, param_dtype, grad_dtype, device, in_place, stochastic, bits), members in groups.items():
        stages = tuple(
            Stage.of(_rule(run, j), c, tuple(run.shared[j].scalars), run.ops[j].behind.gates)
            for j, c in zip(ops, codecs, strict=True)
        )
        blocked = stochastic or any(c is not None and c.parts == 2 for cs in codecs for c in cs)
        discards = result is Result.DISCARDED
        key = KernelKey(
            stages, len(run.gates), in_place, stochastic, bits, blocked, param_dtype, grad_dtype, device, discards
        )
        kernel = used.get(key)
        if kernel is None:
            kernel = used[key] = kernel_for(key, run.backend)
        scalars = vector(
            [ONE] + [g.float() for g in run.gates.values()] + [x for j in ops for x in run.shared[j].scalars.values()],
            device,
        )
        shaped = [True, True, *(s for cs in codecs for c in cs for s in shapes_of(c))]
        shaped += [False] * 3 if stochastic else []
        shaped += [True] if bits else []
        if not in_place and not discards:
            shaped.append(True)
            for i in members:
                outs[i] = torch.empty(run.locals[i].shape, dtype=torch.float32, device=device)
        starts = {i: _start(run, ops, i) for i in members} if stochastic else {}
        tensors = [_leaf(run, ops, i, outs.get(i), starts.get(i)) for i in members]
        at_rest = [(run.ops[j].behind.resting, c) for j, c in zip(ops, codecs, strict=True)]
        at_rest += [(run.master_resting, (None,))] if bits else []
        calls.append(streamed.Call(kernel, tensors, shaped, scalars, *streamed.resting(at_rest)))
    streamed.run(calls, run.begin_to_write)
    for i in leaves:
        run.pending[i] = []
        if result is Result.DISCARDED and run.updates[i] is not None:
            run.zero.add(i)
    for i, out in outs.items():
        if apply:
            assert run.noise is not None
            run.noise.round_(run.locals[i], out, i, run.params[i].shape, run.specs[i])
        else:
            run.updates[i] = out


def _start(run: Run, ops: tuple[int, ...], i: int) -> Start | None:
    """Where the noise of a leaf's blocks starts."""
    assert run.noise is not None
    return run.noise.start(run.params[i].shape, run.specs[i], grid_of_moments(run, ops, i))


def _leaf(run: Run, ops: tuple[int, ...], i: int, out: Tensor | None, start: Start | None) -> staging.Leaf:
    """A leaf with all its tensors, in the kernel's order."""
    tensors = [run.updates[i], run.locals[i]]
    for j in ops:
        for moment in run.moments[j][i]:
            if isinstance(moment, QuantizedTensor):
                tensors += [x for x in moment.local_blocks() if x is not None]
            else:
                tensors.append(local_of(moment))
    if start is not None:
        assert run.noise is not None
        tensors += run.noise.words(i, start, run.locals[i].device)
    if run.codes[i] is not None:
        tensors.append(local_codes(run.codes[i], run.params[i]))
    if out is not None:
        tensors.append(out)
    return staging.Leaf(grid_of_moments(run, ops, i) if start is None else start.grid, tuple(tensors))


def _rule(run: Run, j: int) -> Any:
    """The leaf function of an operation that is pending."""
    return run.ops[j].rule  # type: ignore[union-attr]
