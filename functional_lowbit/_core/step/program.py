"""A transformation taken apart: the sequence of operations that the compiled step goes through.

The tree of parts is flattened. Elementwise leaf functions that follow each other are fused into one kernel; what looks
at whole trees, or is not known from the inside, stands between.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from functional_lowbit import _optree
from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._core.state.observing import Observing
from functional_lowbit._core.state.parts import Composite, Gated, HostGated, Renewing, Widening
from functional_lowbit._optree import Tree


@dataclass(frozen=True)
class Behind:
    """The gates that an operation stands behind, and where its moments rest."""

    gates: tuple[int, ...] = ()  # it takes effect if all of these are open, which kernels are told in numbers
    hosts: tuple[int, ...] = ()  # it is run at all if all of these are open, which the host decides
    resting: Any = None  # the part that keeps moments on the CPU, see `parts.Composite`; None: none does


@dataclass(frozen=True)
class Op:
    """One operation."""

    part: Any  # what is run
    behind: Behind


class RuleOp(Op):
    """An elementwise leaf function, which is run by kernels."""

    @property
    def rule(self) -> Leafwise:
        """The leaf function."""
        return self.part


class LeafOp(RuleOp):
    """One elementwise leaf function."""


@dataclass(frozen=True)
class HostGateOp(RuleOp):
    """An elementwise leaf function, and behind it a gate that the host opens or keeps closed; a `HostGated` part."""

    host: int

    @property
    def rule(self) -> Leafwise:
        """The leaf function."""
        return self.part.rule


@dataclass(frozen=True)
class GateOp(Op):
    """A decision, for the whole tree, whether the operations behind the gate take effect; a `Gated` part."""

    gate: int


class ObserveOp(Op):
    """A look at updates, state and parameters, at some steps; an `Observing` part."""


class RenewOp(Op):
    """Numbers of this step, of which the operations behind it are made; a `Renewing` part."""


class OpaqueOp(Op):
    """An update function that is called as it is: nothing is known of it, or it reduces or needs whole leaves."""


@dataclass(frozen=True)
class Program:
    """The operations of one part, and the parts inside it in the same order."""

    update: Any
    own: Op | None  # what this part does itself, in front of the inner programs
    inner: "tuple[Program, ...]" = ()
    numbers: tuple[float, ...] | None = None  # that the inner program was last made with, behind a `RenewOp`

    @property
    def widening(self) -> Widening | None:
        """What is around everything else, if it widens parameters for what is inside, and that was taken apart."""
        return self.update if isinstance(self.update, Widening) and self.own is None else None

    def ops(self) -> Iterator[Op]:
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

    def active(self, params: Tree, treedef: _optree.TreeDef) -> Iterator[list[bool]]:
        """For each operation, which leaves of the parameters it sees; masks take leaves away."""
        yield from self._active(params, _seen(params, treedef), treedef)

    def _active(self, params: Tree, seen: list[bool], treedef: _optree.TreeDef) -> Iterator[list[bool]]:
        if self.own is not None:
            yield seen
        if self.inner:
            narrowed = self.update.narrow(params)
            if narrowed is not params:
                seen = _seen(narrowed, treedef)
            for program in self.inner:
                yield from program._active(narrowed, seen, treedef)


def _seen(params: Tree, treedef: _optree.TreeDef) -> list[bool]:
    """Which leaves of a structure a narrowed tree still has."""
    return [_optree.is_leaf(x) for x in _optree.flatten_up_to(treedef, params)]


def lower(update: Any) -> Program:
    """Take an update function apart."""
    return _lower_(update, Behind(), [0, 0], is_outermost=True)


def _lower_(update: Any, behind: Behind, counters: list[int], is_outermost: bool = False) -> Program:
    if isinstance(update, Leafwise) and update.check_declaration() and update.elementwise:
        return Program(update, LeafOp(update, behind))
    if not isinstance(update, Composite) or (isinstance(update, Widening) and not is_outermost):
        return Program(update, OpaqueOp(update, behind))
    own: Op | None = None
    outside, before = behind, list(counters)
    if isinstance(update, Gated):
        own = GateOp(update, behind, counters[0])
        behind = replace(behind, gates=(*behind.gates, counters[0]))
        counters[0] += 1
    elif isinstance(update, HostGated):
        own = HostGateOp(update, behind, counters[1])
        behind = replace(behind, hosts=(*behind.hosts, counters[1]))
        counters[1] += 1
    elif isinstance(update, Observing):
        own = ObserveOp(update, behind)
    elif isinstance(update, Renewing):
        own = RenewOp(update, behind)
    if update.offloads:
        behind = replace(behind, resting=update)
    inner = tuple(_lower_(tx.update, behind, counters) for tx in update.inner)
    if not update.sequential and any(
        isinstance(op, OpaqueOp) or (update.offloads and _looks_at_moments(op)) for p in inner for op in p.ops()
    ):
        # What a mask, a gate or low_bit does to an unknown update, only the wrapper itself can do.
        counters[:] = before  # kernels are told of gates by position
        return Program(update, OpaqueOp(update, outside))
    return Program(update, own, inner)


def _looks_at_moments(op: Op) -> bool:
    """Whether a function of whole trees is given the moments, and so needs all of them on one device."""
    return isinstance(op, RuleOp) and op.rule.prepare is not None and bool(op.rule.moments)
