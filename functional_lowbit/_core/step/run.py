"""One call of a compiled step: its trees as lists of leaves, and what is known of each leaf."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.leafwise.rule import Shared
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._core.state.masters import master_of
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.step.noise import HALF, Noise
from functional_lowbit._core.step.program import Op, Program
from functional_lowbit._optree import Tree
from functional_lowbit.formats._grid import Grid
from functional_lowbit.sharding import ShardSpec, local_of, wrap


@dataclass
class Run:
    """One call of the step: the trees as lists of leaves."""

    program: Program  # with this call's numbers
    ops: list[Op]
    master_bits: int  # of the codes; 0 where there are none
    master_resting: Any  # the part that keeps the codes on the CPU; None: they are with the parameters
    backend: str | None
    treedef: _optree.TreeDef
    params: list[Tensor]  # as given
    specs: list[ShardSpec | None]
    locals: list[Tensor]  # this rank's part of each parameter
    updates: list[Any]  # as given, or this rank's part; None where a leaf is skipped
    codes: list[Any]  # for each leaf, the error bits of its master weights, as given; None if it has none
    active: list[list[bool]]  # for each operation, for each leaf
    states: list[Any]  # of each operation
    moments: list[list[tuple[Any, ...]]]  # of each leaf operation, for each leaf
    hypers: list[Any]  # of each leaf operation
    moved: dict[int, Any]  # the new state of each `RenewOp`
    extra: dict[str, Any]
    pending: list[list[int]]  # for each leaf, operations that are to be run on it, in order
    as_given: bool = True  # whether updates are as given
    shared: dict[int, Shared] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)  # gates that the host keeps closed
    missed: dict[int, list[int]] = field(default_factory=dict)  # of each `HostGateOp`, leaves without an update
    zero: set[int] = field(default_factory=set)  # leaves whose update is 0, whatever `updates` has
    noise: Noise | None = None
    written: bool = False  # whether something has been written in place

    def begin_to_write(self) -> None:
        """Note it: whatever could be refused, or fail to compile or to find memory, has had its chance."""
        self.written = True

    def rounds(self, i: int) -> bool:
        """Whether a leaf's new parameters are rounded stochastically."""
        return self.noise is not None and self.locals[i].dtype in HALF and self.codes[i] is None

    def update_tree(self, active: list[bool] | None = None, prepare: Any = None) -> Tree:
        """The updates as the user would see them; None at leaves that are skipped or not active.

        For `prepare`, those of master weights are in float32, as their update would see them, if that makes a
        difference to it.
        """
        self.fill(range(len(self.updates)) if active is None else [i for i, a in enumerate(active) if a])
        leaves = []
        wide = prepare is not None and not getattr(prepare, "any_dtype", False)
        for i, u in enumerate(self.updates):
            if u is None or (active is not None and not active[i]):
                leaves.append(None)
            else:
                u = u if self.as_given else wrap(u, self.specs[i])
                leaves.append(u.float() if wide and self.codes[i] is not None else u)
        return _optree.unflatten(self.treedef, leaves)

    def param_tree(self, active: list[bool] | None = None) -> Tree:
        """The parameters as given, or their masters; None at leaves that are not active."""
        leaves = [p if c is None else master_of(p, c) for p, c in zip(self.params, self.codes, strict=True)]
        if active is not None:
            leaves = [p if a else None for p, a in zip(leaves, active, strict=True)]
        return _optree.unflatten(self.treedef, leaves)

    def take(self, updates: list[Any]) -> None:
        """Go on with these updates, sharded like their parameters: what looks at them next may be a global norm."""
        self.updates = [None if u is None else as_sharded(u, p)[0] for u, p in zip(updates, self.params, strict=True)]
        self.as_given = True
        self.zero.clear()

    def fill(self, leaves: Iterable[int]) -> None:
        """Write zeros where a leaf's update is 0, since something looks at it."""
        for i in self.zero.intersection(leaves):
            self.localize()
            self.updates[i] = torch.zeros(self.locals[i].shape, dtype=torch.float32, device=self.locals[i].device)
            self.zero.discard(i)

    def localize(self) -> None:
        """Go over to this rank's part of each update."""
        if self.as_given:
            self.updates = [None if u is None else local_of(u) for u in self.updates]
            self.as_given = False


def codec_of(moment: Any) -> Any:
    """The codec of a stored moment; None for float32."""
    return moment.format.codec(moment.layout.signed) if isinstance(moment, QuantizedTensor) else None


def shapes_of(codec: Any) -> tuple[bool, ...]:
    """For each tensor of a moment, whether it has the leaf's shape."""
    return (True,) if codec is None or codec.parts == 1 else (False, False)


def block_size_of(moments: tuple[Any, ...]) -> int | None:
    """The block size of a leaf's moments; None if none has scales."""
    return next((m.block_size for m in moments if isinstance(m, QuantizedTensor) and m.format.scaled), None)


def grid_of_moments(run: Run, ops: tuple[int, ...], i: int) -> Grid | None:
    """The grid of a leaf's moments; None if none has scales."""
    for j in ops:
        for moment in run.moments[j][i]:
            if isinstance(moment, QuantizedTensor) and moment.format.scaled:
                return moment.layout.local_grid()
    return None


def vector(scalars: list[Tensor], device: torch.device) -> Tensor:
    """0-d tensors, wherever they are, as one float32 vector on a device."""
    if all(x.device == scalars[0].device for x in scalars):
        return torch.stack(scalars).to(device)
    return torch.stack([x.to(device) for x in scalars])
