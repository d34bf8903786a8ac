"""Steps that are timed in turn, so that what slows the machine slows all: ours in each format, torch's, and peers'."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit.cli._output import counted

LR, WEIGHT_DECAY = 1e-3, 0.1
REFERENCE = "torch fused"
MIN_SECONDS = 0.02  # of one timing; quick steps are repeated until they fill it
FEWEST, MOST = 3, 100  # repeats; the first step of a timing finds the caches full of another's numbers
SLOW = 20.0  # what is this many times slower than the reference is timed in the first rounds only
PEERS = ("torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8", "bitsandbytes AdamW8bit")  # library and class


class Contender(NamedTuple):
    """Something whose step is timed."""

    step: Callable[[], Any]
    state_bytes: Callable[[], int]
    compiled: Any = None  # our step, which knows its graphs


Maker = Callable[[list[Tensor], list[Tensor]], Contender]


def makers() -> dict[str, Maker]:
    """Name to how it is made of parameters and gradients. The reference is first."""
    found = {REFERENCE: torch_style(lambda: torch.optim.AdamW, fused=True)}
    found["torch foreach"] = torch_style(lambda: torch.optim.AdamW, foreach=True)
    found["adamw"] = partial(functional, fl.adamw(LR, weight_decay=WEIGHT_DECAY))
    found |= {f"adamw {name}": partial(functional, low_bit(name)) for name in fl.formats.names() if name != "float32"}
    peers = [name for name in PEERS if find_spec(name.split()[0])]
    return found | {name: torch_style(partial(peer, name)) for name in peers}


def peer(name: str) -> Any:
    """The class that a name of PEERS stands for; its library is imported."""
    library, kind = name.split()
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
    for library in sorted({name.split()[0] for name in PEERS}):
        if find_spec(library):
            try:
                found[library] = metadata.version(library)
            except metadata.PackageNotFoundError:
                found[library] = "unknown"
    return found


@dataclass
class Timed:
    """What was measured of a contender."""

    contender: Contender
    first: float  # seconds of the first step, compiling included
    repeats: int
    seconds: list[float] = field(default_factory=list)  # of one step, for each round
    ratios: list[float] = field(default_factory=list)  # to the reference's timing right before


def warm_up(contender: Contender, device: str) -> Timed:
    """Two steps, in which all compiling is done, and a third that says how often a timing repeats it."""
    first, _, seconds = (seconds_of(contender, 1, device) for _ in range(3))
    return Timed(contender, first, max(FEWEST, min(MOST, math.ceil(MIN_SECONDS / max(1e-9, seconds)))))


def seconds_of(contender: Contender, repeats: int, device: str) -> float:
    """Seconds of one step: the median of some repeats."""
    found = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        contender.step()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def race(
    entries: dict[str, Timed],
    reference: Timed,
    rounds: int,
    device: str,
    done: Callable[[int, str], None] = lambda n, name: None,
    slow_rounds: int = 2,
) -> None:
    """Reference, contender, reference, next contender, … in every round; a slow one in the first rounds only."""
    for _ in range(rounds):
        for name, entry in entries.items():
            if len(entry.ratios) < slow_rounds or entry.ratios[0] <= SLOW:
                before = seconds_of(reference.contender, reference.repeats, device)
                entry.seconds.append(seconds_of(entry.contender, entry.repeats, device))
                entry.ratios.append(entry.seconds[-1] / before)
            done(1, name)


def machine(device: str) -> str:
    """What a timing is taken on, in words: the processor, and how much of it is used."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else platform.processor() or platform.machine()
        name = f"{processor} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{name}, {counted(torch.get_num_threads(), 'thread')}"
