"""What a mini-step of multi_steps costs beside a whole step, and what it costs to go on with other numbers.

Processor time of one thread, so that a busy machine matters less; the least of all rounds.

    python benchmarks/mini_steps.py --size 4194304
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import functional_lowbit as fl

K = 4


def least(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of processor time."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def mini_steps(size: int, rounds: int) -> None:
    """ns a parameter, of the first mini-steps and of the last one."""
    params = {"w": torch.randn(size // 1024, 1024)}
    grads = {"w": torch.randn(size // 1024, 1024)}
    for name, tx in {
        "adamw8bit(lr)": fl.adamw8bit(1e-3),
        "multi_steps(adamw8bit(lr), 4)": fl.multi_steps(fl.adamw8bit(1e-3), K),
        "low_bit(multi_steps(adamw(lr), 4))": fl.low_bit(fl.multi_steps(fl.adamw(1e-3), K)),
    }.items():
        step, state = fl.compile(tx), tx.init(params)
        times = [least(lambda step=step, state=state: step(grads, state, params), 1) for _ in range(K * rounds)][K:]
        mini, last = (min(times[i] for i in range(len(times)) if (i % K == K - 1) == is_last) for is_last in (0, 1))
        print(f"{name:36} mini-step {mini / size * 1e9:5.2f}  last {last / size * 1e9:5.2f} ns a parameter")


def renewal(rounds: int) -> None:
    """µs of a step of eight parameters, and of what comes on top."""
    params, grads, rate = {"w": torch.randn(8)}, {"w": torch.randn(8)}, torch.tensor(1e-3)
    plain, injected = fl.adamw8bit(1e-3), fl.inject_hyperparams(fl.adamw8bit)(1e-3)
    step, state = fl.compile(plain), plain.init(params)
    injected_step, injected_state = fl.compile(injected), injected.init(params)
    others = [fl.adamw8bit(rate) for _ in range(rounds * 10)]

    def change() -> None:
        injected_state.hyperparams["learning_rate"].mul_(0.999)
        injected_step(grads, injected_state, params)

    for name, call in {
        "adamw8bit(rate), made": lambda: fl.adamw8bit(rate),
        "step.renew": lambda: step.renew(others.pop()),
        "a step of adamw8bit": lambda: step(grads, state, params),
        "of inject_hyperparams(adamw8bit)": lambda: injected_step(grads, injected_state, params),
        "with another number each time": change,
    }.items():
        print(f"{name:36} {least(call, rounds * 10) * 1e6:6.0f} µs")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 22, help="parameters, a multiple of 1024")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mini_steps(arguments.size, arguments.rounds)
    renewal(arguments.rounds)


if __name__ == "__main__":
    main()
