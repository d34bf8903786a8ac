"""The beginning of a compiled step: everything is looked at before anything is written."""

from collections.abc import Sequence
from typing import Any

from functional_lowbit import _optree
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.donate import storages
from functional_lowbit._core.state.masters import MasterWeights, MasterWeightsState
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.step.noise import Noise
from functional_lowbit._core.step.program import HostGateOp, LeafOp, OpaqueOp, Program, RenewOp
from functional_lowbit._core.step.renewal import at
from functional_lowbit._core.step.run import Run
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, local_of


@speaking("compile(tx)")
def begin(
    program: Program,
    master: MasterWeights | None,
    grads: Tree,
    state: Any,
    params: Tree,
    extra: dict[str, Any],
    *,
    donate: bool,
    backend: str | None,
    noise: Noise | None,
) -> Run:
    """The call's trees as lists of leaves, after a look at all of them.

    Args:
        program: Of the transformation, or of what is inside the master weights around it.
        master: The master weights around everything else.
        grads: As the user gave them, and so on.
        state: Of the transformation, its master weights included.
        params: Of the model.
        extra: The extra arguments.
        donate: Whether params and state will be written to.
        backend: Who makes kernels.
        noise: Of stochastic rounding.

    Raises:
        TypeError, ValueError: for trees that do not fit each other, and for hyperparameters that are not finite.
        RuntimeError: for a state that an interrupted step has left half-updated.
    """
    leaves, treedef = _optree.flatten(params)
    paths = _optree.names(treedef)
    fits.params(paths, leaves)
    updates = fits.same_structure("grads", treedef, grads)
    fits.updates(paths, updates, leaves)
    codes: list[Any] = [None] * len(leaves)
    inner = state
    if master is not None:
        fits.state_class(state, MasterWeightsState)
        codes = fits.same_structure("state.error", treedef, state.error)
        master.check_codes(paths, leaves, codes)
        inner = state.inner_state
    moved: list[Any] = []
    program = at(program, inner, moved)
    ops, states, active = list(program.ops()), list(program.states(inner)), list(program.active(params, treedef))
    hypers: list[Any] = []
    moments: list[list[tuple[Any, ...]]] = []
    for op, op_state, seen in zip(ops, states, active, strict=True):
        if isinstance(op, (LeafOp, HostGateOp)):
            moments.append(_moments(op, op_state, seen, treedef, paths, leaves))
            hypers.append(op.rule.hyper(op_state))
        else:
            moments.append([])
            hypers.append(None)
    locals_ = [local_of(p) for p in leaves]
    if donate:
        fits.apart(paths, locals_)
        if any(isinstance(op, OpaqueOp) for op in ops) and not storages(inner).isdisjoint(storages(locals_)):
            raise WrongValue(
                "the state shares memory with the parameters, which are donated; copy them in init, or compile with "
                "donate=False"
            )
    if noise is not None:
        noise.begin(inner, paths)
    return Run(
        program=program,
        ops=ops,
        master_bits=0 if master is None else master.bits,
        master_resting=None if master is None else master.resting,
        backend=backend,
        treedef=treedef,
        params=leaves,
        specs=[ShardSpec.of(p) for p in leaves],
        locals=locals_,
        updates=updates,
        codes=codes,
        active=active,
        states=states,
        moments=moments,
        hypers=hypers,
        moved=dict(zip([i for i, op in enumerate(ops) if isinstance(op, RenewOp)], moved, strict=True)),
        extra=extra,
        pending=[[] for _ in leaves],
        noise=noise,
    )


def _moments(
    op: LeafOp | HostGateOp,
    state: Any,
    seen: Sequence[bool],
    treedef: _optree.TreeDef,
    paths: Sequence[str],
    leaves: Sequence[Any],
) -> list[tuple[Any, ...]]:
    """Each leaf's moments, in the rule's order."""
    rule = op.rule
    fits.state_class(state, rule.state_class)
    fields = []
    for name in rule.moments:
        values = fits.same_structure(f"state.{name}", treedef, getattr(state, name))
        for path, leaf, value, is_seen in zip(paths, leaves, values, seen, strict=True):
            if is_seen:
                fits.moment_shape(name, path, leaf, value, op.behind.resting is not None)
        fields.append(values)
    moments = list(zip(*fields, strict=True)) if fields else [()] * len(leaves)
    for path, each in zip(paths, moments, strict=True):
        sizes = {m.block_size for m in each if isinstance(m, QuantizedTensor) and m.format.scaled}
        if len(sizes) > 1:
            raise WrongValue(
                f"the moments of {rule.name} at {path!r} have block sizes {' and '.join(map(str, sorted(sizes)))}; "
                "give the low_bits around it one block_size",
                path,
            )
    return moments
