"""What training will take: bytes of weights, gradients and state by optimizer and format, for each rank of a mesh."""

import argparse
import inspect
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

import functional_lowbit as fl
from functional_lowbit._core.report.columns import table
from functional_lowbit._core.report.table import Report
from functional_lowbit.cli._output import Mistake, Result, at_least, counted, progress, size, told, words
from functional_lowbit.cli._parameters import Params, of_path, of_shapes

HELP = "how many bytes a model's training will take, by optimizer and format"
EXAMPLES = """\
examples:
  functional-lowbit plan config.json                      a Hugging Face config (needs transformers)
  functional-lowbit plan model.safetensors --ranks 8      FSDP2 on 8 ranks; only the file's header is read
  functional-lowbit plan model/ --mesh 2x4                HSDP: 2 copies of the shards of 4 ranks
  functional-lowbit plan --shapes 50257x768,768x3072 --optimizer adamw,lion --format companded8,root4
  functional-lowbit plan demo.pt --optimizer adamw4bit --leaves     each leaf of one of them
  functional-lowbit plan model/ --dtype bfloat16 --json

Nothing is allocated: the numbers are those of the real state, made without memory. Activations, buffers and what a
step needs while it runs are not counted.
"""
FAMILIES = ("adamw", "adam", "lion", "sgd")  # each `fl.{family}8bit` in any format; in float32 it is `fl.{family}`
LR = 1e-3  # no number of a plan depends on it
ALL = "all"
TORCH = "torch AdamW"
HEAD = ("optimizer", "format", "weights", "gradients", "state", "total", "bytes/param")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `plan`."""
    add, mesh = parser.add_argument, parser.add_mutually_exclusive_group()
    models = "a config.json, a safetensors file, their index, a folder with these, or a checkpoint"
    add("model", nargs="?", metavar="MODEL", help=models)
    add("--shapes", metavar="1000x512,512", help="parameters of these shapes instead of a model")
    add("--optimizer", type=words, default=["adamw"], metavar="NAMES", help="with commas, or 'all' (adamw)")
    add("--format", type=words, default=[], metavar="NAMES", help="formats of the state (all)")
    add("--block-size", type=at_least(1), metavar="N", help="elements that share a scale (each format's own)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights (the model's own)")
    mesh.add_argument(
        "--ranks", type=at_least(1), metavar="N", help="ranks that the model is sharded over, as by FSDP2"
    )
    mesh.add_argument("--mesh", type=_mesh, metavar="2x4", help="copies x shards; the last dimension shards")
    add("--leaves", action="store_true", help="every leaf of the state, for one optimizer and format")
    add("--unsafe", action="store_true", help="run code that a pickled file holds, if you trust it")


def run(args: argparse.Namespace) -> Result:
    """Plan for what is asked."""
    if (args.model is None) == (args.shapes is None):
        raise Mistake("give either a MODEL or --shapes")
    recipes = list(_recipes(args.optimizer, args.format))
    if args.leaves and len(recipes) != 1:
        raise Mistake(
            f"--leaves lists one optimizer in one format, but {len(recipes)} are asked for; choose with --optimizer "
            "and --format"
        )
    dtype = getattr(torch, args.dtype) if args.dtype else None
    typed = args.shapes is not None
    params, notes = (of_shapes(args.shapes, dtype), []) if typed else of_path(args.model, dtype, args.unsafe)
    if not params:
        raise Mistake(f"{args.model!r} has no floating-point parameters")
    mesh = args.mesh or ((args.ranks,) if args.ranks else None)
    reports = []
    with progress("plan", len(recipes) + 1) as advance, told():
        rows = [_torch_row(params, mesh)]
        for name, family, format in recipes:
            advance(1, f"{name} {format}")
            tx = getattr(fl, f"{family}8bit")(LR, format=format, block_size=args.block_size)
            reports.append(fl.memory_plan(tx, params, mesh=mesh))
            rows.append(_row(name, format, reports[-1]))
        advance(1)
    document = {
        "model": args.model or args.shapes,
        "parameters": sum(x.numel() for x in params.values()),
        "tensors": len(params),
        "dtypes": sorted({str(x.dtype).removeprefix("torch.") for x in params.values()}),
        "mesh": list(mesh) if mesh else None,
        "notes": notes,
        "rows": rows,
    }
    if not args.leaves:
        return Result(document, _text(document))
    return Result({**document, "report": reports[0].to_dict()}, _text(document, reports[0].table(all_rows=True)))


def _recipes(optimizers: Sequence[str], formats: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Name, family and format: every optimizer in every format; adamw4bit in its own, unless formats are given."""
    known = fl.formats.names()
    ready = {f"{family}{bits}": family for family in FAMILIES for bits in ("8bit", "4bit", "fp8")}
    names = {name: family for name, family in ready.items() if hasattr(fl, name)}
    families = {family: family for family in FAMILIES} | names
    formats = known if list(formats) == [ALL] else formats
    for format in formats:
        if format not in known:
            raise Mistake(f"--format must be of {', '.join(known)} or {ALL}; got {format!r}")
    for name in FAMILIES if list(optimizers) == [ALL] else optimizers:
        if name not in families:
            raise Mistake(f"--optimizer must be of {', '.join(families)} or {ALL}; got {name!r}")
        own = [inspect.signature(getattr(fl, name)).parameters["format"].default] if name in names else known
        for format in formats or own:
            yield name, families[name], format


