"""The compiled step: everything is looked at, operations run as kernels, counters go on, in this order."""

from typing import Any

import torch

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted, refuse
from functional_lowbit._core.contract.base import GradientTransformation, call_update
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.donate import apart, copy_leaf, into_old, storages
from functional_lowbit._core.state.masters import MasterWeights
from functional_lowbit._core.state.moments import read_moments
from functional_lowbit._core.step.backends import Kernel
from functional_lowbit._core.step.begin import begin
from functional_lowbit._core.step.finish import write_shared
from functional_lowbit._core.step.kernel import KernelKey
from functional_lowbit._core.step.launch import ONE, Result, flush, launch
from functional_lowbit._core.step.noise import Noise
from functional_lowbit._core.step.program import GateOp, HostGateOp, LeafOp, OpaqueOp, Program, RenewOp, lower
from functional_lowbit._core.step.renewal import compare, renewed
from functional_lowbit._core.step.run import Run, block_size_of
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking


class Step:
    """A compiled training step: `params, state = step(grads, state, params, **extra)`. Made by `compile`."""

    def __init__(self, tx: GradientTransformation, donate: bool, backend: str | None, noise: Noise | None):
        self._master, update = _unwrap_master(tx.update)
        self._program: Program = lower(update)
        if self._master is not None and any(isinstance(op, OpaqueOp) for op in self._program.ops()):
            self._master, self._program = None, lower(tx.update)
        self._donate = donate
        self._backend = backend
        self._noise = noise
        self._used: dict[KernelKey, Kernel] = {}

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for the kernels that this step uses. It stays the same after the first step."""
        return sum(kernel.graphs for kernel in self._used.values())

    @speaking("Step.renew")
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
        refuse.transformation("tx", tx)
        master, update = self._master, tx.update
        if master is not None:
            compare(master, update)
            master, update = _unwrap_master(update)
        self._program, self._master = renewed(self._program, update), master

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
            params, state = _optree.map_leaves(copy_leaf, params), _optree.map_leaves(copy_leaf, state)
            run = self._begin(grads, state, params, extra)
        try:
            return params, self._take(run, state)
        except BaseException as error:
            if run.written and self._donate:
                interrupted.mark(state, error)
            raise

    def _begin(self, grads: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Run:
        """Look at everything before anything is written."""
        run = begin(
            self._program,
            self._master,
            grads,
            state,
            params,
            extra,
            donate=self._donate,
            backend=self._backend,
            noise=self._noise,
        )
        self._program = run.program  # as long as the numbers in the state are the same, it serves again
        return run

    def _take(self, run: Run, state: Any) -> Any:
        """Run all operations: the new state, in the old one's place."""
        run.take(run.updates)
        new_states = list(run.states)
        every = range(len(run.updates))
        for i, op in enumerate(run.ops):
            seen = [k for k in every if run.active[i][k]]
            if not run.closed.isdisjoint(op.behind.hosts):
                if isinstance(op, GateOp):
                    run.gates[op.gate] = ONE  # kernels are told of gates by position
            elif isinstance(op, (LeafOp, HostGateOp)):
                self._add(run, i, op, seen)
                if isinstance(op, HostGateOp):
                    run.missed[i] = [k for k in seen if run.updates[k] is None]
                    if not op.part.opens(run.states[i]):
                        run.closed.add(op.host)
                        launch(run, self._used, seen, Result.DISCARDED)
            elif isinstance(op, RenewOp):
                new_states[i] = run.moved[i]
            elif isinstance(op, GateOp):
                flush(run, self._used, seen)
                run.gates[op.gate], new_states[i] = op.part.decide(run.update_tree(run.active[i]), run.states[i])
                _hold_back(run, op.gate, seen)
            elif isinstance(op, OpaqueOp):
                flush(run, self._used, every)
                new_states[i] = _call_opaque(run, op, run.states[i])
            elif op.part.wants(run.states[i]):
                flush(run, self._used, seen)
                trees = run.update_tree(run.active[i]), run.states[i], run.param_tree(run.active[i])
                new_states[i] = op.part.observe(*trees, run.extra)
            else:
                new_states[i] = op.part.pass_by(run.states[i])
        launch(run, self._used, every, Result.APPLIED)
        write_shared(run, new_states)
        inner = state if self._master is None else state.inner_state
        inner = run.program.rebuild(inner, iter(new_states))
        return inner if self._master is None else state._replace(inner_state=inner)

    def _add(self, run: Run, i: int, op: LeafOp | HostGateOp, seen: list[int]) -> None:
        """Let a leaf function wait for what comes next, together with those before it where that is possible."""
        whole = op.rule.prepare is not None
        flush(run, self._used, seen if whole else [k for k in seen if _other_grid(run, i, k)])
        run.shared[i] = op.rule.share(
            run.update_tree(run.active[i], op.rule.prepare) if whole else None,
            read_moments(run.states[i]) if whole and op.rule.moments else run.states[i],
            run.param_tree(run.active[i]) if whole else None,
            run.hypers[i],
        )
        for k in seen:
            run.pending[k].append(i)


def _other_grid(run: Run, i: int, leaf: int) -> bool:
    """Whether a leaf's moments are blocked differently in a pending operation (two `low_bit`s in one chain)."""
    if not run.pending[leaf]:
        return False
    mine = block_size_of(run.moments[i][leaf])
    return mine is not None and any(block_size_of(run.moments[j][leaf]) not in (None, mine) for j in run.pending[leaf])


def _hold_back(run: Run, gate: int, seen: list[int]) -> None:
    """Make updates zero, if a gate is closed, that no leaf function behind it sees: masks let them pass."""
    behind = [i for i, op in enumerate(run.ops) if isinstance(op, (LeafOp, HostGateOp)) and gate in op.behind.gates]
    bare = [k for k in seen if run.updates[k] is not None and not any(run.active[i][k] for i in behind)]
    if bare:
        run.localize()
    for k in bare:
        update = run.updates[k]
        run.updates[k] = torch.where(run.gates[gate].to(update.device), update, torch.zeros_like(update))


def _call_opaque(run: Run, op: OpaqueOp, state: Any) -> Any:
    """Call an update whose inside is not known, on the trees that the user would see."""
    updates, new_state = call_update(op.update, run.update_tree(), state, run.param_tree(), run.extra)
    # What comes back may be a part of the old state or of the parameters, which are written to from here on.
    written = storages(state) | storages(run.params)
    with speaking("compile(tx)"):
        us = fits.same_structure("updates", run.treedef, updates)
        fits.updates(_optree.names(run.treedef), us, run.params)
    run.written = True
    run.take([apart(u, written) for u in us])
    return into_old(new_state, state, written)


def _unwrap_master(update: Any) -> tuple[MasterWeights | None, Any]:
    """Master weights around everything else, which the kernel can read and write; and what is inside them."""
    if isinstance(update, MasterWeights):
        return update, update.inner.update
    return None, update
