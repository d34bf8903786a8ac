"""Arithmetic that gives the same bits with and without a compiler."""

import torch
from torch import Tensor


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of a float32 tensor, for leaf functions.

    With it, a leaf function gives the same bits with and without a compiler. torch's own eager `sqrt` on the CPU goes
    through MKL's vector library, which is off by one unit in the last place on a sixth of all arguments (torch 2.13,
    `torch.rand(100_000)`), while compiled code uses the processor's exact instruction. The detour over float64 makes
    both equal.

    Args:
        x: float32, any shape.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.sqrt(torch.tensor([4.0]))
        tensor([2.])
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return x.double().sqrt().float()
