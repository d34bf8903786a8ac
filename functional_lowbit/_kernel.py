"""The leaf kernel: one function for a run of leaf functions, over blocks of any leaf.

It is given plain tensors only and writes into them.
"""

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._leafwise import Leafwise, check_leaf, record
from functional_lowbit.formats import Codec


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
    blocked: bool  # tensors of [n_blocks, block] with scales, or flat [n]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device


_serial = itertools.count()


def make_kernel(key: KernelKey) -> Callable[..., None]:
    """`kernel(g, p, scalars, *moments)`, or `kernel(g, p, scalars, *moments, out)` if updates are not applied.

    `scalars` is float32[1 + n_gates + all stages' scalars]: a 1, then the gates (1 open, 0 closed), then the scalars.
    `moments` are, stage by stage and field by field, codes and scales, or the one unscaled tensor. Moments, and `p` or
    `out`, are written.
    """
    stages, n_gates, apply = key.stages, key.n_gates, key.apply
    records = tuple(record(stage.scalars) for stage in stages)

    def kernel(g: Tensor, p: Tensor, scalars: Tensor, *rest: Tensor) -> None:
        # A leaf function may return what it was given, as another moment or as the update. The buffer must not be
        # written before it is read then: a product with 1 keeps apart what was read. Inductor would remove a clone.
        one, is_open = scalars[0], scalars[1 : 1 + n_gates] > 0
        u, p32 = g.float(), p.float() * one
        at, scalar_at = 0, 1 + n_gates
        for (update_leaf, state_class, names, codecs, scalar_names, gates), c_class in zip(
            stages, records, strict=True
        ):
            fields: dict[str, Any] = dict.fromkeys(state_class._fields)
            places = []
            for name, codec in zip(names, codecs, strict=True):
                parts = rest[at : at + (1 if codec is None else codec.parts)]
                at += len(parts)
                places.append(parts)
                if codec is None:
                    fields[name] = parts[0] * one
                else:
                    fields[name] = codec.read(parts[0], parts[1] if len(parts) > 1 else None, g.shape[-1])
            c = c_class(*[scalars[scalar_at + i] for i in range(len(scalar_names))])
            scalar_at += len(scalar_names)
            u, new = update_leaf(u, state_class(**fields), p32, c)
            news = [getattr(new, name) for name in names]
            check_leaf(update_leaf, g, u, dict(zip(names, news, strict=True)))
            for gate in gates:
                u = torch.where(is_open[gate], u, 0.0)
            for name, parts, codec, value in zip(names, places, codecs, news, strict=True):
                kept = [is_open[gate] for gate in gates]
                if codec is not None and not codec.idempotent:
                    kept.append((value != fields[name]).any(dim=-1, keepdim=True))
                for place, part in zip(parts, (value,) if codec is None else codec.write(value), strict=False):
                    assert part is not None
                    for condition in kept:
                        # Codes are kept, not decoded values: not every format writes what it read as the same code.
                        part = torch.where(condition, part, place)
                    place.copy_(part)
        if apply:
            p.copy_(p.to(torch.promote_types(p.dtype, torch.float32)) + u)
        else:
            rest[-1].copy_(u)

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
    if not key.apply:
        add(shape, torch.float32)
    return args, varying
