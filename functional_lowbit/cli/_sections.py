"""The optimizer states inside a checkpoint: whose they are, and which leaves they have."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from functional_lowbit._private import inner_of
from functional_lowbit.checkpoint import _schema
from functional_lowbit.cli._numbers import bytes_of, is_tensor, take
from functional_lowbit.cli._output import said

DEPTH = 8  # of dicts inside dicts that are looked into
BNB_NEST = "__bnb_optimizer_quant_state__"  # where bitsandbytes hides its tensors from FSDP
BNB_PARTS = ("absmax", "qmap", "new_max", "max")  # beside state1 and state2
NONNEGATIVE = {"step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "state2"}
OPTIMIZER = "fl.optim.Optimizer"
OURS, TORCH, TORCHAO, BITSANDBYTES = "functional-lowbit", "torch", "torchao", "bitsandbytes"


class Unread(NamedTuple):
    """One leaf of an optimizer state, unread."""

    prefix: str  # what its parameter's leaves begin with, `layers.0.weight.`; "" in a state that is no optimizer's
    name: str  # in its own state: `0.mu`, `exp_avg`
    parts: Mapping[str, Any]  # ending of the name, ".codes" or "" -> a tensor, read or not, or a number
    described: Mapping[str, Any] | None = None  # what the schema says of it; None for other libraries
    nonnegative: bool = False  # whether its numbers are never below 0
    role: str | None = None  # what it is in its state: "moment", "counter"; None if that is not known
    owner: str = ""  # the parameter that it is of; "" for none, or if it is not known

    @property
    def path(self) -> str:
        """Its name among all of the section."""
        return self.prefix + self.name

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as they are stored."""
        return sum(bytes_of(x) for x in self.parts.values() if is_tensor(x))


