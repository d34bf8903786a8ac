"""torchao's optimizer state: OptimState8bit, OptimState4bit and OptimStateFp8, known by what they hold.

All three have blocks over the flattened local tensor. The classes are not imported: whoever has such a tensor has them.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit.convert._kept import Codes, Kept, by_map, is_map_of, per_element
from functional_lowbit.convert._read import Read, check_entry, fields_of, plain, read_step, signed
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.sharding import ShardSpec, wrap

FP8 = torch.float8_e4m3fn


def inside(x: Any) -> Any:
    """This rank's tensor of a DTensor, of whichever class."""
    if isinstance(x, Tensor) and ShardSpec.of(x) is not None:
        with torch.no_grad():
            return x.to_local()  # type: ignore[attr-defined]
    return x


def is_torchao(x: Any) -> bool:
    """Whether a tensor, or this rank's part of it, is one of torchao's."""
    x = inside(x)
    return isinstance(x, Tensor) and hasattr(x, "codes") and hasattr(x, "scale")


def read_torchao(speaker: str, param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
    """The entries of torchao's Adam and AdamW; small parameters have plain tensors there."""
    moments: dict[str, Kept] = {}
    for entry, value in param.entries.items():
        if entry == "step" or value is None:
            continue
        check_entry(speaker, param, entry, fields)
        if is_torchao(value):
            moments[entry] = _kept(f"{speaker}: {entry!r} of {param.words}", value, signed(entry))
        else:
            moments[entry] = plain(speaker, param, entry, value)
    return Read(param.words, moments, fields_of(moments, group, fields), param.group, read_step(speaker, param))


def _kept(speaker: str, x: Tensor, is_signed: bool) -> Kept:
    own: Any = inside(x)
    codes, scales, spec = own.codes.detach().reshape(-1), own.scale.detach(), ShardSpec.of(x)
    shape = tuple(own.shape)  # of this rank's part
    n, packed = prod(shape), 2 * codes.numel() == prod(shape) and codes.dtype == torch.uint8
    if codes.numel() != (n // 2 if packed else n) or (n and (not scales.numel() or n % scales.numel())):
        raise ValueError(
            f"{speaker} has {codes.numel()} codes and {scales.numel()} scales for {n} elements; the file is damaged"
        )
    block = n // max(scales.numel(), 1)
    if codes.dtype == FP8:
        found = Codes("e4m3", is_signed, lambda: codes.view(torch.uint8), scales, block)

        def local() -> Tensor:
            return codes.float() * per_element(scales, block, n)

    else:
        qmap = own.qmap.detach()
        is_signed = bool(getattr(own, "signed", is_signed))

        def each() -> Tensor:
            if not packed:
                return codes
            return torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1)  # the even element has the high half

        found = _known(each, qmap, scales, block, is_signed)

        def local() -> Tensor:
            return by_map(each(), qmap, scales, block)

    return Kept(tuple(x.shape), lambda: wrap(local().reshape(shape), spec), spec, found)


def _known(codes: Callable[[], Tensor], qmap: Tensor, scales: Tensor, block: int, is_signed: bool) -> Codes | None:
    """The codes as one of our formats has them."""
    for format in ("dynamic8", "dynamic4"):
        if is_map_of(format, is_signed, qmap):
            return Codes(format, is_signed, codes, scales, block)
    steps = torch.arange(1, 17, device=qmap.device) / 16
    if not is_signed and qmap.shape == steps.shape and torch.equal(qmap.float(), steps):
        # Ours keeps a code for 0 and has none for 15/16, which becomes 1.
        return Codes("dynamic4", False, lambda: (codes() + 1).clamp_max(15), scales, block)
    return None
