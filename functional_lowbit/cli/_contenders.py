"""Optimizers whose step is timed: this library's in each format, torch's, and those of what is installed beside it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
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
    compiled: Any = None  # our step, which knows its graphs


Maker = Callable[[list[Tensor], list[Tensor]], Contender]


def makers() -> dict[str, Maker]:
    """Name to how it is made of parameters and gradients. The reference is first."""
    found = {REFERENCE: torch_style(_adamw, fused=True), "torch foreach": torch_style(_adamw, foreach=True)}
    found["adamw"] = partial(functional, fl.adamw(LR, weight_decay=WEIGHT_DECAY))
    found |= {f"adamw {name}": partial(functional, low_bit(name)) for name in fl.formats.names() if name != "float32"}
    return found | {
        name: torch_style(partial(peer, name)) for name, (library, _) in PEERS.items() if find_spec(library)
    }


def _adamw() -> Any:
    return torch.optim.AdamW


def peer(name: str) -> Any:
    """The class that a name of PEERS stands for; its library is imported."""
    library, kind = PEERS[name]
    return getattr(import_module(f"{library}.optim"), kind)


def low_bit(format: str | fl.formats.Format, block_size: int | None = None) -> fl.GradientTransformation:
    """AdamW with moments in a format."""
    return fl.adamw8bit(LR, weight_decay=WEIGHT_DECAY, format=format, block_size=block_size)


def torch_style(optimizer_class: Callable[[], Any], **kind: bool) -> Maker:
    """An AdamW with torch's interface. Its class is asked for when it is made."""

    def make(params: list[Tensor], grads: list[Tensor]) -> Contender:
        modules = [torch.nn.Parameter(p) for p in params]
        for p, g in zip(modules, grads, strict=True):
            p.grad = g
        optimizer = optimizer_class()(modules, lr=LR, weight_decay=WEIGHT_DECAY, **kind)
        return Contender(optimizer.step, lambda: _nbytes(list(optimizer.state.values())))

    return make


def functional(tx: fl.GradientTransformation, params: list[Tensor], grads: list[Tensor], **kind: Any) -> Contender:
    """A step of this library; `kind` is for `fl.compile`."""
    step, holder = fl.compile(tx, **kind), {"params": params, "state": tx.init(params)}

    def run() -> None:
        holder["params"], holder["state"] = step(grads, holder["state"], holder["params"])

    return Contender(run, lambda: fl.describe(holder["state"]).total_bytes, step)


def _nbytes(x: Any) -> int:
    """Bytes of all tensors in a state; a tensor subclass counts as the plain tensors inside it."""
    if isinstance(x, Tensor):
        inner = getattr(x, "__tensor_flatten__", None)
        return x.nbytes if inner is None else sum(_nbytes(getattr(x, name)) for name in inner()[0])
    children = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return sum(map(_nbytes, children))


def shapes(size: int, leaves: int) -> list[tuple[int, ...]]:
    """Shapes of some leaves that have about `size` elements together: rows of 2048, or of the whole leaf if shorter."""
    each = max(1, size // leaves)
    row = min(2048, each)
    return [(max(1, each // row), row)] * leaves


def leaves(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """Normal numbers, the same for every contender."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source).to(device, dtype) for shape in shapes]


def parameters(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all leaves."""
    return sum(map(math.prod, shapes))


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
