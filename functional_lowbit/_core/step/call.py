"""One step on its way: where the updates are by now, and what is still to be run on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.leafwise.rule import Shared
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._core.step.backends import Kernels
from functional_lowbit._core.step.plan import Plan
from functional_lowbit._core.step.program import RenewOp, RuleOp
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import local_of, wrap


@dataclass
class Call:
    """What changes while a step is made, and what is known of this one only."""

    plan: Plan
    kernels: Kernels
    updates: list[Any]  # as given, or this rank's part of each; None where a leaf is skipped
    extra: dict[str, Any]
    hypers: dict[int, Any]  # of each leaf operation
    moved: dict[int, Any]  # the new state of each `RenewOp`
    pending: list[list[int]]  # for each leaf, operations that are to be run on it, in order
    as_given: bool = True  # whether updates are as given
    zero: set[int] = field(default_factory=set)  # leaves whose update is 0, whatever `updates` has
    shared: dict[int, Shared] = field(default_factory=dict)  # of each leaf operation
    gates: dict[int, Tensor] = field(default_factory=dict)  # bool[] of each `GateOp`
    closed: set[int] = field(default_factory=set)  # gates that the host keeps closed
    missed: dict[int, list[int]] = field(default_factory=dict)  # of each `HostGateOp`, leaves without an update
    states: dict[int, Any] = field(default_factory=dict)  # the new state of each operation that has made one
    written: bool = False  # whether something has been written in place

    def begin_to_write(self) -> None:
        """Note it: whatever could be refused, or fail to compile or to find memory, has had its chance."""
        self.written = True

    def update_tree(self, active: Sequence[bool] | None = None, prepare: Any = None) -> Tree:
        """The updates as the user would see them; None at leaves that are skipped or not active.

        For `prepare`, those of widened parameters are in float32, as their update would see them, if that makes a
        difference to it.
        """
        self.fill(range(len(self.updates)) if active is None else [i for i, a in enumerate(active) if a])
        wide = prepare is not None and not getattr(prepare, "any_dtype", False)
        leaves = []
        for u, spec, beside in zip(self.updates, self.plan.params.specs, self.plan.beside, strict=True):
            u = u if u is None or self.as_given else wrap(u, spec)
            leaves.append(u if u is None or beside is None or not wide else u.float())
        return self.plan.params.like(leaves, active)

    def take(self, updates: Sequence[Any]) -> None:
        """Go on with these updates, sharded like their parameters: what looks at them next may be a global norm."""
        both = zip(updates, self.plan.params.given, strict=True)
        self.updates = [None if u is None else as_sharded(u, p)[0] for u, p in both]
        self.as_given = True
        self.zero.clear()

    def fill(self, leaves: Iterable[int]) -> None:
        """Write zeros where a leaf's update is 0, since something looks at it."""
        for i in self.zero.intersection(leaves):
            self.localize()
            local = self.plan.params.locals[i]
            self.updates[i] = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
            self.zero.discard(i)

    def localize(self) -> None:
        """Go over to this rank's part of each update."""
        if self.as_given:
            self.updates = [None if u is None else local_of(u) for u in self.updates]
            self.as_given = False


def begin(
    plan: Plan, kernels: Kernels, state: Any, updates: list[Any], extra: dict[str, Any], moved: Sequence[Any]
) -> Call:
    """Take up the numbers of a step. `updates` are the gradients, `moved` has the new state of each `RenewOp`."""
    if plan.noise is not None:
        plan.noise.begin(state, plan.params.paths)
    hypers = {i: op.rule.hyper(plan.states[i]) for i, op in enumerate(plan.ops) if isinstance(op, RuleOp)}
    renewing = [i for i, op in enumerate(plan.ops) if isinstance(op, RenewOp)]
    pending: list[list[int]] = [[] for _ in updates]
    return Call(plan, kernels, updates, extra, hypers, dict(zip(renewing, moved, strict=True)), pending)
