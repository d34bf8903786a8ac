"""compile: the training step, fused, compiled once for all shapes, in place.

What crosses into `torch.compile` are plain, detached, local tensors: views of leaves as blocks, and one vector of
numbers. DTensors, parameters with a `.grad`, tensor subclasses and Python floats stay outside, by construction.
"""

from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _check, _interrupted, _staging, _tree
from functional_lowbit._apply import ROUNDINGS
from functional_lowbit._backends import Kernel, kernel_for
from functional_lowbit._base import GradientTransformation, Tree, call_update
from functional_lowbit._donate import apart, copy_leaf, into_old, storages
from functional_lowbit._kernel import KernelKey, Stage
from functional_lowbit._low_bit import read_moments
from functional_lowbit._noise import Noise, Start
from functional_lowbit._program import GateOp, LeafOp, ObserveOp, Op, OpaqueOp, Program, lower
from functional_lowbit._quantized import QuantizedTensor
from functional_lowbit._renewal import compare, renewed
from functional_lowbit._run import Run, block_size_of, codec_of, grid_of_moments, shapes_of, vector
from functional_lowbit.sharding import ShardSpec, local_of
from functional_lowbit.transforms._master import MasterWeights, MasterWeightsState, local_codes

ONE = torch.ones((), dtype=torch.float32)


