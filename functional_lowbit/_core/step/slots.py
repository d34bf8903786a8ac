"""What a leaf kernel is made for, and the tensors that it is given: one list of slots that all who pass them go by."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._core.state.parts import Pairing
from functional_lowbit.formats import Codec


class Result(Enum):
    """What becomes of the updates."""

    APPLIED = "added to the parameters"
    KEPT = "handed to what comes next"
    DISCARDED = "taken for 0 from here on"


class Stage(NamedTuple):
    """One leaf function inside a kernel. Hyperparameters are not part of it: they arrive as numbers."""

    update_leaf: Callable[..., Any]
    state_class: Any
    moments: tuple[str, ...]
    codecs: tuple[Codec | None, ...]  # for each moment; None: it rests in float32
    scalars: tuple[str, ...]  # names, in the order in which the numbers arrive
    gates: tuple[int, ...]

    @classmethod
    def of(
        cls, rule: Leafwise, codecs: tuple[Codec | None, ...], scalars: tuple[str, ...], gates: tuple[int, ...]
    ) -> "Stage":
        """The stage of a leaf function whose moments rest in these formats."""
        return cls(rule.update_leaf, rule.state_class, tuple(rule.moments), codecs, scalars, gates)


class KernelKey(NamedTuple):
    """Two leaves with equal keys share one compiled kernel, whatever their shapes and hyperparameters."""

    stages: tuple[Stage, ...]
    n_gates: int
    result: Result
    stochastic: bool  # round the new parameter stochastically, see `rounding`
    pairing: Pairing | None  # how the parameter is read and written with the tensor beside it; None: there is none
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device

    @property
    def apply(self) -> bool:
        """Whether the update is added to the parameter."""
        return self.result is Result.APPLIED

    @property
    def blocked(self) -> bool:
        """Whether tensors are [n_blocks, block], with a row for each block; else they are flat, [n]."""
        return self.stochastic or any(c is not None and c.parts == 2 for s in self.stages for c in s.codecs)


class Slot(NamedTuple):
    """One argument of a kernel. Its name is one of those below, or that of a moment."""

    name: str
    dtype: torch.dtype
    kind: str  # "element": one number for each of the leaf's; "code": the same, by whole blocks; "block": one for each
    # block; "leaf": one for the leaf; "scalars": a vector for all leaves
    stage: int | None = None  # whose moment it is, or a part of one
    packed: bool = False  # two codes of 4 bits in a byte
    zero: float = 0.0  # what it holds where the leaf is 0
    read: bool = True  # else it is only written
    written: bool = False

    UPDATE, PARAM = "update", "param"  # what comes from outside, and may be any tensor
    SCALARS = "scalars"  # the numbers that all leaves share, see `numbers_of`
    LENGTHS = "lengths"  # elements of each block that are not padding
    NOISE = ("noise.low", "noise.high", "noise.counter")  # `rounding.Words` of the first element of each block
    BESIDE = "beside"  # what a `Widening` keeps beside the parameter
    OUT = "out"  # takes the new update, where that is kept
    ONE = "one"  # the first of the scalars: 1, the same for all

    @property
    def shaped(self) -> bool:
        """Whether it has the leaf's shape."""
        return self.kind == "element"


def slots_of(key: KernelKey, lengths: bool = False) -> tuple[Slot, ...]:
    """A kernel's arguments, in order.

    Args:
        key: What the kernel is made for.
        lengths: Whether it is told which elements of a block are padding; else it is not given them.
    """
    slots = [
        Slot(Slot.UPDATE, key.grad_dtype, "element"),
        Slot(Slot.PARAM, key.param_dtype, "element", written=key.apply),
        Slot(Slot.SCALARS, torch.float32, "scalars", zero=1.0),
    ]
    for i, stage in enumerate(key.stages):
        for field, codec in zip(stage.moments, stage.codecs, strict=True):
            slots += _of_moment(i, field, codec)
    if lengths:
        slots.append(Slot(Slot.LENGTHS, torch.int32, "block"))
    if key.stochastic:
        low, high, counter = Slot.NOISE
        slots += [Slot(x, torch.int32, kind) for x, kind in ((low, "leaf"), (high, "leaf"), (counter, "block"))]
    if key.pairing is not None:
        slots.append(Slot(Slot.BESIDE, key.pairing.dtype, "element", written=key.apply))
    if key.result is Result.KEPT:
        slots.append(Slot(Slot.OUT, torch.float32, "element", read=False, written=True))
    return tuple(slots)


def _of_moment(stage: int, field: str, codec: Codec | None) -> list[Slot]:
    name, scales = moment_names(stage, field)
    if codec is None:
        return [Slot(name, torch.float32, "element", stage, written=True)]
    if codec.zero_scale is None:
        return [Slot(name, codec.dtype, "element", stage, zero=codec.zero_code, written=True)]
    return [
        Slot(name, codec.dtype, "code", stage, codec.packing == 2, codec.stored_zero, written=True),
        Slot(scales, torch.float32, "block", stage, zero=codec.zero_scale, written=True),
    ]


def moment_names(stage: int, field: str) -> tuple[str, str]:
    """The names of a moment's slots: its one tensor or its codes, and its scales."""
    return f"{stage}.{field}", f"{stage}.{field}.scales"


def written(slots: Iterable[Slot]) -> list[Slot]:
    """The slots that a kernel writes, in the order of its results: the parameter, made of all else, is the last."""
    return sorted((slot for slot in slots if slot.written), key=lambda slot: slot.name == Slot.PARAM)


def of_leaf(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """The slots that are filled for each leaf."""
    return tuple(slot for slot in slots if slot.kind != "scalars")


def filled(slots: Sequence[Slot], tensors: Iterable[Tensor], **known: Tensor) -> list[Tensor]:
    """A kernel's arguments: those that are known by name, and the others in order."""
    others = iter(tensors)
    return [known[slot.name] if slot.name in known else next(others) for slot in slots]


def numbers_of(key: KernelKey) -> list[Any]:
    """The scalars in order: a 1, the gates by number (1 open, 0 closed), and each stage's by stage and name."""
    return [Slot.ONE, *range(key.n_gates), *((i, name) for i, stage in enumerate(key.stages) for name in stage.scalars)]
