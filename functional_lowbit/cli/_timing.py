"""Two steps timed in turn, so that what slows the machine slows both: the ratio is what is believed."""

import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from functional_lowbit.cli._contenders import Contender

MIN_SECONDS = 0.02  # of one timing; quick steps are repeated until they fill it
FEWEST, MOST = 3, 100  # repeats; the first step of a timing finds the caches full of another's numbers
SLOW = 20.0  # what is this many times slower than the reference is timed in the first rounds only


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
    """Reference, contender, reference, next contender, … in every round.

    A contender that is too slow is timed in the first `slow_rounds` only. `done(1, name)` is called after each.
    """
    for _ in range(rounds):
        for name, entry in entries.items():
            if len(entry.ratios) < slow_rounds or entry.ratios[0] <= SLOW:
                before = seconds_of(reference.contender, reference.repeats, device)
                entry.seconds.append(seconds_of(entry.contender, entry.repeats, device))
                entry.ratios.append(entry.seconds[-1] / before)
            done(1, name)


def machine(device: str) -> str:
    """What a timing is taken on, in words: the processor, and how much of it is used."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    vector = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or platform.machine()} ({vector})"
