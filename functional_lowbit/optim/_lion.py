"""Lion with momentum in 8 bits, by bitsandbytes' names and defaults."""

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_lowbit.optim._options import Options
from functional_lowbit.optim._ready import Ready
from functional_lowbit.optim._rules import lion


class Lion8bit(Ready, format="companded8"):
    """Lion with momentum in 8 bits, in place of bitsandbytes' `Lion8bit`.

    Args:
        params: As in `AdamW8bit`.
        lr: Learning rate, >= 0.
        betas: Weight of the momentum in the step, and its decay per step, each in [0, 1).
        weight_decay: Fraction of the parameter that is taken away per step and learning rate, >= 0 (decoupled).
        **options: As in `AdamW8bit`.

    Raises:
        TypeError, ValueError: as `AdamW8bit`.

    References:
        Chen et al., 2023, https://arxiv.org/abs/2302.06675, Program 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> optimizer = fl.optim.Lion8bit([p], lr=0.5, backend="eager")
        >>> p.grad = torch.ones(64, 64)
        >>> optimizer.step()
        >>> p[0, 0].item()
        -0.5
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        **options: Unpack[Options],
    ):
        super().__init__(params, lion, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, options)
