"""FlashOptim's error bits as the codes of `master_weights`: what half-precision parameters lack of their masters.

FlashOptim counts in halves of the step above |p|, we in the last place of a float32, which is finer by a power of two
that is another below a power of two. So the master is made, and split anew.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit.convert._read import Read
from functional_lowbit.convert._slots import named_leaves
from functional_lowbit.formats._halves import HALF_DTYPES, SHIFT, write_master
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.transforms._master import MasterWeightsState

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}


def master_codes(
    speaker: str, state: Any, reads: Mapping[str, Read], params: Mapping[str, Any]
) -> dict[str, Callable[[], Tensor]]:
    """New codes by their path in the state, to be made when all else has been looked at.

    Raises:
        ValueError: for error bits without the parameters that they belong to, or of another shape.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    for path, owner, codes in _codes(state):
        error = reads[owner].error if owner in reads else None
        if error is None:
            continue
        p = params.get(owner)
        if not isinstance(p, Tensor) or p.device.type == "meta" or p.dtype not in HALF_DTYPES:
            raise ValueError(
                f"{speaker}: {reads[owner].words} has error bits, which need the parameter that they belong to; pass "
                "params as FlashOptim left them"
            )
        if error.shape != p.shape:
            raise ValueError(
                f"{speaker}: the error bits of {reads[owner].words} have shape {tuple(error.shape)}, the parameter "
                f"{tuple(p.shape)}; it is the state of another model"
            )
        found[path] = partial(_new, p, error, codes)
    return found


def _codes(state: Any) -> Iterator[tuple[str, str, Tensor]]:
    """(path in the state, parameter, codes) of all master weights."""
    for at in _optree.nodes(state):
        if isinstance(at.node, MasterWeightsState):
            for owner, leaf in named_leaves(at.node.error):
                if isinstance(leaf, Tensor):
                    yield ".".join((*at.names, "error", *([owner] if owner else []))), owner, leaf


def _new(p: Tensor, error: Tensor, like: Tensor) -> Tensor:
    """Codes as `master_weights` keeps them: int8 [*shape], or int16 as int8 [*shape, 2]."""
    bits = 16 if like.ndim > p.ndim else 8
    codes = split(local_of(p), local_of(error), bits).contiguous()
    spec = ShardSpec.of(like)
    return wrap(codes if bits == 8 else codes.unsqueeze(-1).view(torch.int8), spec)


def split(p: Tensor, error: Tensor, bits: int) -> Tensor:
    """What `master_weights` keeps of the masters of this rank's parameters.

    Args:
        p: bfloat16 or float16.
        error: FlashOptim's, int8 or int16, like p.
        bits: 8 or 16, of `master_weights`.

    Returns:
        int8 or int16, like p: the nearest codes that leave the parameter as it is.
    """
    master = master_of(p, error)
    near, codes = write_master(master, p.dtype, bits)
    # A master halfway to the next number is the next number's here, and may be its neighbour's there.
    reach = 1 << (min(bits, SHIFT[p.dtype]) - 1)
    outward = torch.where(master.abs() > p.float().abs(), reach - 1, -reach)
    outward = torch.where(p == 0, torch.where(master < 0, 1 - reach, reach - 1), outward)
    return torch.where(near == p, codes, outward.to(codes.dtype))


def master_of(p: Tensor, error: Tensor) -> Tensor:
    """float32: p + error / M * ulp(p) / 2."""
    wide, smallest = p.float(), SMALLEST_EXPONENT[p.dtype]
    exponent = torch.where(wide == 0, smallest, torch.frexp(wide).exponent - 1).clamp_min(smallest)
    half_ulp = torch.ldexp(torch.ones_like(wide, dtype=torch.float64), exponent - MANTISSA[p.dtype] - 1)
    return (wide.double() + error.double() / torch.iinfo(error.dtype).max * half_ulp).float()
