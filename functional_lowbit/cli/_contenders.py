"""What `bench` times: one AdamW step of this library in each format, and of what is installed beside it."""

import math
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl

LR, WEIGHT_DECAY = 1e-3, 0.1
REFERENCE = "torch fused"
PEERS = {
    "torchao AdamW8bit": ("torchao", "AdamW8bit"),
    "torchao AdamW4bit": ("torchao", "AdamW4bit"),
    "torchao AdamWFp8": ("torchao", "AdamWFp8"),
    "bitsandbytes AdamW8bit": ("bitsandbytes", "AdamW8bit"),
}


class Contender(NamedTuple):
    """Something whose step is timed."""

    step: Callable[[], Any]
    state_bytes: Callable[[], int]


Maker = Callable[[list[Tensor], list[Tensor]], Contender]


def makers() -> dict[str, Maker]:
    """Name to how it is made of parameters and gradients. The reference is first."""

    def torch_adamw(**kind: Any) -> Maker:
        return lambda p, g: _torch_style(lambda m: torch.optim.AdamW(m, LR, weight_decay=WEIGHT_DECAY, **kind), p, g)

    def ours(format: str | None) -> Maker:
        if format is None:
            return lambda p, g: _functional(fl.adamw(LR, weight_decay=WEIGHT_DECAY), p, g)
        return lambda p, g: _functional(fl.adamw8bit(LR, weight_decay=WEIGHT_DECAY, format=format), p, g)

    def peer(library: str, kind: str) -> Maker:
        def make(p: list[Tensor], g: list[Tensor]) -> Contender:
            optimizer = getattr(import_module(f"{library}.optim"), kind)
            return _torch_style(lambda m: optimizer(m, lr=LR, weight_decay=WEIGHT_DECAY), p, g)

        return make

    found = {REFERENCE: torch_adamw(fused=True), "torch foreach": torch_adamw(foreach=True), "adamw": ours(None)}
    found |= {f"adamw {name}": ours(name) for name in fl.formats.names() if name != "float32"}
    return found | {name: peer(*where) for name, where in PEERS.items() if find_spec(where[0])}


def shapes(size: int, leaves: int) -> list[tuple[int, ...]]:
    """Shapes of some leaves that have about `size` elements together: rows of 2048, or of the whole leaf if shorter."""
    each = max(1, size // leaves)
    row = min(2048, each)
    return [(max(1, each // row), row)] * leaves


def leaves(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """Normal numbers, the same for every contender."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source).to(device, dtype) for shape in shapes]


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {"functional-lowbit": fl.__version__, "torch": torch.__version__}
    for library in sorted({library for library, _ in PEERS.values()}):
        if find_spec(library):
            try:
                found[library] = metadata.version(library)
            except metadata.PackageNotFoundError:
                found[library] = "unknown"
    return found


def parameters(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all leaves."""
    return sum(math.prod(shape) for shape in shapes)


def _torch_style(make: Callable[[list[Any]], Any], params: list[Tensor], grads: list[Tensor]) -> Contender:
    modules = [torch.nn.Parameter(p) for p in params]
    for p, g in zip(modules, grads, strict=True):
        p.grad = g
    optimizer = make(modules)
    return Contender(optimizer.step, lambda: _nbytes(list(optimizer.state.values())))


def _functional(tx: fl.GradientTransformation, params: list[Tensor], grads: list[Tensor]) -> Contender:
    step, holder = fl.compile(tx), {"params": params, "state": tx.init(params)}

    def run() -> None:
        holder["params"], holder["state"] = step(grads, holder["state"], holder["params"])

    return Contender(run, lambda: fl.describe(holder["state"]).total_bytes)


def _nbytes(x: Any) -> int:
    """Bytes of all tensors in a state; a tensor subclass counts as the plain tensors inside it."""
    if isinstance(x, Tensor):
        inner = getattr(x, "__tensor_flatten__", None)
        if inner is not None:
            return sum(_nbytes(getattr(x, name)) for name in inner()[0])
        return x.nbytes
    children = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return sum(_nbytes(child) for child in children)