def _row(optimizer: str, format: str, report: Report) -> dict[str, Any]:
    numbers = {name: x for name, x in report.to_dict().items() if name not in ("rows", "ranks")}
    row = {"optimizer": optimizer, "format": format, **numbers}
    if report.ranks:
        row["smallest_training_bytes"] = report.ranks[report.smallest_rank or 0].training_bytes
    return row


def _torch_row(params: Params, mesh: tuple[int, ...] | None) -> dict[str, Any]:
    """torch.optim.AdamW with float32 weights: two moments as ours in float32, and a float32 counter for each tensor."""
    in_float32 = {name: x.float() for name, x in params.items()}
    row = _row(TORCH, "float32", fl.memory_plan(fl.adamw(LR), in_float32, mesh=mesh))
    more = 4 * len(params) - 8  # our one counter is int64
    for numbers, copies in ((row, 1), (row.get("all_ranks", {}), prod(mesh or ()))):
        for key in ("state_bytes", "training_bytes", "smallest_training_bytes"):
            if key in numbers:
                numbers[key] += more * copies
    row["bytes_per_parameter"] = row["training_bytes"] / row["parameters"] if row["parameters"] else 0.0
    return row


def _text(document: dict[str, Any], leaves: str | None = None) -> str:
    mesh = document["mesh"]
    ranks = f", on {counted(prod(mesh), 'rank')} ({' x '.join(map(str, mesh))})" if mesh else ""
    tensors, dtypes = counted(document["tensors"], "tensor"), ", ".join(document["dtypes"])
    parts = [f"{document['model']}: {document['parameters']:,} parameters in {tensors}, {dtypes}{ranks}"]
    parts += document["notes"]
    if leaves is not None:
        return "\n".join([*parts, "", leaves])
    head, lines = (*HEAD, "smallest rank", "all ranks") if mesh else HEAD, []
    for row in document["rows"]:
        sizes = [size(row[f"{what}_bytes"]) for what in ("weight", "gradient", "state", "training")]
        cells = [row["optimizer"], row["format"], *sizes, f"{row['bytes_per_parameter']:.2f}"]
        if mesh:
            cells += [size(row["smallest_training_bytes"]), size(row["all_ranks"]["training_bytes"])]
        lines.append(cells)
    note = ["numbers are those of the rank that needs most"] if mesh else []
    return "\n".join([*parts, "", table(head, lines, head[2:]), *note])


def _mesh(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"must be sizes of at least 1 joined by x, as 2x4; got {text!r}")
    return tuple(int(n) for n in text.split("x"))
