"""Adam and AdamW with moments in few bits, by torch's names and defaults."""

from typing import TypeAlias, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_lowbit.optim._options import Options
from functional_lowbit.optim._ready import Ready
from functional_lowbit.optim._rules import adam, adamw

Number: TypeAlias = float | Tensor


class AdamWBase(Ready):
    """AdamW. The classes differ in their format."""

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        weight_decay: Number = 1e-2,
        **options: Unpack[Options],
    ):
        hyperparams = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, adamw, hyperparams, options)


class AdamBase(Ready):
    """Adam. The classes differ in their format."""

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        weight_decay: Number = 0.0,
        **options: Unpack[Options],
    ):
        hyperparams = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, adam, hyperparams, options)


class AdamW8bit(AdamWBase, format="companded8"):
    """AdamW with moments in 8 bits, in place of `torch.optim.AdamW`, and of torchao's and bitsandbytes' `AdamW8bit`.

    Each param group may have its own numbers, which may change at any time, and its own `format`, `block_size`,
    `min_size`, `where` and `maximize`. Each group is a tree of its own, and counts its own steps.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either. Move and shard the model first.
        lr: Learning rate, >= 0.
        betas: Decay per step of the first and of the second moment, each in [0, 1).
        eps: Added to the denominator; in units of the gradient.
        weight_decay: Fraction of the parameter that is taken away per step and learning rate, >= 0 (decoupled).
        **options: By keyword, most of them as in `fl.low_bit` and `fl.compile`:

            * `format`, `block_size`, `min_size` (or `min_8bit_size`), `where`: how moments rest. `format="float32"`
              keeps them whole.
            * `stochastic_rounding` (or `bf16_stochastic_round`) of parameters below float32, and its `key`, which is 0
              if none is given: the same noise on every rank and in every run.
            * `maximize`: go uphill. `backend`: what the step is compiled with.
            * `amsgrad`, `capturable`, `differentiable`, `optim_bits`, `args`, `percentile_clipping`, `block_wise`,
              `is_paged`: other libraries' arguments, at the values that change nothing; another one is an error.
              `foreach` and `fused` have no effect: a step is one fused kernel in any case.

    Raises:
        TypeError, ValueError: for an argument that is out of its range or unknown, another library's at a value that is
            not supported; and what `Optimizer` refuses.

    References:
        torch.optim.AdamW; Loshchilov & Hutter, 2017, https://arxiv.org/abs/1711.05101, Algorithm 2.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> model = torch.nn.Linear(64, 64)
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0, "format": "float32"}]
        >>> optimizer = fl.optim.AdamW8bit(groups, lr=1e-3, backend="eager")
        >>> model(torch.ones(64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["0.mu.codes"].dtype, optimizer.state[model.bias]["0.mu"].dtype
        (torch.int8, torch.float32)
    """


class AdamW4bit(AdamWBase, format="root4", bits=4):
    """AdamW with moments in 4 bits. Arguments as in `AdamW8bit`, with `format="root4"`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> optimizer = fl.optim.AdamW4bit([p])
        >>> optimizer.state[p]["0.mu.codes"].shape  # two codes in a byte
        torch.Size([64, 32])
    """


class AdamWFp8(AdamWBase, format="e4m3"):
    """AdamW with moments in FP8. Arguments as in `AdamW8bit`, with `format="e4m3"`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> fl.optim.AdamWFp8([p]).param_groups[0]["format"]
        'e4m3'
    """


class Adam8bit(AdamBase, format="companded8"):
    """Adam with moments in 8 bits. Arguments as in `AdamW8bit`; the decay is added to the gradient, as in torch.

    bitsandbytes' `Adam8bit` with a `weight_decay` is an AdamW; so take `AdamW8bit` for it.

    References:
        torch.optim.Adam; Kingma & Ba, 2014, https://arxiv.org/abs/1412.6980, Algorithm 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> optimizer = fl.optim.Adam8bit([p], lr=1e-3)
        >>> optimizer.param_groups[0]["weight_decay"]
        0.0
    """


class Adam4bit(AdamBase, format="root4", bits=4):
    """Adam with moments in 4 bits. Arguments as in `Adam8bit`, with `format="root4"`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> fl.optim.Adam4bit([p]).param_groups[0]["format"]
        'root4'
    """


class AdamFp8(AdamBase, format="e4m3"):
    """Adam with moments in FP8. Arguments as in `Adam8bit`, with `format="e4m3"`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> p = torch.nn.Parameter(torch.zeros(64, 64))
        >>> fl.optim.AdamFp8([p], format="e5m2").param_groups[0]["format"]
        'e5m2'
    """
