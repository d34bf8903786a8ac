"""How far two AdamW runs may be from each other whose moments are stored in blocks of other neighbours.

Interval arithmetic in float64, for each element, from what each format promises (`format_table.py`): nothing here
is measured or fitted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from format_table import TABLE, Promise
from torch import Tensor


class AdamW(NamedTuple):
    """The rule; `clip` bounds the norm of all gradients together."""

    lr: float
    b1: float
    b2: float
    eps: float
    clip: float = math.inf


class Interval(NamedTuple):
    """float64, elementwise."""

    low: Tensor
    high: Tensor

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    def mixed(self, decay: float, x: Tensor) -> "Interval":
        """decay * self + (1 - decay) * x, where x, a clipped gradient or its square, has an error of float32 itself.

        The mesh chooses the order in which squares are added in blocks of at most 256, so the norm has an error of
        2**-17, and its square one of 2**-16. The other roundings of a step are a dozen of 2**-24 or less.
        """
        low, high = (
            decay * end + (1 - decay) * x + sign * 2**-15 * (decay * end.abs() + (1 - decay) * x.abs())
            for sign, end in ((-1, self.low), (1, self.high))
        )
        return Interval(low, high)

    def stored(self, promise: Promise, signed: bool) -> "Interval":
        """Where a number may be after it was stored in a block of any neighbours in the leaf.

        The format promises an error of a * bound(x / a) at a block's absmax of a. Here x is at most m and a at most the
        leaf's largest, A; so y = x / a is anything, and a at most A and at most m / y.
        """
        m = torch.maximum(self.low.abs(), self.high.abs())
        largest = m.max()
        y = torch.logspace(-12, 0, 4001, base=10, dtype=torch.float64)
        bounds = promise.bound(y)
        below = bounds.cummax(0).values  # of y up to here
        above = (bounds / y).flip(0).cummax(0).values.flip(0)  # of y from here
        at = torch.searchsorted(y, m / largest).clamp_max(len(y) - 1)
        error = torch.maximum(largest * below[at], m * above[(at - 1).clamp_min(0)])
        low = self.low - error
        return Interval(low if signed else low.clamp_min(0), self.high + error)


def bounds(format: str, rule: AdamW, name: str, grads: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """How far two runs may be apart after these steps.

    Args:
        format: A name.
        rule: The hyperparameters. Weight decay only brings runs closer.
        name: The leaf that is looked at.
        grads: For each step the gradients of all leaves.

    Returns:
        float64, like the leaf: of "params", "mu" and "nu". Parameters must stay below 8.
    """
    signed, nonnegative = TABLE[format]
    apart = torch.zeros_like(grads[0][name], dtype=torch.float64)
    mu = nu = Interval(apart, apart)
    for k, tree in enumerate(grads):
        gs = {n: g.double() for n, g in tree.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gs.values()))
        g = gs[name] * min(1.0, rule.clip / norm)
        mu, nu = mu.mixed(rule.b1, g), nu.mixed(rule.b2, g * g)
        slow, fast = ((x / (1 - rule.b2 ** (k + 1))).sqrt() + rule.eps for x in (nu.low, nu.high))
        low, high = (x / (1 - rule.b1 ** (k + 1)) for x in mu)
        highest = torch.where(high > 0, high / slow, high / fast)
        lowest = torch.where(low < 0, low / slow, low / fast)
        apart = apart + rule.lr * (highest - lowest) + 2**-21  # float32's unit for numbers below 8
        mu, nu = mu.stored(signed, True), nu.stored(nonnegative, False)
    return {"params": apart, "mu": mu.width, "nu": nu.width}
