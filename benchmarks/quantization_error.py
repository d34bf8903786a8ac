"""Errors of rounding, recorded while the demo's model trains, and what recording costs.

    python benchmarks/quantization_error.py --plot docs/quantization_error.png     # about 3 minutes on 2 cores
    python benchmarks/quantization_error.py --formats companded8 --width 64 --steps 20 --every 5

For each format: the error of each moment and of the update, in percent, of the median and of the worst leaf at the last
look. Then the time of a step: without a recorder, with one between its looks, and of a look, taken in turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import functional_lowbit as fl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import byte_lm
from byte_lm import B1, B2, CLIP, DECAY, EPS, decays

from functional_lowbit._core.report.recorded import ErrorReport


def train(format: str, args: argparse.Namespace) -> list[ErrorReport]:
    """The reports of one training, one for each look."""
    model = byte_lm.build_model(args)
    params = dict(model.named_parameters())
    adamw = fl.adamw8bit(byte_lm.schedule(args), B1, B2, EPS, weight_decay=DECAY, mask=decays, format=format)
    tx = fl.chain(fl.clip_by_global_norm(CLIP), fl.record_quantization_error(adamw, every=args.every))
    state, step = tx.init(params), fl.compile(tx)
    text = byte_lm.read_sources()[0]
    history = []
    for t in range(args.steps):
        model.zero_grad()
        model(byte_lm.get_batch(text, args.seed, t, args)).backward()
        params, state = step({name: p.grad for name, p in params.items()}, state, params)
        if (t + 1) % args.every == 0:
            history.append(fl.recorded_quantization_error(state))
    return history


def print_errors(format: str, report: ErrorReport) -> None:
    cells = []
    for what in ("mu", "nu", "update"):
        errors = {row.path: 100 * row.error for row in report.rows if row.what == what and row.format == format}
        worst = max(errors, key=errors.__getitem__)
        cells.append(f"{statistics.median(errors.values()):.2f} / {errors[worst]:.2f} ({worst})")
    print(f"| `{format}` | {' | '.join(cells)} |", flush=True)


def print_times(args: argparse.Namespace, rounds: int = 15) -> None:
    """Each kind of step in turn, on parameters of the model's shapes."""
    params = {name: p.detach().clone() for name, p in byte_lm.build_model(args).named_parameters()}
    grads = {name: torch.randn(p.shape) for name, p in params.items()}
    kinds: dict[str, Callable[[], Any]] = {}
    for name, every in (("without a recorder", 0), ("between looks", 10**9), ("a look", 1)):
        inner = fl.adamw8bit(1e-3)
        tx = fl.chain(fl.clip_by_global_norm(CLIP), fl.record_quantization_error(inner, every) if every else inner)
        own = {n: p.clone() for n, p in params.items()}
        kinds[name] = partial(fl.compile(tx), grads, tx.init(own), own)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for name in [*kinds, *rounds * list(kinds)]:
        start = time.perf_counter()
        kinds[name]()
        times[name].append(time.perf_counter() - start)
    first = times["without a recorder"][1:]  # the first of each compiles
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[1:], first, strict=True))
        print(f"{name}: {1000 * statistics.median(seconds[1:]):.2f} ms, {ratio:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="companded8,dynamic8,e4m3,root4", help="separated by commas")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="a picture of the first format's errors")
    args = parser.parse_args()
    args.device, args.fsdp = "cpu", False
    print("| format | mu, %: median / worst leaf | nu | update |\n|---|---|---|---|")
    for i, format in enumerate(args.formats.split(",")):
        history = train(format, args)
        print_errors(format, history[-1])
        if args.plot and i == 0:
            fl.plot.quantization_error(history, args.plot)
    print_times(args)


if __name__ == "__main__":
    main()
