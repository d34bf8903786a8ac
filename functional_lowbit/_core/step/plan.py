"""What a step knows before it begins: parameters, state and operations, all of it looked at and none written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.donate import storages
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor
from functional_lowbit._core.step.noise import HALF, Noise
from functional_lowbit._core.step.program import OpaqueOp, Program, RuleOp
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats import Codec
from functional_lowbit.formats._grid import Grid
from functional_lowbit.sharding import ShardSpec, local_of


@dataclass(frozen=True)
class Params:
    """A tree of parameters as lists of leaves."""

    tree: Tree
    treedef: _optree.TreeDef
    paths: Sequence[str]
    given: Sequence[Tensor]
    locals: Sequence[Tensor]  # this rank's part of each
    specs: Sequence[ShardSpec | None]

    @classmethod
    def of(cls, tree: Tree) -> "Params":
        """The parameters, looked at."""
        leaves, treedef = _optree.flatten(tree)
        paths = _optree.names(treedef)
        fits.params(paths, leaves)
        return cls(tree, treedef, paths, leaves, [local_of(p) for p in leaves], [ShardSpec.of(p) for p in leaves])

    @speaking("compile(tx)")
    def updates(self, what: str, tree: Tree) -> list[Any]:
        """Updates for them, looked at; None where there is none."""
        updates = fits.same_structure(what, self.treedef, tree)
        fits.updates(self.paths, updates, self.given)
        return updates

    def like(self, leaves: Sequence[Any], active: Sequence[bool] | None = None) -> Tree:
        """Leaves as a tree of the same structure; None at those that are not active."""
        if active is not None:
            leaves = [x if is_active else None for x, is_active in zip(leaves, active, strict=True)]
        return _optree.unflatten(self.treedef, leaves)


class Moments(NamedTuple):
    """What an operation keeps of a leaf."""

    kept: tuple[Any, ...] = ()  # the moments as they rest, in the rule's order
    codecs: tuple[Codec | None, ...] = ()  # how each is written; None: in float32
    layout: Layout | None = None  # of the first with blocks, and so of all of those; None: none has blocks

    @classmethod
    def of(cls, kept: tuple[Any, ...]) -> "Moments":
        """Those that rest so."""
        stored = [m.layout if isinstance(m, QuantizedTensor) else None for m in kept]
        codecs = tuple([None if x is None else x.format.codec(x.signed) for x in stored])
        return cls(kept, codecs, next((x for x in stored if x is not None and x.format.scaled), None))

    def tensors(self) -> list[Tensor]:
        """This rank's part of all of them, in the order of a kernel's slots."""
        found: list[Tensor] = []
        for moment in self.kept:
            if isinstance(moment, QuantizedTensor):
                found += [x for x in moment.local_blocks() if x is not None]
            else:
                found.append(local_of(moment))
        return found


@dataclass(frozen=True)
class Plan:
    """The operations of a step, with the state of each and what each keeps of each leaf.

    It holds for these parameters and this state, whatever the gradients are.
    """

    program: Program
    params: Params
    beside: Sequence[Tensor | None]  # what the program's `Widening` keeps beside each parameter, as it rests
    ops: Sequence[Any]  # of the program
    states: Sequence[Any]  # of each operation
    active: Sequence[Sequence[bool]]  # for each operation, which leaves it sees
    moments: Sequence[Sequence[Moments]]  # for each leaf operation, of each leaf
    noise: Noise | None  # of stochastic rounding

    def seen(self, i: int) -> list[int]:
        """The leaves that an operation sees."""
        return [k for k, is_active in enumerate(self.active[i]) if is_active]

    def param_tree(self, active: Sequence[bool] | None = None) -> Tree:
        """The parameters as the operations see them; None at leaves that are not active."""
        given, widening = self.params.given, self.program.widening
        if widening is not None:
            given = [widening.widened(p, beside) for p, beside in zip(given, self.beside, strict=True)]
        return self.params.like(given, active)

    def layout(self, ops: Sequence[int], leaf: int) -> Layout | None:
        """The blocks of a leaf in some operations, the first that has any; None if none has."""
        for i in ops:
            layout = self.moments[i][leaf].layout
            if layout is not None:
                return layout
        return None

    def grid(self, ops: Sequence[int], leaf: int) -> Grid | None:
        """The blocks of this rank's part of a leaf, in operations that share them; None if there are none."""
        layout = self.layout(ops, leaf)
        return None if layout is None else layout.local_grid()

    def rounds(self, leaf: int) -> bool:
        """Whether new parameters are rounded stochastically; beside others lies what rounding takes from them."""
        return self.noise is not None and self.params.locals[leaf].dtype in HALF and self.beside[leaf] is None


def make_plan(program: Program, params: Params, state: Any, noise: Noise | None, donate: bool) -> Plan:
    """Look at a state, and at what it shares with the parameters."""
    given, treedef, widening = params.given, params.treedef, program.widening
    beside = [None] * len(given) if widening is None else widening.beside(treedef, given, state)
    ops, states, active = list(program.ops()), list(program.states(state)), list(program.active(params.tree, treedef))
    moments = [
        _moments(op, op_state, is_active, params) if isinstance(op, RuleOp) else []
        for op, op_state, is_active in zip(ops, states, active, strict=True)
    ]
    if donate:
        fits.distinct(params.paths, params.locals)
        if any(isinstance(op, OpaqueOp) for op in ops) and not storages(state).isdisjoint(storages(params.locals)):
            raise WrongValue(
                "the state shares memory with the parameters, which are donated; copy them in init, or compile with "
                "donate=False"
            )
    return Plan(program, params, beside, ops, states, active, moments, noise)


def _moments(op: RuleOp, state: Any, active: Sequence[bool], params: Params) -> list[Moments]:
    """What an operation keeps of each leaf."""
    rule, paths = op.rule, params.paths
    fits.state_class(state, rule.state_class)
    fields = []
    for name in rule.moments:
        values = fits.same_structure(f"state.{name}", params.treedef, getattr(state, name))
        for path, leaf, value, is_active in zip(paths, params.given, values, active, strict=True):
            if is_active:
                fits.moment_shape(name, path, leaf, value, op.behind.resting is not None)
        fields.append(values)
    if not fields:
        return [Moments()] * len(paths)
    moments = [Moments.of(kept) for kept in zip(*fields, strict=True)]
    for path, each in zip(paths, moments, strict=True):
        if each.layout is None or len(each.kept) < 2:
            continue
        sizes = {m.block_size for m in each.kept if isinstance(m, QuantizedTensor) and m.format.scaled}
        if len(sizes) > 1:
            raise WrongValue(
                f"the moments of {rule.name} at {path!r} have block sizes {' and '.join(map(str, sorted(sizes)))}; "
                "give the low_bits around it one block_size",
                path,
            )
    return moments
