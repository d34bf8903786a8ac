"""Nanoseconds a parameter of the native `adamw8bit` kernel alone, one thread, numbers in the cache, by block length.

OMP_NUM_THREADS=1 python benchmarks/native_blocks.py
"""

import statistics
import time
from typing import Any

import torch

import functional_lowbit as fl

ELEMENTS = 131_072


def main() -> None:
    torch.set_num_threads(1)
    for block in (32, 64, 96, 100, 128, 192, 250, 256, 300, 2048):
        params = {"w": torch.randn(ELEMENTS // block, block)}
        grads = {"w": torch.randn_like(params["w"]) * 1e-3}
        tx = fl.adamw8bit(1e-3, block_size=block)
        step, state = fl.compile(tx, backend="native"), tx.init(params)
        step(grads, state, params)
        kernel: Any = next(iter(step._used.values()))
        run, seconds = kernel._run, []

        def timed(*args: Any, run: Any = run, seconds: list[float] = seconds) -> None:
            start = time.perf_counter()
            run(*args)
            seconds.append(time.perf_counter() - start)

        kernel._run = timed
        for _ in range(100):
            step(grads, state, params)
        kernel._run = run
        print(f"blocks of {block:5}: {1e9 * statistics.median(seconds) / params['w'].numel():.3f} ns")


if __name__ == "__main__":
    main()
