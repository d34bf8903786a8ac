"""What the tests of fl.optim share: small models, their gradients, and training by given gradients."""

from typing import Any

import pytest
import torch
from helpers import clone, random_like
from torch import Tensor, nn

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


NUMBERS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def adamw8bit(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> fl.GradientTransformation:
    """torch's names, for the form with defaults."""
    return fl.adamw8bit(lr, *betas, eps, weight_decay=weight_decay)


def function_of(lr: Any) -> fl.GradientTransformation:
    return fl.adamw8bit(lr)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Stored leaves and small ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 64), nn.Linear(64, 3)).to(dtype)


def named(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, plain and copied."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module, seeds: range) -> list[dict[str, Tensor]]:
    return [random_like(numbers(model), seed) for seed in seeds]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for grads in gradients(model, seeds):
        for n, p in model.named_parameters():
            p.grad = grads[n]
        optimizer.step()


def state_of(optimizer: Any) -> Any:
    return clone(optimizer.state_dict())


optim = fl.optim


CLASSES = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8", "Lion8bit", "SGD8bit"]


EACH = pytest.mark.parametrize("name", CLASSES)


def ready(name: str, params: Any, **options: Any) -> Any:
    return getattr(optim, name)(params, backend="eager", **options)
