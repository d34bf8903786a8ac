"""Time one optimizer step beside torch's fused float32 AdamW, in one run.

    python benchmarks/step_time.py [--size 8388608] [--rounds 15] [--skip-peers] [--json FILE] [--plot FILE]

Every timing of a contender is taken right after one of the reference, and their ratio is what is reported: two runs on
one machine may differ by a factor of two, a ratio from within one run hardly does. See benchmarks/README.md.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step_time_report import machine, plot, print_goals, print_table

import functional_lowbit as fl
from functional_lowbit.cli import _contenders as competing
from functional_lowbit.cli._contenders import (
    LR,
    REFERENCE,
    WEIGHT_DECAY,
    Contender,
    Maker,
    Timed,
    functional,
    leaves,
    low_bit,
    race,
    seconds_of,
    warm_up,
)  # fmt: skip

MAX_NORM = 1.0
SLOW_ROUNDS = 5  # in which a contender is timed that is much slower than the reference

GPT_LAYER = [(1152, 384), (384, 384), (1536, 384), (384, 1536), (384,), (384,)]
ODD = [(4097,), (5, 1031), (127, 129), (33, 512), (3, 2048), (129, 192), (7, 300), (640, 250), (1, 9001), (9001, 1)]
ODD += [(17, 19, 23), (64, 3, 7, 7), (2, 3, 5, 7, 11), (31,), (), (0, 8), (100, 100), (241, 241), (12, 1024), (8, 8, 8)]


def workloads(size: int) -> dict[str, list[tuple[int, ...]]]:
    """Name to shapes."""
    return {
        "one": [(max(1, size // 2048), 2048)],
        "gpt": [(8192, 384), (513, 384), *GPT_LAYER * 6, (384,), (8192, 384)],
        "small": [(256,)] * 1000,
        "odd": ODD,
    }


class ClippedAdamW(torch.optim.AdamW):
    """torch's, with the norm of the gradients clipped before each step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], MAX_NORM)
        return super().step(closure)


def contenders() -> dict[str, tuple[Maker, torch.dtype]]:
    """Name to (how to make it, dtype of parameters and gradients)."""
    clipped = fl.chain(fl.clip_by_global_norm(MAX_NORM), low_bit("companded8"))
    stochastic = {"rounding": "stochastic", "key": 0}
    fused, foreach = (competing.makers()[name] for name in (REFERENCE, "torch foreach"))
    f32, bf16 = torch.float32, torch.bfloat16
    return {
        REFERENCE: (fused, f32),
        "torch foreach": (foreach, f32),
        "torch clip + fused": (competing.torch_style(lambda: ClippedAdamW, fused=True), f32),
        "torch fused, bf16": (fused, bf16),
        "adamw": (partial(functional, fl.adamw(LR, weight_decay=WEIGHT_DECAY)), f32),
        "adamw8bit": (partial(functional, low_bit("companded8")), f32),
        "adamw8bit, inductor": (partial(functional, low_bit("companded8"), backend="inductor"), f32),
        "adamw8bit dynamic8": (partial(functional, low_bit("dynamic8")), f32),
        "adamwfp8": (partial(functional, low_bit("e4m3")), f32),
        "adamw4bit": (partial(functional, low_bit("root4")), f32),
        "adamw4bit dynamic4": (partial(functional, low_bit("dynamic4")), f32),
        "clip + adamw8bit": (partial(functional, clipped), f32),
        "adamw8bit, bf16": (partial(functional, low_bit("companded8")), bf16),
        "  with stochastic rounding": (partial(functional, low_bit("companded8"), **stochastic), bf16),
    }


PEERS = dict(zip(("torchao 8 bits", "torchao 4 bits", "torchao FP8", "bitsandbytes"), competing.PEERS, strict=True))


def peers() -> dict[str, tuple[Maker, torch.dtype]]:
    """Low-bit AdamW of other libraries, as far as they are installed (extra `parity`)."""
    made = competing.makers()
    return {own: (made[name], torch.float32) for own, name in PEERS.items() if name in made}


