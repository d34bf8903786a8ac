"""What the tests of offload share: trees, and a step that is staged by threads."""

from typing import Any

import torch
from helpers import random_like
from threads import Threads

import functional_lowbit as fl
from functional_lowbit.transforms._offload import offloaded

SIZE = 30_000  # bytes of a buffer: w, of 98304 elements, takes seven and more in every format but the smallest


def make_params(dtype: torch.dtype = torch.float32) -> Any:
    shapes = {"w": torch.empty(256, 384), "v": torch.empty(33, 257), "b": torch.empty(3), "t": torch.empty(20_000)}
    return {**random_like(shapes, 0, dtype), "column": random_like(torch.empty(384, 40), 5, dtype).t()}


def make_grads(params: Any, missing: str = "") -> list[Any]:
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    return [{**g, missing: None} for g in grads] if missing else grads


def staged(tx: fl.GradientTransformation, seed: int = 0) -> fl.GradientTransformation:
    """Offloaded, from one part of the CPU's memory to another, by threads."""
    return offloaded(tx, SIZE, lambda device: Threads(seed))
