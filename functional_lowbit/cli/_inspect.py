"""Look into a checkpoint: the optimizer's leaves, what their numbers are, and which of them are broken."""

import argparse
from typing import Any

from functional_lowbit._core.report.columns import table
from functional_lowbit.cli._leaves import Row, look
from functional_lowbit.cli._output import Mistake, Result, counted, progress, size
from functional_lowbit.cli._sections import Section, Unread, beside, sections
from functional_lowbit.cli._stores import Store, open_store

HELP = "look into an optimizer checkpoint, and find what is broken"
EXAMPLES = """\
examples:
  functional-lowbit inspect demo.pt             a file of torch.save, the state somewhere inside it
  functional-lowbit inspect run/last            a folder of fl.checkpoint.save
  functional-lowbit inspect state.safetensors   a file of fl.checkpoint.save_safetensors
  functional-lowbit inspect --broken demo.pt    only the broken leaves
  functional-lowbit inspect --json demo.pt | jq '.states[].leaves[] | select(.problems != [])'

States of this library, of torch.optim, torchao and bitsandbytes are understood. Leaves are read one after the other,
so a checkpoint may be larger than the memory. The exit status is 1 if anything is broken.
"""
HEAD = ("path", "format", "shape", "block", "bytes", "min", "max", "abs max", "zeros", "NaN", "Inf")
COUNTED = {"numbers": "total", "min": "low", "max": "high", "abs_max": "largest"} | {
    k: k for k in ("zeros", "nan", "inf")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `inspect`."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a file of torch.save, a safetensors file, or a checkpoint folder")
    add("--broken", action="store_true", help="list only the leaves that are broken")
    add("--no-checksums", action="store_true", help="do not compare the checksums that the file keeps")
    add("--unsafe", action="store_true", help="run code that a pickled file holds, if you trust it")


def run(args: argparse.Namespace) -> Result:
    """Look into `args.path`."""
    store = open_store(args.path, args.unsafe)
    found = list(sections(store.tree))
    if not found:
        raise Mistake(
            f"{args.path!r} holds no optimizer state: neither an entry 'schema' (fl.state_dict), nor 'state' beside "
            "'param_groups' (torch.optim)"
        )
    damaged = [] if args.no_checksums else damage(store)
    rows = look_at(found)
    bad = len(damaged) + sum(len(s.problems) for s in found) + sum(bool(r.problems) for own in rows for r in own)
    document = {
        "path": args.path,
        "kind": store.kind,
        "bytes": store.size,
        "states": [_document(section, own, args.broken) for section, own in zip(found, rows, strict=True)],
        "beside": [{"name": n, "tensors": k, "bytes": b} for n, k, b in beside(store.tree, found)],
        "damaged": damaged,
        "broken": bad,
    }
    return Result(document, _text(document), int(bad > 0))


def damage(store: Store) -> list[str]:
    """What differs from the checksums that a file keeps."""
    with progress("compare checksums", store.size) as advance:
        return store.check(advance)


def look_at(found: list[Section]) -> list[list[Row]]:
    """What there is to say of each leaf of some states; one leaf at a time is in memory."""
    with progress("read leaves", sum(section.nbytes for section in found)) as advance:

        def looked(leaf: Unread) -> Row:
            row = look(leaf)
            advance(leaf.nbytes, leaf.path)
            return row

        return [[looked(leaf) for leaf in section.leaves] for section in found]


def _document(section: Section, rows: list[Row], only_broken: bool) -> dict[str, Any]:
    return {
        "where": section.where,
        "library": section.library,
        "made_by": section.made_by,
        "bytes": sum(row.bytes for row in rows),
        "count": len(rows),
        "leaves": [_leaf(row) for row in rows if row.problems or not only_broken],
        "problems": [{"path": path, "problem": problem} for path, problem in section.problems],
    }


def _leaf(row: Row) -> dict[str, Any]:
    """As in the document: the row's fields, with what was counted at the place of its numbers."""
    own = row._asdict()
    problems = own.pop("problems")
    return {**own, **{key: getattr(row.numbers, name, None) for key, name in COUNTED.items()}, "problems": problems}


def _text(document: dict[str, Any]) -> str:
    parts = [f"{document['path']}: {document['kind']}, {size(document['bytes'])}"]
    for state in document["states"]:
        where = f"{state['where']}: " if state["where"] else ""
        made_by = f"{state['made_by']} ({state['library']})"
        parts.append(f"\n{where}{made_by}, {counted(state['count'], 'leaf')}, {size(state['bytes'])}")
        if state["leaves"]:
            parts.append(table(HEAD, [_cells(leaf) for leaf in state["leaves"]], HEAD[3:]))
        moments = [leaf for leaf in state["leaves"] if leaf["abs_max"] and leaf["role"] != "counter"]
        worst = max(moments, key=lambda leaf: leaf["abs_max"], default=None)
        if worst is not None:
            parts.append(f"largest magnitude: {worst['abs_max']:.3g}, in {worst['path']}")
    if document["beside"]:
        names = [
            f"{x['name']} ({counted(x['tensors'], 'tensor')}, {size(x['bytes'])})" if x["tensors"] else x["name"]
            for x in document["beside"]
        ]
        parts.append(f"\nbeside it: {', '.join(names)}")
    problems = [f"  {text}" for text in document["damaged"]]
    for state in document["states"]:
        prefix = f"{state['where']}: " if len(document["states"]) > 1 and state["where"] else ""
        problems += [f"  {prefix}{x['path']}: {x['problem']}" for x in state["problems"]]
        problems += [f"  {prefix}{x['path']}: {'; '.join(x['problems'])}" for x in state["leaves"] if x["problems"]]
    parts.append("\nbroken:\n" + "\n".join(problems) if problems else "\nnothing is broken")
    return "\n".join(parts)


def _cells(leaf: dict[str, Any]) -> tuple[str, ...]:
    share = leaf["zeros"] / leaf["numbers"] if leaf["numbers"] else None
    return (
        leaf["path"],
        leaf["format"],
        str(tuple(leaf["shape"])),
        "" if leaf["block_size"] is None else f"{leaf['block_size']}",
        f"{leaf['bytes']:,}",
        *("" if leaf[key] is None else f"{leaf[key]:.3g}" for key in ("min", "max", "abs_max")),
        "" if not share else f"{share:.1%}",
        *("" if not leaf[key] else f"{leaf[key]:,}" for key in ("nan", "inf")),
    )
