"""Keyed stochastic rounding: the noise is a hash of (seed, step, leaf, element), and of nothing else.

A key is an int64 number. `fold_in` makes new keys from old ones: one for each step, and from that one for each leaf. An
element's noise is a hash of its leaf's key and of its index in the whole leaf, so that every rank, every world size,
every device and every resumed run rounds it alike. Everything is elementwise arithmetic on integers that wrap.

Imports: _refused
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _refused as refused

GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio; splitmix64's increment
SIGN, MAGNITUDE = -0x80000000, 0x7FFFFFFF  # of a float32's bits
HIGH_STRIDE = -0x61C88647  # 2**32 / golden ratio, odd: what 2**31 elements further on adds to the upper key word


class Words(NamedTuple):
    """What the hash of an element starts from; int32, all of one shape or broadcast."""

    low: Tensor  # lower half of the leaf's key
    high: Tensor  # upper half of the leaf's key, moved on by the upper bits of the element's index
    counter: Tensor  # lower 31 bits of the element's index


@refused.speaking("fold_in")
def fold_in(key: int | Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number; another one for every other number.

    Args:
        key: An int of 64 bits, or an int64[] tensor.
        data: An int of 64 bits (a seed, a step), or an int64 tensor of any shape, for as many keys.

    Returns:
        int64, shaped like `data`. Folding in a, then b, differs from folding in b, then a.

    Raises:
        TypeError, ValueError: for a key or data that is no such number.

    References:
        jax.random.fold_in is the name; the mixing is splitmix64's (Steele, Lea & Flood, 2014), once for each argument.

    Example:
        >>> import functional_lowbit as fl
        >>> fl.rounding.fold_in(0, 1), fl.rounding.fold_in(0, 2)
        (tensor(-7061257010553836809), tensor(4455725808831290745))
    """
    mixed = _mix64(check_key(key) + GOLDEN)
    if isinstance(data, Tensor):
        if data.dtype != torch.int64:
            raise refused.WrongType(f"data must be an int or an int64 tensor, got {data.dtype}")
        return _mix64(mixed.to(data.device) ^ data)
    return _mix64(mixed ^ _int64("data", data))


def leaf_key(key: int | Tensor, path: str) -> Tensor:
    """The key of a leaf: the key of the step with the leaf's path folded in.

    Args:
        key: An int of 64 bits, or an int64[] tensor.
        path: The leaf's path, for instance `layers.0.weight`.

    Returns:
        int64[].

    Example:
        >>> import functional_lowbit as fl
        >>> fl.rounding.leaf_key(0, "w") == fl.rounding.leaf_keys(0, ["b", "w"])[1]
        tensor(True)
    """
    return fold_in(key, path_word(path))


def leaf_keys(key: int | Tensor, paths: Sequence[str]) -> Tensor:
    """The keys of many leaves at once, int64[len(paths)]; see `leaf_key`.

    Example:
        >>> import functional_lowbit as fl
        >>> fl.rounding.leaf_keys(0, ["b", "w"]).shape
        torch.Size([2])
    """
    return fold_in(key, torch.tensor([path_word(p) for p in paths], dtype=torch.int64, device="cpu"))


@lru_cache(maxsize=65536)
def path_word(path: str) -> int:
    """A path as a number of 64 bits, the same in every process (Python's `hash` is not): its BLAKE2b hash.

    Example:
        >>> import functional_lowbit as fl
        >>> fl.rounding.path_word("layers.0.weight")
        4473830710502933260
    """
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little", signed=True)


def words(key: Tensor, start: Tensor) -> Words:
    """The hash's start values for elements, or for the first element of each block.

    The elements behind a block's first one have the same `low` and `high`, and `counter` counts on; where it runs over
    31 bits, call `bits` with `wide=True`.

    Args:
        key: int64, of the leaf; [] or broadcast against `start`.
        start: int64, >= 0: index of the element in the whole leaf, in row-major order.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.rounding.words(torch.tensor(5), torch.tensor([7, 2**31 + 7])).counter
        tensor([7, 7], dtype=torch.int32)
    """
    high = _low32(key >> 32) + _low32(start >> 31) * HIGH_STRIDE
    return Words(_low32(key), high, (start & MAGNITUDE).to(torch.int32))


