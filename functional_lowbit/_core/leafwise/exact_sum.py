"""Sums that do not depend on their order, and so neither on the mesh nor on the number of threads.

Numbers are rounded to multiples of one power of two, so large that float64 adds as many of them as there are without
rounding. What the rounding left is treated likewise, with a smaller power. The two sums are exact, in whatever order
they are added; only what is left of that is dropped. The power of two follows from the largest magnitude and the count.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from functional_lowbit._private import in_function_transform
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.sharding._collectives import all_reduce_

CHUNK = 2**16  # elements worked on together on the CPU, so that what is made of them stays in the cache
LARGE_CHUNK = 2**24  # elsewhere, so that it needs little memory


def exact_sum(x: Tensor, dims: Sequence[int], spec: ShardSpec | None, squares: bool = False) -> Tensor:
    """The sum over some dimensions of a leaf, the same bits for every order and every mesh.

    The error is below n**3 * 2**-102 of the largest magnitude, for n numbers, and then one rounding to float64.

    Args:
        x: This rank's part, floating-point, at most 2**500 in magnitude.
        dims: Dimensions that are reduced, not negative, at least one.
        spec: Of the leaf; None for a plain tensor.
        squares: Add the squares, of float32 numbers.

    Returns:
        float64; reduced dimensions are kept with size 1.

    References:
        Demmel & Nguyen, 2013, Fast reproducible floating-point summation, https://doi.org/10.1109/ARITH.2013.9.
    """
    shape = x.shape if spec is None else spec.shape
    bits = max(1, (prod(shape[d] for d in dims) - 1).bit_length())  # n <= 2**bits
    largest, finite = _largest(x.detach(), dims)
    largest = all_reduce_(largest.double(), spec, dims, largest=True)
    if squares:
        largest = largest.square()
    exponent = torch.frexp(largest)[1].double()
    # Added and taken away again, each rounds to multiples of its last place; 1.5, so that no sum leaves the binade.
    coarse = 1.5 * torch.exp2(exponent + bits)
    fine = 1.5 * torch.exp2(exponent + 2 * bits - 53)
    sums = all_reduce_(_sums(x, dims, coarse, fine, finite, squares), spec, dims)
    return sums[0] + sums[1] + sums[2]


def _largest(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, bool]:
    """The largest finite magnitude, reduced dimensions kept, and whether all numbers are known to be finite."""
    if x.numel() == 0:
        return x.new_zeros([1 if d in dims else n for d, n in enumerate(x.shape)]), True
    magnitude = x.abs()
    largest = magnitude.amax(tuple(dims), keepdim=True)
    may_look = x.device.type == "cpu" and not in_function_transform()
    if may_look and type(x) is Tensor and bool(largest.isfinite().all()):
        return largest, True
    return torch.where(magnitude.isfinite(), magnitude, 0.0).amax(tuple(dims), keepdim=True), False


def _sums(x: Tensor, dims: Sequence[int], coarse: Tensor, fine: Tensor, finite: bool, squares: bool) -> Tensor:
    """The sums of the multiples of the two powers, and of what is not finite: float64[3, *kept dimensions]."""
    chunk = CHUNK if x.device.type == "cpu" else LARGE_CHUNK
    rows = max(1, chunk * x.shape[0] // max(1, x.numel()))
    done: list[Tensor] = []
    for start in range(0, max(1, x.shape[0]), rows):  # once for no rows
        part = slice(start, start + rows)
        own = slice(None) if coarse.shape[0] == 1 else part
        values = x[part].double()
        if squares:
            values = values.square()
        other = None
        if not finite:
            other = torch.where(values.isfinite(), 0.0, values)
            values = torch.where(values.isfinite(), values, 0.0)
        high = (values + coarse[own]) - coarse[own]
        low = ((values - high) + fine[own]) - fine[own]
        low = low.sum(tuple(dims), keepdim=True)
        lowest = torch.zeros_like(low) if other is None else other.sum(tuple(dims), keepdim=True)
        done.append(torch.stack([high.sum(tuple(dims), keepdim=True), low, lowest]))
    if 0 not in dims:
        return torch.cat(done, dim=1)
    return torch.stack(done).sum(0) if len(done) > 1 else done[0]
