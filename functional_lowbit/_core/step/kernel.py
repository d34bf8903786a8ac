"""The leaf kernel: one function for a run of leaf functions, over blocks of any leaf.

It is given plain tensors only and writes into them.
"""

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.leafwise.returned import check_leaf, check_pair
from functional_lowbit._core.leafwise.scalars import record
from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit.formats import Codec
from functional_lowbit.formats._halves import CODE_DTYPES, read_master, step_to, write_master
from functional_lowbit.rounding import bits, stochastic_round


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
    apply: bool  # add the update to the parameter, or write it out
    stochastic: bool  # round the new parameter stochastically, see `rounding`
    master_bits: int  # 8 or 16: the parameter is half of its master, see `formats._halves`; 0: it is a whole number
    blocked: bool  # tensors of [n_blocks, block] with scales, or flat [n]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device
    discards: bool = False  # the update is not wanted, only the new moments are


_serial = itertools.count()


def make_compute(key: KernelKey, in_place: bool) -> Callable[..., list[Tensor]]:
    """`compute(g, p, scalars, *moments) -> [*new moments, new p or u, or nothing more]`, pure.

    `scalars` is float32[1 + n_gates + all stages' scalars]: a 1, then the gates (1 open, 0 closed), then the scalars.
    `moments` are, stage by stage and field by field, codes and scales, or the one unscaled tensor. In place and in
    blocks, the number of elements of each block follows, int32[n, 1]: the others are padding. For stochastic
    rounding, `rounding.Words` of each block's first element, int32[n, 1] each, follow them. For master weights, the
    codes of the errors follow; where the update is applied, the new codes come before the new p.

    Args:
        key: What the kernel is made for.
        in_place: Whether what is returned may be written to the arguments value by value, and 4-bit codes come two in
            a byte. Else all arguments are read before anything is written, and each code has a byte of its own.
    """
    n_gates = key.n_gates
    records = tuple(record(stage.scalars) for stage in key.stages)
    n_moments, padded = count_moments(key), in_place and key.blocked

    def read(x: Tensor, scalars: Tensor) -> Tensor:
        # A leaf function may return what it was given, as another moment or as the update. Where the buffer could be
        # written before that is read, a product with 1 keeps it apart; inductor would remove a clone.
        return x.float() * scalars[0] if in_place else x.float()

    def compute(g: Tensor, p: Tensor, scalars: Tensor, *rest: Tensor) -> list[Tensor]:
        is_open = [scalars[1 + i] > 0 for i in range(n_gates)]
        u, p32 = g.float(), read(p, scalars)
        if key.master_bits:
            p32 = read_master(p.float(), rest[-1], p.dtype)
        at, scalar_at = 0, 1 + n_gates
        lane = torch.arange(g.shape[-1], dtype=torch.int32, device=g.device)
        real = lane < rest[n_moments] if padded else None
        outs: list[Tensor] = []
        for (update_leaf, state_class, names, codecs, scalar_names, gates), c_class in zip(
            key.stages, records, strict=True
        ):
            fields: dict[str, Any] = dict.fromkeys(state_class._fields)
            places = []
            for name, codec in zip(names, codecs, strict=True):
                parts = list(rest[at : at + (1 if codec is None else codec.parts)])
                at += len(parts)
                places.append(parts)
                scales = parts[1] if len(parts) > 1 else None
                if codec is None:
                    fields[name] = read(parts[0], scalars)
                else:
                    fields[name] = (
                        codec.read(parts[0], scales, g.shape[-1]) if in_place else codec.decode(parts[0], scales)
                    )
            c = c_class(*[scalars[scalar_at + i] for i in range(len(scalar_names))])
            scalar_at += len(scalar_names)
            u, new = check_pair(update_leaf, state_class, update_leaf(u, state_class(**fields), p32, c))
            news = [getattr(new, name) for name in names]
            check_leaf(update_leaf, g, u, dict(zip(names, news, strict=True)))
            for gate in gates:
                u = torch.where(is_open[gate], u, 0.0)
            for name, parts, codec, value in zip(names, places, codecs, news, strict=True):
                if real is not None and codec is not None and codec.parts == 2:
                    value = torch.where(real, value, 0.0)  # what a leaf function makes of padding is in no block
                kept = [is_open[gate] for gate in gates]
                if codec is not None and not codec.idempotent:
                    kept.append((value != fields[name]).any(dim=-1, keepdim=True))
                written = (value, None) if codec is None else (codec.write if in_place else codec.encode)(value)
                for place, part in zip(parts, written, strict=False):
                    assert part is not None
                    for condition in kept:
                        # Codes are kept, not decoded values: not every format writes what it read as the same code.
                        part = torch.where(condition, part, place)
                    outs.append(part)
        if key.discards:
            return outs
        if key.apply and key.master_bits:
            u, codes = step_to(p, *write_master(p32 + u, p.dtype, key.master_bits))
            outs.append(codes)
        if key.apply:
            u = p.to(torch.promote_types(p.dtype, torch.float32)) + u
        if key.stochastic:
            low, high, counter = rest[n_moments + padded : n_moments + padded + 3]
            noise = bits(low, high, counter + lane)
            u = stochastic_round(u, p.dtype, noise)
        return [*outs, u.to(p.dtype) if key.apply else u]

    return compute


