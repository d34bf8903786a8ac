"""SGD with momentum in 8 bits, by torch's names and defaults."""

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_lowbit.optim._options import Options
from functional_lowbit.optim._ready import Ready
from functional_lowbit.optim._rules import sgd


class SGD8bit(Ready, format="companded8"):
    """SGD with momentum in 8 bits, in place of `torch.optim.SGD` and of bitsandbytes' `SGD8bit`.

    Args:
        params: As in `AdamW8bit`.
        lr: Learning rate, >= 0.
        momentum: Decay per step of the sum of gradients, >= 0. With 0 there is no sum, and nothing is stored; whether
            there is one cannot be changed later.
        dampening: Part of each gradient but the first that does not enter the sum.
        weight_decay: Fraction of the parameter that is added to the gradient, >= 0.
        nesterov: Look one step ahead in the momentum; needs momentum > 0 and no dampening.
        **options: As in `AdamW8bit`.

    Raises:
        TypeError, ValueError: as `AdamW8bit`, and for `nesterov` without momentum or with dampening.

    References:
        torch.optim.SGD, https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> optimizer = fl.optim.SGD8bit([p], lr=0.5, momentum=0.9, backend="eager")
        >>> p.grad = torch.ones(64, 64)
        >>> optimizer.step()
        >>> p[0, 0].item()
        -0.5
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.0,
        dampening: float | Tensor = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ):
        hyperparams = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, sgd, hyperparams, options)
