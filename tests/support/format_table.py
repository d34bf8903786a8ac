"""What each format promises, as a table. A new format gets a row, and is then held to everything in test_formats.py."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit.formats import Codec

NAN, INF = math.nan, math.inf
EVERY = range(256)


class Promise(NamedTuple):
    """What one half of a format, signed or non-negative, promises."""

    # float64 y = |x| / absmax -> the largest |decoded - x| / absmax. For a format without scales the absmax is 1.
    bound: Callable[[Tensor], Tensor]
    spoilt: tuple[float, ...]  # what NaN, Inf and (signed) -Inf read as, beside a largest finite number of 1
    smallest_absmax: float = 0.0  # a block with a smaller one is scaled as if it had this one
    codes: Sequence[int] = ()  # all that are written, in the order of their values; NaN's anywhere
    nearest_in: Callable[[Tensor], Tensor] = lambda y: y  # y goes to the value that is nearest in this function


SPOILT = (NAN, NAN, NAN)  # (non-negative: two of them)

# Signed and non-negative.
TABLE: dict[str, tuple[Promise, Promise]] = {
    # Signed: y = c / (254 - c), so dy / dc = (1 + y)**2 / 254, and c is off by 1/2: (1 + y)**2 / 508 to first order. At
    # c + 1/2 the slope is larger by (1 - (1 + y) / 508)**-2 <= 1.008.
    # Non-negative: the root is off by 1 / 508 of the largest, r'**2 - r**2 = (r' - r) (r' + r), and what would round to
    # 0 becomes 1 / 254**2. Float32 leaves the position of a tie uncertain by 2e-4 codes: 1.001.
    "companded8": (
        Promise(lambda y: (1 + y) ** 2 / 504, SPOILT, 2.0**-110, range(-128, 128), lambda y: y / (1 + y.abs())),
        Promise(lambda y: 1.001 * (y.sqrt() / 254 + 254.0**-2), SPOILT[:2], 2.0**-110, EVERY, torch.sqrt),
    ),
    # Half a cell is 0.45 D / n, with n = 64 D**0.301 values in the decade that ends at D, so 0.45 / 64 D**0.699, and
    # D <= 10 y. (Between two decades it is 1.35 D / n, but there D <= y / 0.55.) Rounding to 0, or up to the smallest
    # number, adds at most 3.25e-7. The non-negative map has twice as many values. No code is free for NaN.
    "dynamic8": (
        Promise(lambda y: (0.036 * y**0.7).clamp_max(0.45 / 64) + 3.3e-7, (1.0, 1.0, -0.99296875), 2.0**-104, EVERY),
        Promise(lambda y: (0.018 * y**0.7).clamp_max(0.45 / 128) + 3.3e-7, (1.0, 1.0), 2.0**-104, EVERY),
    ),
    # Half of the last of 4 (e5m2: 3) significant bits; below the smallest normal float half of the smallest one, or, so
    # that it is not 0, all of it. The unit has 20 bits, which moves everything by 2**-20.
    "e4m3": (
        Promise(
            lambda y: 1.00001 * (y / 16).clamp_min(2.0**-10 / 448),
            SPOILT,
            448 * 2.0**-117,
            (*range(255, 127, -1), *range(128)),
        ),
        Promise(lambda y: 1.00001 * (y / 16).clamp_min(2.0**-9 / 448), SPOILT[:2], 448 * 2.0**-117, range(128)),
    ),
    "e5m2": (
        Promise(
            lambda y: 1.00001 * (y / 8).clamp_min(2.0**-17 / 57344),
            SPOILT,
            57344 * 2.0**-110,
            (255, *range(251, 127, -1), *range(124), 127),
        ),
        Promise(
            lambda y: 1.00001 * (y / 8).clamp_min(2.0**-16 / 57344), SPOILT[:2], 57344 * 2.0**-110, (*range(124), 127)
        ),
    ),
    # Signed: half the step from k**2 to (k + 1)**2 is k + 1/2, which is at most 7 sqrt(y) where it is reached, and
    # nearer to k**2 the error shrinks faster than the root. Non-negative: the fourth root is off by 1/30, and what
    # would round to 0 becomes 15**-4; no code is free for NaN. Both: 2**-18 for the unit.
    "root4": (
        Promise(lambda y: 1e-5 + (y.sqrt() / 7).clamp_max(6.5 / 49), SPOILT, 49 * 2.0**-114, range(16)),
        Promise(
            lambda y: 1e-5 + (y**0.25 + 1 / 30) ** 4 - y + 15.0**-4,
            (1.0, 1.0),
            15**4 * 2.0**-124,
            range(16),
            lambda y: y**0.25,
        ),
    ),
    # Signed: as dynamic8, with 4 D**0.301 values, and 0.00275 to 0. Non-negative: half of 1/16; up to 1/16; and beside
    # the value that is missing, 15/16, all of 1/16. No code is free for NaN.
    "dynamic4": (
        Promise(lambda y: (0.57 * y**0.7).clamp_max(0.45 / 4) + 0.0028, (1.0, 1.0, -0.8875), 2.0**-104, range(16)),
        Promise(
            lambda y: 1e-6 + torch.where(y < 14 / 16, (1 / 16 - y).clamp_min(1 / 32), 1 / 16),
            (1.0, 1.0),
            2.0**-104,
            range(16),
        ),
    ),
    # Half of the last of 8 significant bits; below 2**-126 half of the smallest subnormal, or up to the smallest normal
    # number.
    "bfloat16": (
        Promise(lambda y: 2.0**-8 * y + 2.0**-134, (NAN, INF, -INF)),
        Promise(lambda y: 2.0**-8 * y + 2.0**-126, (NAN, INF)),
    ),
    "float32": (Promise(lambda y: 0 * y, (NAN, INF, -INF)), Promise(lambda y: 0 * y, (NAN, INF))),
}

CODECS = [
    pytest.param(name, s, id=f"{name}-{'signed' if s else 'nonnegative'}") for name in TABLE for s in (True, False)
]
SCALED = [p for p in CODECS if formats.get(str(p.values[0])).scaled]
each_codec = pytest.mark.parametrize(("name", "signed"), CODECS)
each_scaled_codec = pytest.mark.parametrize(("name", "signed"), SCALED)

BLOCK_LENGTHS = (1, 2, 3, 100, 129, 192, 241, 250, 256)
MAGNITUDES = (1e-38, 1e-36, 1e-33, 1e-31, 1e-20, 1e-8, 1e-3, 1.0, 1e5, 1e19, 1e30, 3e38)
SMALLEST_NORMAL = 2.0**-126


def codec(name: str, signed: bool) -> Codec:
    return formats.get(name).codec(signed)


def promise(name: str, signed: bool) -> Promise:
    return TABLE[name][0 if signed else 1]


def roundtrip(c: Codec, x: Tensor) -> Tensor:
    return c.decode(*c.encode(x))


def blocks(signed: bool, length: int) -> Tensor:
    """One block for each of MAGNITUDES, which is its largest element and comes first; then heavy-tailed, with zeros."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(len(MAGNITUDES), length, generator=generator, dtype=torch.float64) ** 5
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x)
    x = x / x.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    x[:, 0] = 1.0
    x = (x * torch.tensor(MAGNITUDES, dtype=torch.float64)[:, None]).float()
    return x if signed else x.abs()


def written_codes(name: str, signed: bool) -> Tensor:
    """uint8 or int8 [1, n]."""
    return torch.tensor([list(promise(name, signed).codes)], dtype=codec(name, signed).dtype)


def assert_same(actual: Tensor | None, expected: Tensor | None) -> None:
    """Bit for bit, but any NaN is like another."""
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_within_bound(name: str, signed: bool, x: Tensor, decoded: Tensor) -> None:
    """The error of each finite element, in float64."""
    exact = torch.where(x.isfinite(), x, 0.0).double()
    error = torch.where(x.isfinite(), (decoded.double() - exact).abs(), 0.0)
    given, scaled = promise(name, signed), formats.get(name).scaled
    absmax = exact.abs().amax(-1, keepdim=True).clamp_min(given.smallest_absmax) if scaled else torch.ones(())
    excess = error - absmax * given.bound(exact.abs() / absmax)
    worst = int(excess.argmax())
    assert excess.max() <= 0, f"{exact.flatten()[worst]} was read as {decoded.flatten()[worst]}"
