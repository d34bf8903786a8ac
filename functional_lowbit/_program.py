"""A transformation taken apart: the sequence of leaf functions that the compiled step fuses.

The tree of parts is flattened into operations. A `LeafOp` is one elementwise leaf function; neighbours are fused. A
`GateOp` decides whether the operations behind it take effect. An `OpaqueOp` is anything whose inside is not known, or
that reduces or needs whole leaves; it runs by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from functional_lowbit import _tree
from functional_lowbit._base import Tree
from functional_lowbit._observing import Observing
from functional_lowbit._parts import Composite, Gated
from functional_lowbit._rule import Leafwise


@dataclass(frozen=True)
class LeafOp:
    """One elementwise leaf function."""

    rule: Leafwise
    gates: tuple[int, ...]  # it takes effect if all these gates are open


@dataclass(frozen=True)
class GateOp:
    """A decision, for the whole tree, whether the operations behind the gate take effect."""

    part: Gated
    gate: int
    gates: tuple[int, ...]


@dataclass(frozen=True)
class ObserveOp:
    """A look at updates, state and parameters, at some steps."""

    part: Observing
    gates: tuple[int, ...]


@dataclass(frozen=True)
class OpaqueOp:
    """An update function that is called as it is."""

    update: Any


Op: TypeAlias = LeafOp | GateOp | ObserveOp | OpaqueOp


@dataclass(frozen=True)
class Program:
    """The operations of one part, and the parts inside it in the same order."""

    update: Any
    own: Op | None  # a leaf function, an opaque update, or a gate or a look in front of the inner programs
    inner: "tuple[Program, ...]" = ()

    def ops(self) -> "Iterator[Op]":
        """All operations, in order."""
        if self.own is not None:
            yield self.own
        for program in self.inner:
            yield from program.ops()

    def states(self, state: Any) -> Iterator[Any]:
        """The state of each operation."""
        if self.own is not None:
            yield state
        if self.inner:
            for program, inner_state in zip(self.inner, self.update.split(state), strict=True):
                yield from program.states(inner_state)

    def rebuild(self, state: Any, new: Iterator[Any]) -> Any:
        """The whole state, from the new states of the operations."""
        if self.own is not None:
            state = next(new)
        if not self.inner:
            return state
        inner_states = self.update.split(state)
        return self.update.join(state, [p.rebuild(s, new) for p, s in zip(self.inner, inner_states, strict=True)])

    def active(self, params: Tree, treedef: _tree.TreeDef) -> Iterator[list[bool]]:
        """For each operation, which leaves of the parameters it sees; masks take leaves away."""
        if self.own is not None:
            yield [_tree.children(x) is None for x in _tree.flatten_up_to(treedef, params)]
        if self.inner:
            narrowed = self.update.narrow(params)
            for program in self.inner:
                yield from program.active(narrowed, treedef)


def lower(update: Any) -> Program:
    """Take an update function apart."""
    return _lower(update, (), [0])


def _lower(update: Any, gates: tuple[int, ...], counter: list[int]) -> Program:
    if isinstance(update, Leafwise) and update.check_declaration() and update.elementwise:
        return Program(update, LeafOp(update, gates))
    if not isinstance(update, Composite):
        return Program(update, OpaqueOp(update))
    own: Op | None = None
    if isinstance(update, Gated):
        own = GateOp(update, counter[0], gates)
        gates = (*gates, counter[0])
        counter[0] += 1
    elif isinstance(update, Observing):
        own = ObserveOp(update, gates)
    inner = tuple(_lower(tx.update, gates, counter) for tx in update.inner)
    if not update.sequential and any(isinstance(op, OpaqueOp) for program in inner for op in program.ops()):
        # What a mask, a gate or low_bit does to an unknown update, only the wrapper itself can do.
        return Program(update, OpaqueOp(update))
    return Program(update, own, inner)