def count_moments(key: KernelKey) -> int:
    """How many tensors the moments rest in."""
    return sum(1 if codec is None else codec.parts for stage in key.stages for codec in stage.codecs)


def make_kernel(key: KernelKey) -> Callable[..., None]:
    """`kernel(g, p, scalars, *rest)`; if updates are neither applied nor discarded, an `out` for them is the last.

    The arguments are those of `compute`. Moments, and `p` or `out`, are written.
    """
    compute, apply, n_moments = make_compute(key, in_place=True), key.apply, count_moments(key)
    has_out = not (apply or key.discards)

    def kernel(g: Tensor, p: Tensor, scalars: Tensor, *rest: Tensor) -> None:
        places = list(rest[:n_moments])
        places += [*rest[-1:], p] if apply and key.master_bits else [p] if apply else rest[-1:] if has_out else []
        for place, new in zip(places, compute(g, p, scalars, *(rest[:-1] if has_out else rest)), strict=True):
            place.copy_(new)

    # Dynamo keeps its caches by code object, and limits their length: each kernel needs a code object of its own.
    code = kernel.__code__.replace(co_name=f"leaf_kernel_{next(_serial)}")
    return FunctionType(code, kernel.__globals__, code.co_name, kernel.__defaults__, kernel.__closure__)


def example(key: KernelKey) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """Small arguments on which every rank compiles the same kernel, and the (argument, dimension) pairs that may vary.

    Compiling on the first leaf that comes would make the code depend on that leaf's shape, and so on the rank.
    """
    n, block = 96, 240  # unlike each other, so that they are not taken for one size
    shape = (n, block) if key.blocked else (n * block,)
    device = key.device
    args: list[Tensor] = []
    varying: list[tuple[Tensor, int]] = []

    def add(shape: tuple[int, ...], dtype: torch.dtype, value: float = 0.0) -> None:
        args.append(torch.full(shape, value, dtype=dtype, device=device))
        varying.extend((args[-1], d) for d, size in enumerate(shape) if size > 1)

    add(shape, key.grad_dtype)
    add(shape, key.param_dtype)
    n_scalars = 1 + key.n_gates + sum(len(stage.scalars) for stage in key.stages)
    args.append(torch.ones(n_scalars, dtype=torch.float32, device=device))
    for stage in key.stages:
        for codec in stage.codecs:
            if codec is None:
                add(shape, torch.float32)
            elif codec.zero_scale is None:
                add(shape, codec.dtype, codec.zero_code)
            else:
                add((n, codec.width(block)), codec.dtype, codec.stored_zero)
                add((n, 1), torch.float32, codec.zero_scale)
    if key.blocked:
        add((n, 1), torch.int32, block)
    for _ in range(3 if key.stochastic else 0):
        add((n, 1), torch.int32)
    if key.master_bits:
        add(shape, CODE_DTYPES[key.master_bits])
    if not (key.apply or key.discards):
        add(shape, torch.float32)
    return args, varying
