"""FlashOptim's optimizer state: companded codes with float16 scales, and what parameters lack of their masters.

Groups of 32 run over the flattened local tensor; a group's scale s is its largest magnitude (or root), as float16.
    signed:        code q in -127 … 127, x = s t / (2 - |t|) with t = q / 127: the values of companded8
    non-negative:  code q in 0 … 255, x = (s q / 255)**2: companded8 has 254 steps, so these are written anew
    master:        p + e / M * ulp(p) / 2 with e in -M … M, M = 127 or 32767, ulp(p) the step above |p|
Where its state_dict() would be cast to the parameters' dtype by torch, it hides bits: float16 scales as bfloat16 of the
same bits, int16 errors as the parameter's dtype of the same bits, int8 errors as numbers.

References:
    Gonzalez Ortiz et al., 2026, https://arxiv.org/abs/2602.23349; https://github.com/databricks/flashoptim 0.1.4.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit.convert._kept import Blocks, Kept
from functional_lowbit.convert._read import Read, plain, reader_by_names, signed
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.sharding import ShardSpec, local_of, wrap

BLOCK = 32
CODES, SCALES, ERROR = "::quantized", "::scales", "error_bits"


def read_flashoptim(speaker: str, param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """The entries of FlashOptim's Adam, AdamW, Lion and SGD, compressed or not."""
    error = param.entries.get(ERROR)
    named = {e.removesuffix(CODES): x for e, x in param.entries.items() if e != ERROR and not e.endswith(SCALES)}

    def kept(speaker: str, _: SavedParam, entry: str, x: Any) -> Kept:
        is_compressed = entry + CODES in param.entries
        return _kept(speaker, param, entry, x) if is_compressed else plain(speaker, param, entry, x)

    read = reader_by_names(kept)(speaker, param._replace(entries=named), group, fields)
    return read if error is None else read._replace(error=_errors(speaker, param, group, error))


def _kept(speaker: str, param: SavedParam, entry: str, x: Any) -> Kept:
    found = param.entries.get(entry + SCALES)
    if not isinstance(x, Tensor) or not isinstance(found, Tensor):
        raise ValueError(
            f"{speaker}: {entry!r} of {param.words} must have tensors {CODES!r} and {SCALES!r}; the file is damaged"
        )
    is_signed = signed(entry)
    codes, scales = local_of(x).reshape(-1), local_of(found).reshape(-1)
    codes = codes.to(torch.int8 if is_signed else torch.uint8)
    if scales.dtype == torch.bfloat16:
        scales = scales.view(torch.float16)
    if scales.numel() != -(-codes.numel() // BLOCK):
        raise ValueError(
            f"{speaker}: {entry!r} of {param.words} has {scales.numel()} scales for {codes.numel()} elements in groups "
            f"of {BLOCK}; the file is damaged"
        )
    blocks = Blocks(codes, scales, BLOCK, _signed if is_signed else _non_negative)
    return blocks.kept(x, blocks.known("companded8", True) if is_signed else None)


def _signed(codes: Tensor, scales: Tensor) -> Tensor:
    q = codes.float()
    return scales * (q / (254.0 - q.abs()))


def _non_negative(codes: Tensor, scales: Tensor) -> Tensor:
    return (scales * (codes.float() / 255.0)).square()


def _errors(speaker: str, param: SavedParam, group: Mapping[str, Any], x: Any) -> Tensor:
    """int8 or int16, as they were before they were hidden."""
    width = group.get("master_bytewidth")
    if not isinstance(x, Tensor) or width not in (3, 4):
        raise ValueError(
            f"{speaker}: {ERROR!r} of {param.words} needs a group with master_bytewidth 3 or 4, got {width!r}; the "
            "file is damaged"
        )
    spec, local = ShardSpec.of(x), local_of(x)
    if width == 3:
        return wrap(local.to(torch.int8), spec)
    return wrap(local.view(torch.int16), spec)
