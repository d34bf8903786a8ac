"""bitsandbytes' optimizer state: state1 and state2, with absmax and qmap where they have 8 bits.

Blocks of 256 run over the flattened tensor. Paged state differs only in where it lies.

References:
    bitsandbytes/optim/optimizer.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._kept import Blocks, Kept, by_map, is_map_of
from functional_lowbit.convert._read import Read, plain, read_step
from functional_lowbit.convert._saved import SavedParam

WRAPPED = "__bnb_optimizer_quant_state__"  # the dict in which state_dict() hides tensors from FSDP
MOMENTS = ("state1", "state2")
BESIDE = ("step", "absmax1", "absmax2", "qmap1", "qmap2", "gnorm_vec", "unorm_vec")  # what the last two hold is scratch
BLOCK, BLOCKS = 256, (256, 2048, 4096, 1024, 512, 128, 64)  # elements; likely ones first


def entries_of(param: SavedParam) -> dict[str, Any]:
    """The entries, out of their wrapper."""
    entries = dict(param.entries)
    inner = entries.pop(WRAPPED, {})
    return {**entries, **inner} if isinstance(inner, Mapping) else {**entries, WRAPPED: inner}  # which no reader knows


def read_bitsandbytes(param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """The entries of bitsandbytes' Adam, AdamW, Lion and SGD."""
    entries = entries_of(param)
    for entry in entries:
        if entry not in MOMENTS and entry not in BESIDE:
            raise WrongValue(
                f"{param.words} has an entry {entry!r}; known are {', '.join((*MOMENTS, *BESIDE))}, of "
                "blockwise bitsandbytes"
            )
    moments = {
        entry: _kept(param, entry, entries) for entry in MOMENTS if entry in entries and entries[entry] is not None
    }
    found = {"state1": _first(param, group, len(moments)), "state2": ("nu",)}
    found = {entry: (fields[entry],) if entry in fields else found[entry] for entry in moments}
    for entry in moments:
        if not found[entry]:
            raise WrongValue(
                f"{param.words} has state1 alone, and the eps of its group is {group['eps']}: it is neither "
                "Lion's nor SGD's; pass fields={'state1': ...} to say which field of the state it is"
            )
    return Read(param.words, moments, found, param.group, read_step(param))


def _first(param: SavedParam, group: Mapping[str, Any], moments: int) -> tuple[str, ...]:
    """The fields that state1 may be. A single one is known by its group: eps 0, and SGD's second beta is 0."""
    betas = group.get("betas")
    if moments == 2:
        return ("mu",)
    if group.get("eps"):
        return ()
    if not isinstance(betas, (tuple, list)) or len(betas) < 2:
        return ("mu", "trace")
    return ("mu",) if betas[1] else ("trace",)


def _kept(param: SavedParam, entry: str, entries: Mapping[str, Any]) -> Kept:
    x, ending = entries[entry], entry[-1]
    if not isinstance(x, Tensor) or x.dtype != torch.uint8:
        return plain(param, entry, x)
    scales, qmap = entries.get(f"absmax{ending}"), entries.get(f"qmap{ending}")
    if not isinstance(scales, Tensor) or not isinstance(qmap, Tensor):
        missing = f"absmax{ending}" if not isinstance(scales, Tensor) else f"qmap{ending}"
        raise WrongValue(
            f"{entry!r} of {param.words} is in 8 bits, but has no {missing!r}; the file is damaged, or not blockwise"
        )
    blocks = -(-x.numel() // BLOCK)
    if scales.numel() != blocks or qmap.numel() != 256:
        raise WrongValue(
            f"{entry!r} of {param.words} has {scales.numel()} scales and a map of {qmap.numel()}, but "
            f"{x.numel()} elements need {blocks} and 256; the file is damaged, or of AdEMAMix"
        )
    (found,) = blocks_of(x.detach(), scales.reshape(-1), qmap.reshape(-1))
    is_signed = bool((qmap < 0).any())
    return found.kept(x, found.known("dynamic8", is_signed) if is_map_of("dynamic8", is_signed, qmap) else None)


def blocks_of(codes: Tensor, absmax: Tensor, qmap: Tensor) -> list[Blocks]:
    """The codes of a moment, or of the two that AdEMAMix keeps in one: codes [2, *shape], absmax [2, n_blocks].

    The block size is not saved: it is a power of two that makes so many blocks, 256 or 2048 in all versions.
    """
    two = absmax.ndim == 2 and codes.ndim > 1 and len(absmax) == len(codes)
    if not (two or absmax.ndim == 1) or len(qmap) != 256 or codes.dtype != torch.uint8:
        shapes = f"absmax {tuple(absmax.shape)}, qmap {tuple(qmap.shape)}"
        raise WrongValue(f"codes {codes.dtype} {tuple(codes.shape)}, {shapes} do not fit")
    found = []
    for part, scales in zip(codes, absmax, strict=True) if two else [(codes, absmax)]:
        block = next((b for b in BLOCKS if -(-part.numel() // b) == len(scales)), None)
        if block is None:
            raise WrongValue(
                f"{len(scales):,} scales for {part.numel():,} codes fit no block size that the library has"
            )
        found.append(Blocks(part.reshape(-1), scales, block, by_map(qmap)))
    return found
