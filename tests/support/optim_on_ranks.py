"""A model under fully_shard with an optimizer, and the ways in which torch's helpers save it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import world as w
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functional_lowbit as fl

SAVED_AT, MORE = 3, 2  # steps before and after the checkpoint


RULES: dict[str, Callable[[Any], Any]] = {
    "adamw8bit": lambda params: fl.optim.Optimizer(
        params, fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1)), backend="eager"
    ),
    "AdamW4bit": lambda params: fl.optim.AdamW4bit(own_formats(list(params)), lr=1e-2, backend="eager"),
}


def own_formats(pairs: list[Any]) -> list[Any]:
    """A group in the class's own format, and one in another."""
    return [
        {"params": [(n, p) for n, p in pairs if n != "2.weight"], "betas": (0.9, 0.99)},
        {"params": [(n, p) for n, p in pairs if n == "2.weight"], "format": "dynamic4", "weight_decay": 0.0},
    ]


WAYS: dict[str, dict[str, bool]] = {  # options of the helpers
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "on the CPU": {"cpu_offload": True},
    "whole": {"full_state_dict": True},
    "whole, on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "whole, flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def fresh(rule: str, seed: int, shape: tuple[int, ...] = ()) -> tuple[nn.Module, Any]:
    """129, 65 and 3 rows: uneven at 2 ranks, and the last rank of 4 holds nothing of the last layer.

    One weight is no DTensor, one parameter is frozen. `shape` is that of the mesh, in two dimensions for HSDP.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(129, 64), nn.LayerNorm(64), nn.Linear(64, 65), nn.Linear(65, 3))
    model.to(torch.bfloat16 if rule == "AdamW4bit" else torch.float32)
    model[1].bias.requires_grad_(False)
    if dist.is_initialized():
        fully_shard(model[0], mesh=w.mesh(*shape))
        fully_shard(model[2], mesh=w.mesh(*shape))
        fully_shard(model, mesh=w.mesh(*shape), ignored_params={model[1].weight})
    return model, RULES[rule](model.named_parameters())


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for k in steps:
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
            grad = w.random(tuple(p.shape), 100 * k + i, p.dtype)
            p.grad = w.shard(grad, p.device_mesh, *p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
        optimizer.zero_grad()


def bits(model: nn.Module, optimizer: Any) -> Any:
    """Of parameters and state. The schema of one mesh is that of another."""
    state = optimizer.state_dict()["state"]
    return w.fingerprint(dict(model.named_parameters())), {i: w.fingerprint(x) for i, x in state.items()}


def get(model: nn.Module, optimizer: Any, way: str) -> dict[str, Any]:
    options = StateDictOptions(**WAYS[way])
    whole = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
    return {
        "model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def through_dcp(action: Callable[..., Any], saved: Any, where: Path) -> None:
    with warnings.catch_warnings():
        # What torch 2.13 says to a process without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        action(saved, checkpoint_id=where, no_dist=not dist.is_initialized())
