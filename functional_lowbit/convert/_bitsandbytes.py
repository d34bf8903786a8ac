"""bitsandbytes' optimizer state: state1 and state2, with absmax and qmap where they have 8 bits.

Blocks of 256 run over the flattened tensor. Paged state differs only in where it lies.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit.convert._kept import Codes, Kept, by_map, is_map_of
from functional_lowbit.convert._read import Read, plain, read_step
from functional_lowbit.convert._saved import SavedParam

WRAPPED = "__bnb_optimizer_quant_state__"  # the dict in which state_dict() hides tensors from FSDP
MOMENTS = ("state1", "state2")
BESIDE = ("step", "absmax1", "absmax2", "qmap1", "qmap2", "gnorm_vec", "unorm_vec")  # what the last two hold is scratch
BLOCK = 256


def entries_of(param: SavedParam) -> dict[str, Any]:
    """The entries, out of their wrapper."""
    entries = dict(param.entries)
    inner = entries.pop(WRAPPED, {})
    return {**entries, **inner} if isinstance(inner, Mapping) else {**entries, WRAPPED: inner}  # which no reader knows


def read_bitsandbytes(speaker: str, param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """The entries of bitsandbytes' Adam, AdamW, Lion and SGD.

    Raises:
        ValueError: for entries that are not understood, and for a single moment that is neither Lion's nor SGD's.
    """
    entries = entries_of(param)
    for entry in entries:
        if entry not in MOMENTS and entry not in BESIDE:
            raise ValueError(
                f"{speaker}: {param.words} has an entry {entry!r}; known are {', '.join((*MOMENTS, *BESIDE))}, of "
                "blockwise bitsandbytes"
            )
    moments = {
        entry: _kept(speaker, param, entry, entries)
        for entry in MOMENTS
        if entry in entries and entries[entry] is not None
    }
    found = {"state1": _first(speaker, param, group, len(moments)), "state2": ("nu",)}
    found = {entry: (fields[entry],) if entry in fields else found[entry] for entry in moments}
    for entry in moments:
        if not found[entry]:
            raise ValueError(
                f"{speaker}: {param.words} has state1 alone, and the eps of its group is {group['eps']}: it is neither "
                "Lion's nor SGD's; pass fields={'state1': ...} to say which field of the state it is"
            )
    return Read(param.words, moments, found, param.group, read_step(speaker, param))


def _first(speaker: str, param: SavedParam, group: Mapping[str, Any], moments: int) -> tuple[str, ...]:
    """The fields that state1 may be. A single one is known by its group: eps 0, and SGD's second beta is 0."""
    betas = group.get("betas")
    if moments == 2:
        return ("mu",)
    if group.get("eps"):
        return ()
    if not isinstance(betas, (tuple, list)) or len(betas) < 2:
        return ("mu", "trace")
    return ("mu",) if betas[1] else ("trace",)


def _kept(speaker: str, param: SavedParam, entry: str, entries: Mapping[str, Any]) -> Kept:
    x, ending = entries[entry], entry[-1]
    if not isinstance(x, Tensor) or x.dtype != torch.uint8:
        return plain(speaker, param, entry, x)
    scales, qmap = entries.get(f"absmax{ending}"), entries.get(f"qmap{ending}")
    if not isinstance(scales, Tensor) or not isinstance(qmap, Tensor):
        missing = f"absmax{ending}" if not isinstance(scales, Tensor) else f"qmap{ending}"
        raise ValueError(
            f"{speaker}: {entry!r} of {param.words} is in 8 bits, but has no {missing!r}; the file is damaged, or not "
            "blockwise"
        )
    blocks = -(-x.numel() // BLOCK)
    if scales.numel() != blocks or qmap.numel() != 256:
        raise ValueError(
            f"{speaker}: {entry!r} of {param.words} has {scales.numel()} scales and a map of {qmap.numel()}, but "
            f"{x.numel()} elements need {blocks} and 256; the file is damaged, or of AdEMAMix"
        )
    codes = x.detach().reshape(-1)
    is_signed = bool((qmap < 0).any())
    found = Codes("dynamic8", is_signed, lambda: codes, scales.reshape(-1), BLOCK) if _known(is_signed, qmap) else None
    return Kept(tuple(x.shape), lambda: by_map(codes, qmap, scales, BLOCK).reshape(x.shape), None, found)


def _known(is_signed: bool, qmap: Tensor) -> bool:
    return is_map_of("dynamic8", is_signed, qmap)