def bits(low: Tensor, high: Tensor, index: Tensor, *, wide: bool = False) -> Tensor:
    """32 bits of noise for each element. Elementwise in int32, so that a compiler can vectorize it.

    The hash is triple32 (three rounds of xor-shift and multiply), with `low` folded into its input and `high` added
    after its first product. For one key it is a bijection of the lower 31 bits of the index.

    Args:
        low: int32: a word of the key, see `words`.
        high: int32: the other one.
        index: int32, broadcast against them: the element's index, >= 0.
        wide: Whether an index that became negative stands for one of 2**31 and more: `words(...).counter` counted on
            in a leaf of more than 2**31 elements.

    Returns:
        int32, any of the 2**32 numbers.

    References:
        triple32: Wellons, https://github.com/skeeto/hash-prospector; what was measured of it is in docs/design.md.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.rounding.bits(*fl.rounding.words(torch.tensor(5), torch.arange(3)))
        tensor([-482482911, -744398955, 1327878809], dtype=torch.int32)
    """
    if wide:
        high = high + ((index >> 31) & HIGH_STRIDE)
        index = index & MAGNITUDE
    x = index ^ low
    x = (x ^ ((x >> 17) & 0x7FFF)) * -0x12A52B45 + high  # 0xED5AD4BB
    x = (x ^ ((x >> 11) & 0x1FFFFF)) * -0x53B3E4AF  # 0xAC4C1B51
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x31848BAB
    return x ^ ((x >> 14) & 0x3FFFF)


def stochastic_round(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round to one of the two neighbours, so that the mean over the noise is `x`. Elementwise.

    A number that `dtype` has stays as it is, -0.0, Inf and NaN among them. No finite number becomes Inf, but for
    float16 from 65536 on, which is out of its range; up to there, and for bfloat16, what lies above the largest number
    becomes the largest number. The result for -x is minus the result for x.

    Args:
        x: float32, any shape (any dtype if nothing is rounded at random, see below).
        dtype: bfloat16 or float16. For any other dtype `x` is cast: float32 has nothing to round.
        noise: int32, of x's shape or broadcast: uniform bits, see `bits`.

    Returns:
        `dtype`. The mean over all noise is exactly `x` for bfloat16, and for float16 where |x| >= 2**-24; below that
        it is off by 2**-48 at most (2**-24 of the smallest step).

    Raises:
        TypeError: if `x` must be float32 and is not.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> noise = torch.tensor([0, -1], dtype=torch.int32)
        >>> fl.rounding.stochastic_round(torch.tensor([1.001, 1.001]), torch.bfloat16, noise)
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    if x.dtype != torch.float32:
        raise refused.WrongType(f"x must be float32, got {x.dtype}", speaker="stochastic_round")
    raw = x.view(torch.int32)
    rounded = _to_bfloat16(raw, noise) if dtype == torch.bfloat16 else _to_float16(raw, noise)
    return (rounded | (raw & SIGN)).view(torch.float32).to(dtype)


def _to_bfloat16(raw: Tensor, noise: Tensor) -> Tensor:
    """Bits of a float32 -> bits of the rounded magnitude. A bfloat16 is the upper half, subnormals included."""
    magnitude = raw & MAGNITUDE
    rounded = ((magnitude + ((noise >> 16) & 0xFFFF)) & -0x10000).clamp_max(0x7F7F0000)
    return torch.where(magnitude < 0x7F800000, rounded, magnitude)


def _to_float16(raw: Tensor, noise: Tensor) -> Tensor:
    """Bits of a float32 -> bits of the rounded magnitude, in steps of 2**-10 of its power of two, or of 2**-24."""
    magnitude = raw & MAGNITUDE
    step = ((magnitude & 0x7F800000) - (10 << 23)).clamp(0x33800000, 0x42000000)  # bits of 2**-24 to 2**5
    scaled = magnitude.view(torch.float32) * (0x7F000000 - step).view(torch.float32)  # exact: over a power of two
    below = scaled.floor()
    uniform = (((noise >> 8) & 0xFFFFFF) | 1).float() * 2.0**-24  # odd, so that a fraction of 23 bits is met exactly
    above = torch.where(scaled - below > uniform, below + 1, below)
    rounded = (above * step.view(torch.float32)).clamp_max(65504.0).view(torch.int32)
    return torch.where(magnitude < 0x47800000, rounded, magnitude)  # 65536


def check_key(key: Any) -> Tensor:
    """A key as int64[]; what is none is refused."""
    if isinstance(key, Tensor):
        if key.dtype != torch.int64 or key.ndim != 0:
            raise refused.WrongValue(
                f"key must be an int or a 0-d int64 tensor, got {key.dtype} of shape {tuple(key.shape)}"
            )
        return key
    return torch.tensor(_int64("key", key), dtype=torch.int64, device="cpu")


def _int64(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        kind = "a 0-d int64 tensor" if what == "key" else "an int64 tensor"
        raise refused.WrongType(f"{what} must be an int or {kind}, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise refused.WrongValue(f"{what} must fit in 64 bits, got {value}")
    return value


def _mix64(z: Tensor) -> Tensor:
    """splitmix64's finalizer; a shift right of a negative number is masked, for it would bring in ones."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _low32(x: Tensor) -> Tensor:
    """The lower 32 bits of an int64, as an int32."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
