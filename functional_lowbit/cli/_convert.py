"""Convert the optimizer states of a checkpoint to another format of this library, or to torch.optim in float32."""

import argparse
from typing import Any

import functional_lowbit as fl
from functional_lowbit import formats
from functional_lowbit.cli._conversions import MIN_SIZE, Converted, Target, to_format, to_torch
from functional_lowbit.cli._inspect import damage, look_at
from functional_lowbit.cli._output import Broken, Mistake, Result, at_least, counted, progress, said, size, told
from functional_lowbit.cli._rewritten import check_place, replaced, write
from functional_lowbit.cli._sections import OPTIMIZER, Section, sections
from functional_lowbit.cli._stores import FOLDER, TORCH, Store, open_store

HELP = "convert an optimizer checkpoint to another format, or to torch.optim"
EXAMPLES = """\
examples:
  functional-lowbit convert demo.pt small.pt --to root4         the whole file, its optimizer state in 4 bits
  functional-lowbit convert run/last run/half --to dynamic8     a folder of fl.checkpoint.save
  functional-lowbit convert torch.pt ours.pt --to companded8    from torch, torchao, bitsandbytes or FlashOptim
  functional-lowbit convert ours.pt torch.pt --to torch         back to torch.optim, float32

A state of this library keeps its structure: each moment is written in the format, under the name that it had. A state
of another library becomes one of fl.adamw8bit, fl.lion8bit or fl.sgd8bit. What else is in the file is copied. The
result is written beside its place, read again, compared bit for bit, and renamed; nothing is overwritten without
--force.
"""
TO_TORCH = "torch"
LIBRARIES = ("torch", "torchao", "bitsandbytes", "flashoptim", "functional_lowbit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `convert`."""
    add = parser.add_argument
    add("source", metavar="SRC", help="a file of torch.save, a safetensors file, a checkpoint folder")
    add("target", metavar="DST", help="where to write; the same kind of file or folder")
    add("--to", required=True, choices=[*formats.names(), TO_TORCH], help="a format, or torch.optim")
    add("--from", dest="library", choices=["auto", *LIBRARIES], default="auto", help="library (auto)")
    add("--block-size", type=at_least(1), metavar="N", help="elements that share a scale (the format's own)")
    smaller = f"smaller leaves stay in float32 ({MIN_SIZE})"
    add("--min-size", type=at_least(0), default=MIN_SIZE, metavar="N", help=smaller)
    add("--force", action="store_true", help="replace what is at DST")
    add("--no-checksums", action="store_true", help="do not compare the checksums that SRC keeps")
    add("--unsafe", action="store_true", help="run code that a pickled file holds, if you trust it")


def run(args: argparse.Namespace) -> Result:
    """Convert `args.source` to `args.target`."""
    check_place(args.source, args.target, args.force)
    store = open_store(args.source, args.unsafe)
    found = list(sections(store.tree))
    if not found:
        raise Mistake(f"{args.source!r} holds no optimizer state; see functional-lowbit inspect")
    if store.kind == FOLDER and any(section.where for section in found):
        raise Mistake(
            f"the state at {found[0].where!r} of {args.source!r} was not saved by fl.checkpoint.save; load it with "
            "torch.distributed.checkpoint, and convert it with fl.convert.from_saved"
        )
    libraries = []
    for section in found:
        try:
            libraries.append(fl.convert.library_of(section.node))
        except (TypeError, ValueError) as error:
            raise Broken(f"{section.where or args.source!r}: {said(error)}") from error
        if args.library not in ("auto", libraries[-1]):
            raise Mistake(f"--from {args.library}: the state in {args.source!r} is from {libraries[-1]}")
    _refuse_broken(args, store, found)
    if any(section.made_by.endswith(f"{OPTIMIZER} inside") for section in found):
        raise Mistake(
            "the state is that of an fl.optim optimizer inside a tree of fl.checkpoint; load it into one of the other "
            "format, with optimizer.load_state_dict(..., convert=True)"
        )
    target = Target(formats.get("float32" if args.to == TO_TORCH else args.to), args.block_size, args.min_size)
    with progress("convert", sum(section.nbytes for section in found)) as advance, told():
        made = [to_torch(s) if args.to == TO_TORCH else to_format(s, target, advance) for s in found]
    kind, tree = store.kind, made[0].node
    if kind == TORCH:
        tree = store.tree
        for section, converted in zip(found, made, strict=True):
            tree = replaced(tree, section.keys, converted.node)
    elif args.to == TO_TORCH:  # which only torch.save keeps
        kind = TORCH
    write(kind, args.target, tree, args.unsafe)
    states = [_document(s, library, c) for s, library, c in zip(found, libraries, made, strict=True)]
    document = {"source": args.source, "target": args.target, "kind": kind, "to": args.to, "states": states}
    document |= {"verified": True}
    return Result(document, _text(document))


def _refuse_broken(args: argparse.Namespace, store: Store, found: list[Section]) -> None:
    """What is broken would be whole afterwards: the result has checksums, codes and scales of its own."""
    for text in [] if args.no_checksums else damage(store):
        raise Broken(f"{text}; see functional-lowbit inspect")
    for section, rows in zip(found, look_at(found), strict=True):
        for path, problem in [*section.problems, *((row.path, x) for row in rows for x in row.problems)]:
            raise Broken(f"{path!r}: {problem}; see functional-lowbit inspect")


def _document(section: Section, library: str, converted: Converted) -> dict[str, Any]:
    leaves = [
        {"path": path, "from": x.before, "to": x.after, "bytes_before": x.bytes_before, "bytes": x.bytes_after}
        | {"relative_error": x.error}
        for path, x in converted.made.items()
    ]
    worst = max(leaves, key=lambda leaf: leaf["relative_error"], default=None)
    return {
        "where": section.where,
        "from": library,
        "bytes_before": section.nbytes,
        "bytes": sum(x.bytes_after for x in converted.made.values()),
        "changed": sum(x.before != x.after or x.error > 0 for x in converted.made.values()),
        "largest_relative_error": worst["relative_error"] if worst else 0.0,
        "worst_leaf": worst["path"] if worst and worst["relative_error"] else None,
        "how_to_load": converted.how_to_load,
        "leaves": leaves,
    }


def _text(document: dict[str, Any]) -> str:
    parts = [f"{document['source']} -> {document['target']}: {document['kind']}"]
    for state in document["states"]:
        where = f"{state['where']}: " if state["where"] else ""
        sizes = f"{size(state['bytes_before'])} -> {size(state['bytes'])}"
        total = counted(len(state["leaves"]), "leaf")
        parts.append(f"{where}{state['from']} -> {document['to']}, {state['changed']:,} of {total} changed, {sizes}")
        if state["worst_leaf"]:
            error = f"{100 * state['largest_relative_error']:.3g}%"
            parts.append(f"largest relative error: {error} of the leaf's norm, in {state['worst_leaf']}")
        else:
            parts.append("largest relative error: 0, all numbers are exact")
        parts.append(state["how_to_load"])
    return "\n".join([*parts, "written, read again and compared: every bit is right"])
