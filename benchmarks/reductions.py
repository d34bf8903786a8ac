"""What reductions and their checks cost on one thread: medians of turns, in one process.

OMP_NUM_THREADS=1 python benchmarks/reductions.py
"""

import statistics
import time
from collections.abc import Callable

import torch

import functional_lowbit as fl
from functional_lowbit._core.leafwise.guard import Guard

TURNS = 15


def in_turn(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each; they are called one after the other, again and again."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(TURNS + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(times) for name, times in seconds.items()}


def hundred(x: torch.Tensor) -> None:
    for _ in range(100):
        x = x * 1.5


def watched(x: torch.Tensor) -> None:
    with Guard():
        hundred(x)


def first_use() -> float:
    """Milliseconds by which the first update of a new leaf function is slower than the second."""
    x, times = torch.ones(4), []
    tx = fl.leafwise(lambda g, s, p, c: (2 * g, s))
    state = tx.init(x)
    for _ in range(2):
        start = time.perf_counter()
        tx.update(x, state)
        times.append(time.perf_counter() - start)
    return 1e3 * (times[0] - times[1])


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    print(f"a new leaf function is tried: {first_use():.1f} ms, the next {first_use():.1f} ms")
    small = torch.ones(16, 8)
    each = in_turn({"plain": lambda: hundred(small), "watched": lambda: watched(small)})
    print(f"watching: {(each['watched'] - each['plain']) / 100:.1f} us an operation of {each['plain'] / 100:.1f} us")
    x = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    for dim in (0, 1, (0, 1)):
        each = in_turn(
            {
                "fl.reduce.sum": lambda dim=dim: fl.reduce.sum(x, dim),
                "x.double().sum": lambda dim=dim: x.double().sum(dim),
                "x.sum": lambda dim=dim: x.sum(dim),
            }
        )
        print(f"(4096, 1024) over {dim}: " + ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in each.items()))
    p = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    rules = {
        "centralize": fl.centralize(),
        "scale_by_trust_ratio": fl.scale_by_trust_ratio(),
        "scale_by_factored_rms": fl.scale_by_factored_rms(),
        "orthogonalize": fl.orthogonalize(),
        "scale_by_adam": fl.scale_by_adam(),
    }
    states = {name: tx.init(p) for name, tx in rules.items()}
    each = in_turn({name: lambda name=name: rules[name].update(p, states[name], p) for name in rules})
    print("update of (1024, 1024): " + ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in each.items()))


if __name__ == "__main__":
    main()
