"""The table of docs/conversion.md: what a conversion changes, from each library into each format.

    PYTHONPATH=. python benchmarks/conversion_table.py

Needs the environment of `make parity`. Each optimizer of another library takes ten steps with normal gradients; then
its state is converted, and compared with the numbers that it stood for: norm of the difference over the norm, of the
first and of the second moment. `=` is no difference but the last bit or two (4e-7) of a code's value.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import functional_lowbit as fl
from functional_lowbit.cli._contenders import PEERS, peer

LR, STEPS = 1e-2, 10
SHAPES = {"rows of 512": (32, 512), "rows of 96": (128, 96)}
SMALLEST_ERROR = 4e-7


def adams() -> dict[str, Any]:
    """Name to optimizer."""
    return {"torch AdamW": torch.optim.AdamW, **{name: peer(name) for name in PEERS}}


def train(make: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """A state_dict."""
    source = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(shape, generator=source))
    optimizer = make([p], lr=LR)
    for _ in range(STEPS):
        p.grad = torch.randn(shape, generator=source)
        optimizer.step()
    return optimizer.state_dict()


def error(ours: Any, wanted: Tensor) -> str:
    """Relative, in the norm."""
    ours = ours.dequantize() if isinstance(ours, fl.QuantizedTensor) else ours
    worst = float((ours - wanted).norm() / wanted.norm())
    return "=" if worst <= SMALLEST_ERROR else f"{100 * worst:.2g}%"


def row(name: str, saved: dict[str, Any], shape: tuple[int, ...], size: int | None = None) -> str:
    """One line of the table."""
    params = {"0": torch.zeros(shape)}
    exact = fl.convert.from_saved(saved, fl.adamw(LR).init(params))[0]
    cells = []
    for format in fl.formats.names():
        tx = fl.low_bit(fl.adamw(LR), format, block_size=size, min_size=0)
        state = fl.convert.from_saved(saved, tx.init(params))[0]
        pair = error(state.mu["0"], exact.mu["0"]), error(state.nu["0"], exact.nu["0"])
        cells.append("=" if pair == ("=", "=") else " / ".join(pair))
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print it."""
    print(f"| from | {' | '.join(fl.formats.names())} |")
    print("|---" * (1 + len(fl.formats.names())) + "|")
    for name, make in adams().items():
        for words, shape in SHAPES.items():
            print(row(f"{name}, {words}", train(make, shape), shape))
    file = Path(__file__).parents[1] / "tests" / "convert" / "flashoptim.pt"
    flash = torch.load(file, weights_only=True)["adamw, bfloat16, 24 bits"]["saved"]
    one = {
        "state": {0: flash["state"][0]},
        "param_groups": [{**flash["param_groups"][0], "params": [0]}],
    }
    print(row("FlashOptim AdamW, rows of 64", one, (2, 64)))
    print(row("the same, `block_size=32`", one, (2, 64), 32))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # torchao lists extensions that it was built without
    warnings.simplefilter("ignore")
    with torch.compiler.set_stance("force_eager"):
        main()
