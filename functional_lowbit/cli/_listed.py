"""The leaves that the schema of a saved state lists, found among its entries."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit.checkpoint import _schema
from functional_lowbit.cli._numbers import Pending, is_tensor, size_of, take
from functional_lowbit.cli._output import said
from functional_lowbit.sharding import local_of


class Leaf(NamedTuple):
    """One leaf of an optimizer state, unread."""

    path: str
    parts: Mapping[str, Any]  # ending of the name, ".codes" or "" -> a tensor, read or not, or a number
    described: Mapping[str, Any] | None = None  # what the schema says of it; None for other libraries
    nonnegative: bool = False  # whether its field is known to be never below 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as they are stored."""
        return sum(bytes_of(x) for x in self.parts.values() if is_tensor(x))


def bytes_of(x: Tensor | Pending) -> int:
    """Bytes of a tensor, read or not; of the shard that is there, if it is a DTensor."""
    return size_of(local_of(x) if isinstance(x, Tensor) else x)


def described_leaves(entries: Mapping[Any, Any], text: Any, prefix: str) -> tuple[list[Leaf], list[tuple[str, str]]]:
    """The leaves that a schema lists, and what does not agree with it."""
    try:
        listed = _schema.read("schema", text)
    except ValueError as error:
        return [], [(f"{prefix}{_schema.SCHEMA}", said(error, "schema"))]
    leaves, known = [], {_schema.SCHEMA}
    for path, described in listed.items():
        parts = {ending: entries[path + ending] for ending in described["parts"] if path + ending in entries}
        known |= {path + ending for ending in described["parts"]}
        leaves.append(Leaf(prefix + path, parts, described, _is_second(path, listed)))
    return leaves, [(f"{prefix}{name}", "the schema lists no such entry") for name in entries if name not in known]


def _is_second(path: str, listed: Collection[str]) -> bool:
    """Whether it is Adam's second moment, which has a first one beside it, or a counter."""
    words = path.split(".")
    twins = (".".join([*words[:i], "mu", *words[i + 1 :]]) for i, word in enumerate(words) if word == "nu")
    return words[-1] == "step" or any(twin in listed for twin in twins)


def version_of(text: str) -> str:
    """Which version of the library wrote a schema, in words; nothing if it does not say."""
    try:
        library = json.loads(text).get("library")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return f" of version {library}" if library else ""


def text_of(raw: Any) -> Any:
    """A schema that is a tensor of bytes, as `fl.optim.Optimizer` saves it."""
    raw = take(raw)
    if not isinstance(raw, Tensor):
        return raw
    return bytes(local_of(raw).flatten().tolist()).decode(errors="replace")
