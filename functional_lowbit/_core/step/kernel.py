"""The leaf kernel: one function for a run of leaf functions, over blocks of any leaf.

It is given plain tensors only and writes into them.
"""

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.leafwise.rule import check_leaf, check_pair
from functional_lowbit._core.leafwise.scalars import record
from functional_lowbit._core.step.slots import (
    KernelKey,
    Result,
    Slot,
    Stage,
    moment_names,
    numbers_of,
    slots_of,
    written,
)
from functional_lowbit.formats import Codec
from functional_lowbit.rounding import bits, stochastic_round

_serial = itertools.count()


def make_compute(key: KernelKey, in_place: bool) -> Callable[..., list[Tensor]]:
    """`compute(*those of its slots that are read) -> [new value of each written one]`, pure.

    Args:
        key: What the kernel is made for.
        in_place: Whether what is returned may be written to the arguments value by value, 4-bit codes come two in a
            byte, and blocks are padded to one length. Else all arguments are read before anything is written, each code
            has a byte of its own, and no block is padded.
    """
    slots = slots_of(key, lengths=in_place and key.blocked)
    reads, writes = [slot.name for slot in slots if slot.read], [slot.name for slot in written(slots)]
    at = {number: i for i, number in enumerate(numbers_of(key))}
    stages = [_Stage(i, stage, in_place) for i, stage in enumerate(key.stages)]

    def compute(*arguments: Tensor) -> list[Tensor]:
        given = dict(zip(reads, arguments, strict=True))
        g, p, scalars = given[Slot.UPDATE], given[Slot.PARAM], given[Slot.SCALARS]
        one = scalars[at[Slot.ONE]] if in_place else None
        is_open = [scalars[at[gate]] > 0 for gate in range(key.n_gates)]
        u, p32 = g.float(), _read(p, one)
        if key.pairing is not None:
            p32 = key.pairing.read(p, given[Slot.BESIDE])
        lane = torch.arange(g.shape[-1], dtype=torch.int32, device=g.device)
        real = lane < given[Slot.LENGTHS] if Slot.LENGTHS in given else None
        new: dict[str, Tensor] = {}
        for stage in stages:
            old = stage.read(given, g.shape[-1], one)
            c = stage.record(*[scalars[at[number]] for number in stage.numbers])
            u, moments = stage.call(u, old, p32, c)
            gates = [is_open[gate] for gate in stage.gates]
            for gate in gates:
                u = torch.where(gate, u, 0.0)
            new.update(stage.write(given, old, moments, gates, real))
        if key.result is Result.KEPT:
            new[Slot.OUT] = u
        elif key.apply and key.pairing is not None:
            new[Slot.PARAM], new[Slot.BESIDE] = key.pairing.write(p, given[Slot.BESIDE], p32 + u)
        elif key.apply:
            total = p.to(torch.promote_types(p.dtype, torch.float32)) + u
            if key.stochastic:
                low, high, counter = (given[name] for name in Slot.NOISE)
                total = stochastic_round(total, p.dtype, bits(low, high, counter + lane))
            new[Slot.PARAM] = total.to(p.dtype)
        return [new[name] for name in writes]

    return compute


def _read(x: Tensor, one: Tensor | None) -> Tensor:
    """A float32 copy of an argument.

    A leaf function may return what it was given, as another moment or as the update. Where the buffer could be written
    before that is read, a product with 1 keeps it whole; inductor would remove a clone.
    """
    return x.float() if one is None else x.float() * one


