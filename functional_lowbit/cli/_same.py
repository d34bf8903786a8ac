"""Whether what was written is what was meant, bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_lowbit.cli._numbers import dense_parts, is_tensor, take


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """The path of the first thing that differs between two trees; None if nothing does.

    What is neither a tensor nor a number, a string, a dict or a list is not looked at.
    """
    if is_tensor(a):
        return None if is_tensor(b) and _same_bits(take(a), take(b)) else path
    if isinstance(a, Mapping):
        if not isinstance(b, Mapping) or list(a) != list(b):
            return path
        pairs = [(name, a[name], b[name]) for name in a]
    elif isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            return path
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        plain = isinstance(a, (bool, int, float, str, bytes, type(None)))
        return path if plain and repr(a) != repr(b) else None
    found = (first_difference(x, y, f"{path}.{name}" if path else str(name)) for name, x, y in pairs)
    return next((x for x in found if x is not None), None)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or type(a) is not type(b):
        return False
    if hasattr(a, "__tensor_flatten__"):
        inner = a.__tensor_flatten__()[0]  # type: ignore[operator]
        return all(_same_bits(getattr(a, name), getattr(b, name)) for name in inner)
    if a.layout != b.layout or a.device.type != b.device.type or a.is_nested != b.is_nested:
        return False
    if a.is_nested or a.layout is not torch.strided:
        return all(map(_same_bits, dense_parts(a), dense_parts(b)))
    if a.device.type == "meta":  # it has no bits
        return True
    if a.is_quantized:
        return torch.equal(a, b)
    a, b = (x.detach().contiguous().flatten() for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True
