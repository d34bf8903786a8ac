"""A small model, trained by given gradients: what the tests of conversion convert."""

import torch
from helpers import random_like
from torch import Tensor, nn

SHAPES = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (3, 64), "2.bias": (3,)}  # not in alphabetical order


LR = 1e-2


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)).to(dtype)


def tree_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def grads_of(model: nn.Module, k: int) -> dict[str, Tensor]:
    return random_like(tree_of(model), 100 + k)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for k in steps:
        for (_, p), g in zip(model.named_parameters(), grads_of(model, k).values(), strict=True):
            p.grad = g
        optimizer.step()