class _Stage:
    """A stage of a kernel at work, on arguments by name."""

    def __init__(self, i: int, stage: Stage, in_place: bool):
        self.stage, self.in_place = stage, in_place
        self.gates = stage.gates
        self.record = record(stage.scalars)
        self.numbers = [(i, name) for name in stage.scalars]
        self.moments: list[tuple[str, Codec | None, str, str]] = [
            (field, codec, *moment_names(i, field)) for field, codec in zip(stage.moments, stage.codecs, strict=True)
        ]

    def read(self, given: dict[str, Tensor], block: int, one: Tensor | None) -> dict[str, Tensor]:
        """The moments in float32."""
        values = {}
        for field, codec, name, scales in self.moments:
            if codec is None:
                values[field] = _read(given[name], one)
            elif self.in_place:
                values[field] = codec.read(given[name], given.get(scales), block)
            else:
                values[field] = codec.decode(given[name], given.get(scales))
        return values

    def call(self, u: Tensor, moments: dict[str, Tensor], p: Tensor, c: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The leaf function: the new update and the new moments."""
        function, state_class = self.stage.update_leaf, self.stage.state_class
        state = state_class(**{**dict.fromkeys(state_class._fields), **moments})
        new_u, new_state = check_pair(function, state_class, function(u, state, p, c))
        new = {field: getattr(new_state, field) for field in self.stage.moments}
        check_leaf(function, u, new_u, new)
        return new_u, new

    def write(
        self,
        given: dict[str, Tensor],
        old: dict[str, Tensor],
        new: dict[str, Tensor],
        gates: list[Tensor],
        real: Tensor | None,
    ) -> dict[str, Tensor]:
        """The new moments as they rest, or the old ones where a gate is closed; `real` is False at padding."""
        outs = {}
        for field, codec, name, scales in self.moments:
            value, kept = new[field], list(gates)
            if real is not None and codec is not None and codec.parts == 2:
                value = torch.where(real, value, 0.0)  # what a leaf function makes of padding is in no block
            if codec is not None and not codec.idempotent:
                kept.append((value != old[field]).any(dim=-1, keepdim=True))
            stored = (value, None) if codec is None else (codec.write if self.in_place else codec.encode)(value)
            for place, part in zip((name, scales), stored, strict=True):
                if part is None:
                    continue
                for condition in kept:
                    # Codes are kept, not decoded values: not every format writes what it read as the same code.
                    part = torch.where(condition, part, given[place])
                outs[place] = part
        return outs


def make_kernel(key: KernelKey) -> Callable[..., None]:
    """`kernel(*all of its slots)`, which writes what is computed into the arguments; blocks are told their lengths."""
    compute, slots = make_compute(key, in_place=True), slots_of(key, lengths=key.blocked)
    names, reads = [slot.name for slot in slots], [slot.name for slot in slots if slot.read]
    writes = [slot.name for slot in written(slots)]

    def kernel(*arguments: Tensor) -> None:
        given = dict(zip(names, arguments, strict=True))
        news = compute(*[given[name] for name in reads])
        for name, new in zip(writes, news, strict=True):
            given[name].copy_(new)

    # Dynamo keeps its caches by code object, and limits their length: each kernel needs a code object of its own.
    code = kernel.__code__.replace(co_name=f"leaf_kernel_{next(_serial)}")
    return FunctionType(code, kernel.__globals__, code.co_name, kernel.__defaults__, kernel.__closure__)


def example(key: KernelKey) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """Small arguments on which every rank compiles the same kernel, and the (argument, dimension) pairs that may vary.

    Compiling on the first leaf that comes would make the code depend on that leaf's shape, and so on the rank.
    """
    n, block = 96, 240  # unlike each other, so that they are not taken for one size
    shape = (n, block) if key.blocked else (n * block,)
    args: list[Tensor] = []
    varying: list[tuple[Tensor, int]] = []
    for slot in slots_of(key, lengths=key.blocked):
        shapes = {"element": shape, "code": (n, -(-block // (2 if slot.packed else 1)))}
        size = (len(numbers_of(key)),) if slot.kind == "scalars" else shapes.get(slot.kind, (n, 1))
        zero = block if slot.name == Slot.LENGTHS else slot.zero
        args.append(torch.full(size, zero, dtype=slot.dtype, device=key.device))
        if slot.kind != "scalars":
            varying.extend((args[-1], d) for d, length in enumerate(size) if length > 1)
    return args, varying
