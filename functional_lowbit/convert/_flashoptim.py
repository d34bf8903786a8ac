"""FlashOptim's optimizer state: companded codes with float16 scales, and what parameters lack of their masters.

Groups of 32 run over the flattened local tensor; a group's scale s is its largest magnitude (or root), as float16.
    signed:        code q in -127 … 127, x = s t / (2 - |t|) with t = q / 127: the values of companded8
    non-negative:  code q in 0 … 255, x = (s q / 255)**2: companded8 has 254 steps, so these are written anew
    master:        p + e / M * ulp(p) / 2 with e in -M … M, M = 127 or 32767, ulp(p) the step above |p|
Where its state_dict() would be cast to the parameters' dtype by torch, it hides bits: float16 scales as bfloat16 of the
same bits, int16 errors as the parameter's dtype of the same bits, int8 errors as numbers.

What a parameter lacks of its master is counted in halves of ulp(p) there. `master_weights` counts in the last place of
a float32, finer by a power of two that is another one below powers of two. So the master is made, and split anew.

References:
    Gonzalez Ortiz et al., 2026, https://arxiv.org/abs/2602.23349; https://github.com/databricks/flashoptim 0.1.4.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._kept import Blocks, Kept
from functional_lowbit.convert._match import named_leaves
from functional_lowbit.convert._read import Read, plain, reader_by_names, signed
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.formats._halves import HALF_DTYPES, SHIFT, write_master
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.transforms._master import MasterWeightsState

BLOCK = 32
CODES, SCALES, ERROR = "::quantized", "::scales", "error_bits"
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}


def read_flashoptim(param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """The entries of FlashOptim's Adam, AdamW, Lion and SGD, compressed or not."""
    error = param.entries.get(ERROR)
    named = {e.removesuffix(CODES): x for e, x in param.entries.items() if e != ERROR and not e.endswith(SCALES)}

    def kept(_: SavedParam, entry: str, x: Any) -> Kept:
        is_compressed = entry + CODES in param.entries
        return _kept(param, entry, x) if is_compressed else plain(param, entry, x)

    read = reader_by_names(kept)(param._replace(entries=named), group, fields)
    return read if error is None else read._replace(error=_errors(param, group, error))


def _kept(param: SavedParam, entry: str, x: Any) -> Kept:
    found = param.entries.get(entry + SCALES)
    if not isinstance(x, Tensor) or not isinstance(found, Tensor):
        raise WrongValue(f"{entry!r} of {param.words} must have tensors {CODES!r} and {SCALES!r}; the file is damaged")
    is_signed = signed(entry)
    codes, scales = local_of(x).reshape(-1), local_of(found).reshape(-1)
    codes = codes.to(torch.int8 if is_signed else torch.uint8)
    if scales.dtype == torch.bfloat16:
        scales = scales.view(torch.float16)
    if scales.numel() != -(-codes.numel() // BLOCK):
        raise WrongValue(
            f"{entry!r} of {param.words} has {scales.numel()} scales for {codes.numel()} elements in groups "
            f"of {BLOCK}; the file is damaged"
        )
    blocks = Blocks(codes, scales, BLOCK, _signed if is_signed else _non_negative)
    return blocks.kept(x, blocks.known("companded8", True) if is_signed else None)


def _signed(codes: Tensor, scales: Tensor) -> Tensor:
    q = codes.float()
    return scales * (q / (254.0 - q.abs()))


def _non_negative(codes: Tensor, scales: Tensor) -> Tensor:
    return (scales * (codes.float() / 255.0)).square()


def _errors(param: SavedParam, group: Mapping[str, Any], x: Any) -> Tensor:
    """int8 or int16, as they were before they were hidden."""
    width = group.get("master_bytewidth")
    if not isinstance(x, Tensor) or width not in (3, 4):
        raise WrongValue(
            f"{ERROR!r} of {param.words} needs a group with master_bytewidth 3 or 4, got {width!r}; the file is damaged"
        )
    spec, local = ShardSpec.of(x), local_of(x)
    if width == 3:
        return wrap(local.to(torch.int8), spec)
    return wrap(local.view(torch.int16), spec)


def master_codes(state: Any, reads: Mapping[str, Read], params: Mapping[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """New codes by their path in the state, to be made when all else has been looked at."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path, owner, codes in _codes(state):
        error = reads[owner].error if owner in reads else None
        if error is None:
            continue
        p = params.get(owner)
        if not isinstance(p, Tensor) or p.device.type == "meta" or p.dtype not in HALF_DTYPES:
            raise WrongValue(
                f"{reads[owner].words} has error bits, which need the parameter that they belong to; pass "
                "params as FlashOptim left them"
            )
        if error.shape != p.shape:
            raise WrongValue(
                f"the error bits of {reads[owner].words} have shape {tuple(error.shape)}, the parameter "
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