class Section(NamedTuple):
    """One optimizer state."""

    keys: tuple[Any, ...]  # its place in the checkpoint, ("optimizer",); () for the whole
    library: str
    made_by: str  # "fl.state_dict", "fl.optim.Optimizer", "state_dict of an optimizer"
    leaves: list[Unread]
    problems: list[tuple[str, str]]  # (path, what is wrong) of what belongs to no leaf
    node: Mapping[Any, Any]  # the part of the checkpoint that it is

    @property
    def where(self) -> str:
        """Its place in words: `trainer.optimizer`."""
        return ".".join(map(str, self.keys))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of its leaves, as they are stored."""
        return sum(leaf.nbytes for leaf in self.leaves)


def sections(node: Any, keys: tuple[Any, ...] = ()) -> Iterator[Section]:
    """All optimizer states in a checkpoint, however deep they sit in dicts and lists."""
    if isinstance(node, Mapping) and isinstance(node.get(_schema.SCHEMA), str):
        yield _ours(node, keys)
    elif isinstance(node, Mapping) and isinstance(node.get("state"), Mapping) and "param_groups" in node:
        yield _of_an_optimizer(node, keys)
    elif len(keys) < DEPTH and isinstance(node, (Mapping, list, tuple)):
        for name, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from sections(child, (*keys, name))


def beside(tree: Any, found: list[Section]) -> list[tuple[str, int, int]]:
    """What else a checkpoint holds: (name, tensors, bytes) for each entry of its first level without a state."""
    if not isinstance(tree, Mapping) or any(not section.keys for section in found):
        return []
    others = [name for name in tree if name not in {section.keys[0] for section in found}]
    sizes = {name: [bytes_of(x) for _, x in tensors_in(tree[name])] for name in others}
    return [(str(name), len(own), sum(own)) for name, own in sizes.items()]


def _ours(entries: Mapping[str, Any], keys: tuple[Any, ...]) -> Section:
    leaves, problems = described_leaves(entries, "")
    made_by = f"fl.state_dict{_version_of(entries[_schema.SCHEMA])}"
    inner = [leaf.path.removesuffix(_schema.SCHEMA) for leaf in leaves if leaf.path.endswith(f".{_schema.SCHEMA}")]
    for prefix in inner:  # the state_dict of an fl.optim optimizer was saved as a part of a tree
        own = {name.removeprefix(prefix): x for name, x in entries.items() if name.startswith(prefix)}
        found, bad = described_leaves(own, prefix)
        leaves = [leaf for leaf in leaves if not leaf.path.startswith(prefix)] + found
        problems += bad
    if inner:
        made_by += f", with {OPTIMIZER} inside"
    return Section(keys, OURS, made_by, leaves, problems, entries)


def described_leaves(entries: Mapping[Any, Any], prefix: str) -> tuple[list[Unread], list[tuple[str, str]]]:
    """The leaves that a schema lists, and what does not agree with it. `fl.optim.Optimizer` saves it as bytes."""
    raw = take(entries.get(_schema.SCHEMA))
    text = _schema.of_bytes(raw)
    try:
        listed = _schema.read(raw if text is None else text)
    except ValueError as error:
        return [], [(f"{prefix}{_schema.SCHEMA}", said(error))]
    leaves, known = [], {_schema.SCHEMA}
    for path, described in listed.items():
        parts = {ending: entries[path + ending] for ending in described["parts"] if path + ending in entries}
        known |= {path + ending for ending in described["parts"]}
        role, param = described.get("role"), described.get("param")
        nonnegative = described.get("signed") is False or role == "counter"
        owner = "" if param is None else param or prefix[:-1]  # an optimizer saves each parameter's state by itself
        leaves.append(Unread(prefix, path, parts, described, nonnegative, role, owner))
    return leaves, [(f"{prefix}{name}", "the schema lists no such entry") for name in entries if name not in known]


def _version_of(text: str) -> str:
    """Which version of the library wrote a schema, in words; nothing if it does not say."""
    try:
        library = json.loads(text).get("library")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return f" of version {library}" if library else ""


def _of_an_optimizer(saved: Mapping[str, Any], keys: tuple[Any, ...]) -> Section:
    """What `state_dict()` of a torch.optim.Optimizer returns, ours among them."""
    state, names = saved["state"], names_of(saved["param_groups"])
    leaves: list[Unread] = []
    problems: list[tuple[str, str]] = []
    library = TORCH
    for key, entries in state.items():
        prefix = f"{names.get(key, key)}."
        if not isinstance(entries, Mapping):
            problems.append((prefix[:-1], f"the state of a parameter must be a dict, is {type(entries).__name__}"))
            continue
        if _schema.SCHEMA in entries:
            library = OURS
            own, bad = described_leaves(entries, prefix)
        else:
            own, bad = _foreign(entries, prefix), []
        leaves += own
        problems += bad
    kinds = {_library_of(leaf) for leaf in leaves if leaf.described is None} - {TORCH}
    library = next(iter(sorted(kinds)), library)
    made_by = OPTIMIZER if library == OURS else "state_dict of an optimizer"
    return Section(keys, library, made_by, leaves, problems, saved)


def names_of(groups: Any) -> dict[Any, str]:
    """The parameters' names by their numbers, as far as groups have them."""
    found: dict[Any, str] = {}
    for group in groups if isinstance(groups, (list, tuple)) else ():
        if isinstance(group, Mapping):
            names = group.get("param_names") or group.get("names") or ()
            members = group.get("params", ())
            found.update(zip(members, map(str, names), strict=False))
    return found


def _foreign(entries: Mapping[Any, Any], prefix: str) -> list[Unread]:
    """The leaves of one parameter in another library. bitsandbytes keeps a leaf as several tensors."""
    nested = entries.get(BNB_NEST)
    if isinstance(nested, Mapping):
        entries = {**{k: v for k, v in entries.items() if k != BNB_NEST}, **nested}
    leaves = []
    for name, value in entries.items():
        number = str(name)[-1:]
        if "state1" in entries and str(name).rstrip("12") in BNB_PARTS and number in "12":
            continue  # a part of state1 or state2
        if not is_tensor(value) and not isinstance(value, (int, float)):
            continue
        parts = {"": value}
        for part in ("absmax", "qmap") if str(name) in ("state1", "state2") else ():
            if f"{part}{number}" in entries:
                parts[f".{part}"] = entries[f"{part}{number}"]
        role = "counter" if str(name) == "step" else None
        leaves.append(Unread(prefix, str(name), parts, None, str(name) in NONNEGATIVE, role, prefix[:-1]))
    return leaves


def _library_of(leaf: Unread) -> str:
    x = leaf.parts[""]
    if any(type(part).__module__.startswith("torchao.") for part in (x, inner_of(x))):
        return TORCHAO
    return BITSANDBYTES if leaf.path.endswith((".state1", ".state2")) else TORCH


def tensors_in(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors by name, read or not, however deep they sit in dicts and lists."""
    if is_tensor(node):
        yield name, node
    elif isinstance(node, (Mapping, list, tuple)):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from tensors_in(child, f"{name}.{key}" if name else str(key))