def make(name: str, shapes: list[tuple[int, ...]], device: str) -> Contender:
    maker, dtype = (contenders() | (peers() if name in PEERS else {}))[name]
    return maker(leaves(shapes, dtype, device, 0), leaves(shapes, dtype, device, 1))


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what native code writes to file descriptor 2: the profiler announces each start and stop there."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_extra(step: Callable[[], Any], device: str) -> int:
    """Bytes that one step has allocated, at most, beyond what was there before.

    On CUDA the allocator's own peak. On the CPU every allocation and release of torch's allocator, which compiled code
    uses too, as the profiler records them.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        with quiet_stderr(), torch.profiler.profile(profile_memory=True) as profile:
            step()
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], i, e["args"]["Bytes"]) for i, e in enumerate(events) if e.get("name") == "[memory]")
    now = peak = 0
    for *_, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def cold_first_step(name: str, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """The first step in a fresh process with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--cold", name, workload, "--size", str(args.size)]
        command += ["--threads", str(args.threads), "--device", args.device]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "FUNCTIONAL_LOWBIT_CACHE": f"{cache}/native"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the cold first step of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_cold(name: str, shapes: list[tuple[int, ...]], device: str) -> None:
    """What the fresh process does."""
    contender = make(name, shapes, device)
    seconds = seconds_of(contender, 1, device)
    if contender.compiled is not None:
        graphs = contender.compiled.graphs
    else:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(json.dumps({"seconds": seconds, "graphs": graphs, "shapes": len(set(shapes)), "leaves": len(shapes)}))


def measure(workload: str, shapes: list[tuple[int, ...]], args: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one workload: name to row."""
    makers = contenders() | ({} if args.skip_peers or workload != "one" else peers())
    entries: dict[str, Timed] = {}
    for name in makers:
        try:
            entries[name] = warm_up(make(name, shapes, args.device), args.device)
        except Exception as error:  # what another library raises is not ours to know
            if name not in PEERS:
                raise
            print(f"{name}: not measured: {error!r}")
    race(entries, entries[REFERENCE], args.rounds, args.device, slow_rounds=SLOW_ROUNDS)
    params = sum(math.prod(shape) for shape in shapes)
    largest = 4 * max(math.prod(shape) for shape in shapes)
    return {
        name: {
            "ns_per_param": 1e9 * statistics.median(entry.seconds) / params,
            "ratio": statistics.median(entry.ratios),
            "ratios": entry.ratios,
            "graphs": None if entry.contender.compiled is None else entry.contender.compiled.graphs,
            "state_bytes_per_param": entry.contender.state_bytes() / params,
            "peak_extra_bytes": (peak := peak_extra(entry.contender.step, args.device)),
            "peak_extra_leaves": peak / largest,
        }
        for name, entry in entries.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2**23, help="elements of the one large leaf")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each contender")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", default=list(workloads(1)), choices=list(workloads(1)))
    parser.add_argument("--skip-peers", action="store_true", help="leave out torchao and bitsandbytes")
    parser.add_argument("--skip-cold", action="store_true", help="leave out the first steps in fresh processes")
    parser.add_argument("--json", help="write everything measured to this file")
    parser.add_argument("--plot", help="draw the ratios into this file (needs matplotlib)")
    parser.add_argument("--cold", nargs=2, metavar=("NAME", "WORKLOAD"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    shapes = workloads(args.size)
    if args.cold:
        run_cold(args.cold[0], shapes[args.cold[1]], args.device)
        return
    title = machine(args.device)
    print(title)
    results = {}
    for workload in args.workloads:
        results[workload] = measure(workload, shapes[workload], args)
        print_table(workload, shapes[workload], results[workload])
    cold = {}
    wanted = [("adamw8bit", "gpt"), ("adamw8bit", "odd"), ("clip + adamw8bit", "gpt"), ("adamw8bit dynamic8", "gpt")]
    wanted += [("adamw4bit", "gpt"), ("adamw8bit, inductor", "gpt")]
    wanted += [] if args.skip_peers or "torchao 8 bits" not in results.get("one", {}) else [("torchao 8 bits", "one")]
    for name, workload in [] if args.skip_cold else wanted:
        cold[f"{name}, {workload}"] = {"name": name, "workload": workload, **cold_first_step(name, workload, args)}
    print_goals(results, cold)
    if args.json:
        kept = {"machine": title, "size": args.size, "results": results, "cold": cold}
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")
    if args.plot:
        plot(results, title, args.plot)


if __name__ == "__main__":
    main()
