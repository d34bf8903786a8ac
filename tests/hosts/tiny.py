"""What every host trains, with which optimizers, and what is looked at afterwards.

The model is made from a config and the text is one that every Python has: nothing is downloaded.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import functional_lowbit as fl

LENGTH = 32  # bytes in a row
STEPS, HALF = 6, 3  # of the optimizer; a checkpoint is saved after HALF of them
ACCUMULATE = 2  # batches of a step
BATCH = 4  # rows of a batch, on each rank
CLIP = 0.5  # below every norm that these runs have (about 2), so that it always acts
PEAK_LR = 3e-3
HYPER: dict[str, Any] = {"lr": PEAK_LR, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "torch": (torch.optim.AdamW, HYPER),
    "float32": (fl.optim.AdamW8bit, {**HYPER, "format": "float32"}),
    "8 bits": (fl.optim.AdamW8bit, HYPER),
}

# Both compute AdamW in float32, and round in another order. A step differs by a unit in the last place of a parameter,
# 6e-8 where it is between 1/2 and 1. What follows from it is an error of some 1e-8 in the gradients, the rounding of
# their largest summands (about 0.1), and each moves the next step by lr / eps times as much at most: 3e-7.
ROUNDING = STEPS * (6e-8 + PEAK_LR / HYPER["eps"] * 1e-8)


class Run(NamedTuple):
    """What is left of a training."""

    losses: list[float]  # of each batch or step, as the host gives them
    model: dict[str, Tensor]  # whole parameters
    state: dict[str, Tensor]  # whole tensors of the optimizer, by parameter's number and name; as saved
    bytes: int  # that the optimizer's state takes here
    lr: float  # in the first group, at last


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """107,000 parameters in two layers; nine tenths of them in leaves that are large enough to rest in few bits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


class Rows(Dataset[dict[str, Tensor]]):
    """The source of argparse: rows of bytes, in their order."""

    def __init__(self, count: int):
        text = Path(argparse.__file__).read_bytes()[: count * LENGTH]
        self.rows = torch.tensor(list(text)).view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def batches(count: int, part: int = 0, parts: int = 1) -> list[dict[str, Tensor]]:
    """`count` batches, of which each of `parts` ranks gets its own rows."""
    rows = Rows(count * BATCH * parts).rows.view(count, parts, BATCH, LENGTH)
    return [{"input_ids": x, "labels": x} for x in rows[:, part]]


def run(losses: list[float], model: nn.Module, optimizer: Any) -> Run:
    """Look at the end of a training. Sharded tensors are gathered: every rank must call it."""
    saved = optimizer.state_dict()["state"]
    return Run(
        losses,
        {n: _whole(p) for n, p in model.named_parameters()},
        {f"{i} {key}": _whole(x) for i, own in saved.items() for key, x in own.items() if isinstance(x, Tensor)},
        sum(_bytes(x) for own in optimizer.state.values() for key, x in own.items() if key != "schema"),
        optimizer.param_groups[0]["lr"],
    )


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _bytes(x: Any) -> int:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.numel() * local.element_size()


def equal(a: Run, b: Run) -> bool:
    """Whether parameters and state are the same bits."""
    return all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in ((a.model, b.model), (a.state, b.state))
    )


def distance(a: Run, b: Run) -> float:
    """The largest difference of a parameter."""
    return max(float((a.model[n] - b.model[n]).abs().max()) for n in a.model)


def has_learned_in_few_bits(own: Run, torchs: Run) -> None:
    """The 8-bit run beside the one of torch's AdamW: other bits, the same progress, less memory."""
    assert 0 < distance(own, torchs) <= 2 * STEPS * PEAK_LR  # a step of AdamW is at most about lr for each element
    assert own.losses[-1] < own.losses[0] - 0.3
    torch.testing.assert_close(own.losses, torchs.losses, rtol=1e-3, atol=0)  # 8-bit moments are 1% off, a step less
    assert own.bytes <= torchs.bytes / 3  # 8 of 32 bits, scales, and a tenth in small leaves, which keep float32
    assert own.lr == torchs.lr
