"""Time one AdamW step on this machine: every format of ours beside torch, and torchao and bitsandbytes if installed."""

import argparse
import statistics
import warnings
from typing import Any

import torch

from functional_lowbit._core.report.columns import table
from functional_lowbit._refused import kind_of
from functional_lowbit.cli import _contenders as contenders
from functional_lowbit.cli._output import Mistake, Result, amount, at_least, counted, progress, said, words

HELP = "time our formats on this machine, beside torch, torchao and bitsandbytes"
EXAMPLES = """\
examples:
  functional-lowbit bench                              one leaf of 4 M elements, about a minute
  functional-lowbit bench --size 64M --leaves 40       more, and more of them
  functional-lowbit bench --only companded8,torchao    those whose name has one of these words
  functional-lowbit bench --json > this-machine.json

Every timing of a step is taken right after one of torch's fused AdamW. Their ratio is reported, the median over the
rounds with the smallest and the largest: two runs on one machine may differ by a factor of two, a ratio from within
one run hardly does. Buffers are donated. Nothing else should run meanwhile.
"""
HEAD = ("optimizer", "ns/param", "× torch fused", "min", "max", "state bytes/param", "first step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `bench`."""
    add = parser.add_argument
    add("--size", type=amount, default=4_194_304, metavar="N", help="elements of all leaves (4194304; 64M)")
    add("--leaves", type=at_least(1), default=1, metavar="N", help="how many leaves they are split into (1)")
    add("--rounds", type=at_least(1), default=7, metavar="N", help="timings of each (7)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of parameters (float32)")
    add("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    add("--threads", type=at_least(1), metavar="N", help="torch's threads (as many as it takes by itself)")
    add("--only", type=words, default=[], metavar="WORDS", help="only names with one of these words")
    add("--no-peers", action="store_true", help="leave out torchao and bitsandbytes")


def run(args: argparse.Namespace) -> Result:
    """Time what is asked for."""
    try:
        torch.zeros(1, device=args.device).tolist()  # a device without numbers has no time either
        contenders.synchronize(args.device)
    except Exception as error:  # torch raises RuntimeError, AssertionError and others
        raise Mistake(f"--device {args.device!r} cannot be used here: {said(error)[:200]}") from error
    names = _chosen(args)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads or before)
    try:
        document = _measured(args, names)
        return Result(document, _text(document))
    finally:
        torch.set_num_threads(before)


def _measured(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    of = contenders.shapes(args.size, args.leaves)
    params, failed = contenders.parameters(of), {}
    entries: dict[str, contenders.Timed] = {}
    with progress("time steps", len(names) * (args.rounds + 3)) as advance:
        for name in names:
            advance(0, f"{name}, first step")
            try:
                entries[name] = _made(name, of, args)
            except Exception as error:  # what another library raises is not ours to know
                if name not in contenders.PEERS:
                    raise
                failed[name] = f"{kind_of(error)}: {said(error)}"[:300]
            advance(3 if name in entries else 3 + args.rounds, name)
        contenders.race(entries, entries[contenders.REFERENCE], args.rounds, args.device, advance)
    return {
        "machine": contenders.machine(args.device),
        "device": args.device,
        "threads": torch.get_num_threads(),
        "versions": contenders.versions(),
        "parameters": params,
        "leaves": args.leaves,
        "shape": list(of[0]),
        "dtype": args.dtype,
        "rounds": args.rounds,
        "rows": [_row(name, entry, params) for name, entry in entries.items()],
        "failed": failed,
    }


def _made(name: str, of: list[tuple[int, ...]], args: argparse.Namespace) -> contenders.Timed:
    """A contender after its first steps."""
    params, grads = (contenders.leaves(of, getattr(torch, args.dtype), args.device, seed) for seed in (0, 1))
    with warnings.catch_warnings():
        if name in contenders.PEERS:
            warnings.simplefilter("ignore")  # what they have to say is for their own programmers
        return contenders.warm_up(contenders.makers()[name](params, grads), args.device)


def _row(name: str, entry: contenders.Timed, params: int) -> dict[str, Any]:
    return {
        "name": name,
        "ns_per_param": 1e9 * statistics.median(entry.seconds) / params,
        "ratio": statistics.median(entry.ratios),
        "ratios": entry.ratios,
        "state_bytes_per_param": entry.contender.state_bytes() / params,
        "first_step_seconds": entry.first,
    }


def _text(document: dict[str, Any]) -> str:
    lines = []
    for row in document["rows"]:
        numbers = (row["ns_per_param"], row["ratio"], min(row["ratios"]), max(row["ratios"]))
        size, first = f"{row['state_bytes_per_param']:.2f}", f"{row['first_step_seconds']:.2f} s"
        lines.append((row["name"], *(f"{x:.3g}" for x in numbers), size, first))
    n = document["leaves"]
    split = f"in {n:,} leaves of {tuple(document['shape'])}" if n > 1 else "in one leaf"
    what = f"{document['parameters']:,} parameters of {document['dtype']} {split}"
    parts = [
        document["machine"],
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        f"{what}, {counted(document['rounds'], 'round')}",
        "",
        table(HEAD, lines, HEAD[1:]),
        *(f"{name}: not measured, {why}" for name, why in document["failed"].items()),
    ]
    return "\n".join(parts)


def _chosen(args: argparse.Namespace) -> list[str]:
    names = [name for name in contenders.makers() if not (args.no_peers and name in contenders.PEERS)]
    for word in args.only:
        if not any(word in name for name in names):
            raise Mistake(f"--only {word!r} is in none of the names: {', '.join(names)}")
    return [n for n in names if n == contenders.REFERENCE or not args.only or any(word in n for word in args.only)]