class Step:
    """A compiled training step: `params, state = step(grads, state, params, **extra)`. Made by `compile`."""

    def __init__(self, tx: GradientTransformation, donate: bool, backend: str | None, noise: Noise | None):
        self._master, update = _unwrap_master(tx.update)
        self._program: Program = lower(update)
        if any(isinstance(op, OpaqueOp) for op in self._program.ops()):
            self._master, self._program = None, lower(tx.update)
        self._ops: list[Op] = list(self._program.ops())
        self._has_opaque = any(isinstance(op, OpaqueOp) for op in self._ops)
        self._donate = donate
        self._backend = backend
        self._noise = noise
        self._used: dict[KernelKey, Kernel] = {}

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for the kernels that this step uses. It stays the same after the first step."""
        return sum(kernel.graphs for kernel in self._used.values())

    def renew(self, tx: GradientTransformation) -> None:
        """Go on with a transformation that was made anew, by the same function with other numbers.

        States and kernels stay as they are. A number that is not a hyperparameter but a part of a leaf function (held
        in its closure, or given as a default) is a part of the compiled code: another one is compiled anew.

        Raises:
            TypeError: if `tx` is no GradientTransformation.
            ValueError: if it is not built like the one before: other parts, or another format.

        Example:
            >>> import torch, functional_lowbit as fl
            >>> tx, params = fl.sgd(0.5), {"w": torch.ones(2)}
            >>> step, state = fl.compile(tx, backend="eager"), tx.init(params)
            >>> step.renew(fl.sgd(0.25))
            >>> step({"w": torch.ones(2)}, state, params)[0]
            {'w': tensor([0.7500, 0.7500])}
        """
        _check.transformation("Step.renew", "tx", tx)
        master, update = self._master, tx.update
        if master is not None:
            compare(master, update, "Step.renew")
            master, update = _unwrap_master(update)
        self._program, self._master = renewed(self._program, update, "Step.renew"), master
        self._ops = list(self._program.ops())

    @torch.no_grad()
    def __call__(self, grads: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
        """One step: new params and new state, in the buffers that were given if they are donated.

        An exception in the middle (an interrupt, a rank that is gone, an error in a user's own pair), after something
        has been written in place, leaves params and state half-updated. The state is marked then, and refused from
        then on; see `docs/design.md`.

        Raises:
            TypeError, ValueError: before anything is written, for gradients, parameters or a state that do not fit
                each other, and for a hyperparameter that is not finite.
            RuntimeError: for a state that an interrupted step has left half-updated.
        """
        run = self._begin(grads, state, params, extra)
        if not self._donate:
            params, state = _tree.map_leaves(copy_leaf, params), _tree.map_leaves(copy_leaf, state)
            run = self._begin(grads, state, params, extra)
        try:
            return params, self._take(run, state)
        except BaseException as error:
            if run.written and self._donate:
                _interrupted.mark(state, error)
            raise

    def _take(self, run: Run, state: Any) -> Any:
        """Run all operations: the new state, in the old one's place."""
        inner = state if self._master is None else state.inner_state
        run.take(run.updates)
        new_states = list(run.states)
        pending: list[int] = []
        for i, op in enumerate(self._ops):
            if isinstance(op, LeafOp):
                if op.rule.prepare is not None or self._grids_differ(run, pending, i):
                    pending = self._flush(run, pending)
                whole = op.rule.prepare is not None
                run.shared[i] = op.rule.share(
                    run.update_tree(run.active[i], op.rule.prepare) if whole else None,
                    read_moments(run.states[i]) if whole and op.rule.moments else run.states[i],
                    run.param_tree(run.active[i]) if whole else None,
                    run.hypers[i],
                )
                pending.append(i)
                continue
            if isinstance(op, ObserveOp) and not op.part.wants(run.states[i]):
                new_states[i] = op.part.pass_by(run.states[i])
                continue
            pending = self._flush(run, pending)
            if isinstance(op, GateOp):
                is_open, new_states[i] = op.part.decide(run.update_tree(run.active[i]), run.states[i])
                run.gates[op.gate] = is_open
            elif isinstance(op, ObserveOp):
                trees = run.update_tree(run.active[i]), run.states[i], run.param_tree(run.active[i])
                new_states[i] = op.part.observe(*trees, run.extra)
            else:
                new_states[i] = self._call_opaque(run, op, run.states[i])
        self._run_leaf_ops(run, pending, apply=True)
        self._write_shared(run, new_states)
        inner = self._program.rebuild(inner, iter(new_states))
        return inner if self._master is None else state._replace(inner_state=inner)

    def _begin(self, grads: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Run:
        """Look at everything before anything is written."""
        speaker = "compile(tx)"
        leaves, treedef = _tree.flatten(params)
        paths = _tree.names(treedef)
        _check.params(speaker, paths, leaves)
        updates = _check.same_structure(speaker, "grads", treedef, grads)
        _check.updates(speaker, paths, updates, leaves)
        codes: list[Any] = [None] * len(leaves)
        if self._master is not None:
            _check.state_class(speaker, state, MasterWeightsState)
            codes = _check.same_structure(speaker, "state.error", treedef, state.error)
            self._master.check_codes(speaker, paths, leaves, codes)
            state = state.inner_state
        states = list(self._program.states(state))
        active = list(self._program.active(params, treedef))
        hypers: list[Any] = []
        moments: list[list[tuple[Any, ...]]] = []
        for op, op_state, seen in zip(self._ops, states, active, strict=True):
            if not isinstance(op, LeafOp):
                hypers.append(None)
                moments.append([])
                continue
            _check.state_class(speaker, op_state, op.rule.state_class)
            fields = []
            for name in op.rule.moments:
                values = _check.same_structure(speaker, f"state.{name}", treedef, getattr(op_state, name))
                for path, leaf, value, is_seen in zip(paths, leaves, values, seen, strict=True):
                    if is_seen:
                        _check.moment_shape(speaker, name, path, leaf, value)
                fields.append(values)
            moments.append(list(zip(*fields, strict=True)) if fields else [()] * len(leaves))
            for path, each in zip(paths, moments[-1], strict=True):
                sizes = {m.block_size for m in each if isinstance(m, QuantizedTensor) and m.format.scaled}
                if len(sizes) > 1:
                    raise ValueError(
                        f"{speaker}: the moments of {op.rule.name} at {path!r} have block sizes "
                        f"{' and '.join(map(str, sorted(sizes)))}; give the low_bits around it one block_size"
                    )
            hypers.append(op.rule.hyper(op_state))
        specs = [ShardSpec.of(p) for p in leaves]
        locals_ = [local_of(p) for p in leaves]
        if self._donate:
            _check.apart(speaker, paths, locals_)
            if self._has_opaque and not storages(state).isdisjoint(storages(locals_)):
                raise ValueError(
                    f"{speaker}: the state shares memory with the parameters, which are donated; copy them in init, or "
                    "compile with donate=False"
                )
        if self._noise is not None:
            self._noise.begin(state, paths)
        return Run(
            treedef, leaves, specs, locals_, updates, codes, active, states, moments, hypers, extra, noise=self._noise
        )

    def _flush(self, run: Run, pending: list[int]) -> list[int]:
        """Run what is pending, since what comes next looks at its result."""
        if pending:
            self._run_leaf_ops(run, pending, apply=False)
        return []

    def _grids_differ(self, run: Run, pending: list[int], i: int) -> bool:
        """Whether a leaf's moments are blocked differently in an earlier operation (two `low_bit`s in one chain)."""
        mine = [block_size_of(m) for m in run.moments[i]]
        for j in pending:
            for a, b in zip(mine, run.moments[j], strict=True):
                if a is not None and block_size_of(b) not in (None, a):
                    return True
        return False

    def _call_opaque(self, run: Run, op: OpaqueOp, state: Any) -> Any:
        """Call an update whose inside is not known, on the trees that the user would see."""
        updates, new_state = call_update(op.update, run.update_tree(), state, run.param_tree(), run.extra)
        # What comes back may be a part of the old state or of the parameters, which are written to from here on.
        written = storages(state) | storages(run.params)
        us = _check.same_structure("compile(tx)", "updates", run.treedef, updates)
        _check.updates("compile(tx)", _tree.names(run.treedef), us, run.params)
        run.written = True
        run.take([apart(u, written) for u in us])
        return into_old(new_state, state, written)

    def _run_leaf_ops(self, run: Run, pending: list[int], apply: bool) -> None:
        """Run neighbouring leaf functions as one kernel, and add the updates to the parameters if asked."""
        run.localize()
        groups: dict[Any, list[int]] = {}
        for i, update in enumerate(run.updates):
            if update is not None:
                ops = tuple(j for j in pending if run.active[j][i])
                codecs = tuple(tuple(codec_of(m) for m in run.moments[j][i]) for j in ops)
                place = run.locals[i]
                rounds = apply and run.rounds(i)
                fused = rounds and self._start(run, ops, i) is not None
                kind = (place.dtype, update.dtype, place.device)
                bits = 0 if self._master is None or run.codes[i] is None else self._master.bits
                groups.setdefault((ops, codecs, *kind, apply and rounds == fused, fused, bits), []).append(i)
        outs: list[Any] = [None] * len(run.updates)
        calls = []
        for (ops, codecs, param_dtype, grad_dtype, device, in_place, stochastic, bits), members in groups.items():
            stages = tuple(
                Stage.of(self._rule(j), c, tuple(run.shared[j].scalars), self._ops[j].gates)
                for j, c in zip(ops, codecs, strict=True)
            )
            blocked = stochastic or any(c is not None and c.parts == 2 for cs in codecs for c in cs)
            key = KernelKey(
                stages, len(run.gates), in_place, stochastic, bits, blocked, param_dtype, grad_dtype, device
            )
            kernel = self._used.get(key)
            if kernel is None:
                kernel = self._used[key] = kernel_for(key, self._backend)
            scalars = vector(
                [ONE]
                + [g.float() for g in run.gates.values()]
                + [x for j in ops for x in run.shared[j].scalars.values()],
                device,
            )
            shaped = [True, True, *(s for cs in codecs for c in cs for s in shapes_of(c))]
            shaped += [False] * 3 if stochastic else []
            shaped += [True] if bits else []
            if not in_place:
                shaped.append(True)
                for i in members:
                    outs[i] = torch.empty(run.locals[i].shape, dtype=torch.float32, device=device)
            starts = {i: self._start(run, ops, i) for i in members} if stochastic else {}
            calls.append((kernel, [self._leaf(run, ops, i, outs[i], starts.get(i)) for i in members], shaped, scalars))
        run.written = run.written or bool(calls)  # whatever could be refused or fail to compile has had its chance
        for kernel, leaves, shaped, scalars in calls:
            kernel.run(leaves, shaped, scalars)
        if not apply:
            run.updates = outs
            return
        for i, out in enumerate(outs):
            if out is not None:
                assert run.noise is not None
                run.noise.round_(run.locals[i], out, i, run.params[i].shape, run.specs[i])

    def _start(self, run: Run, ops: tuple[int, ...], i: int) -> Start | None:
        """Where the noise of a leaf's blocks starts."""
        assert run.noise is not None
        return run.noise.start(run.params[i].shape, run.specs[i], grid_of_moments(run, ops, i))

    def _leaf(self, run: Run, ops: tuple[int, ...], i: int, out: Tensor | None, start: Start | None) -> _staging.Leaf:
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
        return _staging.Leaf(grid_of_moments(run, ops, i) if start is None else start.grid, tuple(tensors))

    def _rule(self, j: int) -> Any:
        op = self._ops[j]
        assert isinstance(op, LeafOp)
        return op.rule

    def _write_shared(self, run: Run, new_states: list[Any]) -> None:
        """Let counters and other shared state go on, where the gates are open."""
        run.written = True
        for i, op in enumerate(self._ops):
            if isinstance(op, OpaqueOp):
                continue
            old = run.states[i]
            if isinstance(op, LeafOp):
                news = run.shared[i].state
            else:
                news = {n: v for n, v in new_states[i]._asdict().items() if v is not getattr(old, n)}
            for name, new in news.items():
                for place, value in zip(_tree.leaves(getattr(old, name)), _tree.leaves(new), strict=True):
                    place, value = local_of(place), local_of(value)
                    for gate in op.gates:
                        value = torch.where(run.gates[gate].to(value.device), value, place)
                    place.copy_(value)
            new_states[i] = old


def _unwrap_master(update: Any) -> tuple[MasterWeights | None, Any]:
    """Master weights around everything else, which the kernel can read and write; and what is inside them."""
    if isinstance(update, MasterWeights):
        return update, update.inner.update
    return None, update


def compile(
    tx: GradientTransformation,
    *,
    donate: bool = True,
    backend: str | None = None,
    rounding: str = "nearest",
    key: int | Tensor | None = None,
) -> Step:
    """Make the training step of a transformation: one fused kernel for all leaves, compiled once.

    Leaf functions that follow each other are fused into one kernel that reads gradient, parameter and moments once,
    and writes parameter and moments once. It is compiled for two free sizes, so that no shape, number of leaves,
    learning rate or other number compiles it again: one graph for leaves stored in blocks and one for the others, for
    each pair of parameter and gradient dtype. Updates stay in float32 until they are added to the parameters.
    A `(init, update)` pair of the user's own runs as it is, between the kernels.

    Args:
        tx: Any transformation.
        donate: True: params and state are written in place, and returned. False: they are copied first.
        backend: "native" is C++ made for this transformation, on the CPU; "inductor" or another backend of
            torch.compile runs anywhere; "eager" needs no compiler. All give the same numbers, bit for bit. None takes
            "native" where a leaf is on the CPU, a C++ compiler is there and the leaf functions consist of operations
            that it knows, and "inductor" elsewhere.
        rounding: How new parameters are rounded to their dtype: to the "nearest" number, or "stochastic" for bfloat16
            and float16, see `rounding.stochastic_round`; others are rounded to the nearest.
        key: For "stochastic": an int of 64 bits, or an int64[] tensor that is read anew at each step. The noise of a
            step is that of `apply_updates` with the key `rounding.fold_in(key, step)`, where `step` is the first field
            of that name in the state that the step is given.

    Returns:
        `step(grads, state, params, **extra) -> (params, state)`, with the attribute `graphs`. Params may be
        `nn.Parameter`s and DTensors, with or without `.grad`; a gradient of None skips its leaf.

    Raises:
        TypeError: if `tx` is no GradientTransformation.
        ValueError: for another rounding, or without a key for "stochastic".
        NotImplementedError: at the first step, if "native" is asked for and cannot be used.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.sgd(0.5)
        >>> params = {"w": torch.ones(2)}
        >>> step = fl.compile(tx, backend="eager")
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    _check.transformation("compile", "tx", tx)
    if rounding not in ROUNDINGS:
        raise ValueError(f"compile: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "nearest":
        return Step(tx, donate, backend, None)
    if key is None:
        raise ValueError("compile: rounding='stochastic' needs a key, an int or a 0-d int64 tensor")
    return Step(tx, donate, backend, Noise(key))
