"""The schema of a saved state: a JSON string that says what each leaf is, and which library wrote it.

It is made of the state's classes when they are there, so that nobody who has the file alone must guess.
"""

import json
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.state.named import LIKE_PARAMS, ROLES, Named
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.version import __version__
from functional_lowbit._refused import WrongType, WrongValue
from functional_lowbit.sharding import local_of

SCHEMA = "schema"  # the one entry of a saved state that belongs to no leaf
VERSION = 3
NUMBERS = {"bool": bool, "int": int, "float": float, "str": str}  # bool before int, which it is one of
MOST = 1 << 60  # elements of a leaf: torch counts the bytes in 63 bits
VALUES = ".values"  # the part of a leaf whose blocks the mesh cuts: float32 numbers instead of codes


def describe(named: Named, leaf: Any) -> dict[str, Any]:
    """What the schema says of a leaf; `parts` maps the ending of an entry's name to the entry's dtype."""
    if isinstance(leaf, QuantizedTensor):
        return {**_role(named), **_quantized(leaf)}
    if isinstance(leaf, Tensor):
        kind = {"kind": "tensor", "shape": list(leaf.shape), "stored": "values", "parts": {"": name_of(leaf.dtype)}}
        return {**_role(named), **kind}
    kind = type(plain(leaf)).__name__
    if kind in NUMBERS:
        return {**({} if named.role in LIKE_PARAMS else _role(named)), "kind": kind, "parts": {"": kind}}
    raise WrongType(f"leaf {named.path!r} must be a tensor, a bool, a number or a string, got {type(leaf).__name__}")


def _role(named: Named) -> dict[str, Any]:
    """What the state's class says."""
    said = {"role": named.role, "field": named.field, "param": named.param, "signed": named.signed}
    return {key: value for key, value in said.items() if value is not None}


def _quantized(leaf: QuantizedTensor) -> dict[str, Any]:
    layout = leaf.layout
    parts = {".codes": name_of(layout.format.codec(layout.signed).dtype)}
    if layout.format.scaled:
        parts[".scales"] = "float32"
    return {
        "kind": "quantized",
        "format": layout.format.name,
        "signed": layout.signed,
        "block_size": layout.block_size,
        "shape": list(layout.shape),
        "stored": "values" if layout.cut else "codes",
        "parts": {VALUES: "float32"} if layout.cut else parts,
    }


def plain(leaf: Any) -> Any:
    """A number or string of a subclass (numpy's float64, an enum) as what it stands for; all else as it is."""
    if isinstance(leaf, str):
        return str.__str__(leaf)  # str() of an enum would be its name
    return next((kind(leaf) for kind in NUMBERS.values() if isinstance(leaf, kind)), leaf)


def write(leaves: dict[str, Any]) -> str:
    """The schema's text, for leaves by path."""
    return json.dumps({"version": VERSION, "library": __version__, "leaves": leaves}, sort_keys=True)


def as_bytes(text: str, device: torch.device) -> Tensor:
    """A schema's text as a tensor, uint8[n], for what keeps tensors alone."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def of_bytes(raw: Any) -> str | None:
    """The way back from `as_bytes`; None for what is no such tensor."""
    if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 1:
        return None
    return bytes(local_of(raw).tolist()).decode(errors="replace")


def read(text: Any) -> dict[str, dict[str, Any]]:
    """Leaves by path, each as `describe` says it.

    Raises:
        ValueError: for what `write` did not write, or another version of it.
    """
    if not isinstance(text, str):
        raise WrongValue(f"the entry {SCHEMA!r} must be a string, got {type(text).__name__}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongValue(f"the entry {SCHEMA!r} is no JSON: {error}; the file is damaged") from error
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise WrongValue(f"the schema must have a version, got {version!r}; the file is damaged")
    reads = f"functional_lowbit {__version__} reads version {VERSION}"
    if version < VERSION:
        raise WrongValue(
            f"the schema has version {version}, from before the first release of functional_lowbit; {reads} "
            "alone; resume with the revision that wrote the file"
        )
    if version > VERSION:
        raise WrongValue(
            f"the schema has version {version}, written by functional_lowbit "
            f"{document.get('library', '(unknown)')}; {reads}; use the newer library"
        )
    leaves = document.get("leaves")
    if not isinstance(leaves, dict):
        raise WrongValue(f"the schema must have leaves, got {type(leaves).__name__}; the file is damaged")
    return {path: _checked(path, leaf) for path, leaf in leaves.items()}


def _checked(path: str, leaf: Any) -> dict[str, Any]:
    """A leaf's description, if it says all that is asked of it."""

    def refuse(rule: str, got: str = "") -> WrongValue:
        return WrongValue(f"the schema's leaf {path!r} must {rule}{got}; the file is damaged")

    if not isinstance(leaf, dict):
        raise refuse("be a dict", f", got {leaf!r}")
    for key in _keys(leaf):
        rule, fits = KEYS[key]
        if key not in leaf:
            raise refuse(f"have {key!r}")
        if not fits(leaf[key]):
            raise refuse(f"have {rule} as {key!r}", f", got {leaf[key]!r}")
    endings = _endings(leaf)
    if endings is not None and set(leaf["parts"]) != endings:
        raise refuse(f"have the parts {sorted(endings)}", f", got {sorted(leaf['parts'])}")
    if leaf.get("role") in LIKE_PARAMS and leaf["kind"] in NUMBERS:
        raise refuse(f"be a tensor to be a {leaf['role']}", f", got {leaf['kind']}")
    if "role" in leaf and not _is_where_it_says(path, leaf):
        of = f" of parameter {leaf['param']!r}" if "param" in leaf else ""
        raise refuse("have the path of its field and parameter", f", got field {leaf['field']!r}{of}")
    return leaf


def _keys(leaf: dict[str, Any]) -> list[str]:
    """What a leaf of its kind and role must have."""
    kind, role = leaf.get("kind"), leaf.get("role")
    keys = QUANTIZED_KEYS if kind == "quantized" else NUMBER_KEYS if kind in list(NUMBERS) else TENSOR_KEYS
    said = ["role", "field"] if "role" in leaf else []
    of_a_param = ["param"] if role in LIKE_PARAMS or "param" in leaf else []
    return [*keys, *said, *of_a_param, *(["signed"] if role == "moment" else [])]


def _endings(leaf: dict[str, Any]) -> set[str] | None:
    """The endings of the names of a leaf's entries; None for a format that is not known here."""
    if leaf["kind"] != "quantized":
        return {""}
    if leaf["stored"] == "values":
        return {VALUES}
    if leaf["format"] not in formats.names():
        return None
    return {".codes", ".scales"} if formats.get(leaf["format"]).scaled else {".codes"}


def _is_where_it_says(path: str, leaf: dict[str, Any]) -> bool:
    """Whether a leaf's path ends with its field and parameter; some fields have names of their own between the two."""
    param, field = leaf.get("param"), f".{leaf['field']}"
    if param and not path.endswith(f".{param}"):
        return False
    entry = f".{path.removesuffix(f'.{param}') if param else path}"
    return f"{field}." in f"{entry}." if leaf["role"] in ("record", "number") else entry.endswith(field)


def state_of(path: str, leaf: dict[str, Any]) -> str:
    """The path of the state whose field a leaf is of: `0` of `0.mu.layers.0.weight`."""
    entry = path.removesuffix(f".{leaf['param']}") if leaf.get("param") else path
    return entry.rpartition(".")[0]


def named(path: str, leaf: dict[str, Any]) -> Named:
    """A leaf's place in a state, as the schema says it."""
    role = leaf.get("role")
    return Named(path, role, leaf.get("field"), leaf.get("param"), leaf.get("signed") if role == "moment" else None)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_size, x)) and prod(x) < MOST


def _is_size(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


KEYS = {  # what each must be
    "kind": ("a string", _is_text),
    "format": ("a string", _is_text),
    "signed": ("a bool", _is_bool),
    "block_size": ("a whole number of at least 1", lambda x: _is_size(x) and x > 0),
    "shape": ("a list of sizes", _is_shape),
    "stored": ("'codes' or 'values'", lambda x: x in ("codes", "values")),
    "parts": ("names of dtypes by endings", lambda x: isinstance(x, dict) and all(map(_is_text, x.values()))),
    "role": (f"one of {', '.join(map(repr, ROLES))}", lambda x: x in ROLES),
    "field": ("a string", _is_text),
    "param": ("a string", _is_text),
}
QUANTIZED_KEYS = ("kind", "format", "signed", "block_size", "shape", "stored", "parts")
TENSOR_KEYS = ("kind", "shape", "stored", "parts")
NUMBER_KEYS = ("kind", "parts")


def name_of(dtype: torch.dtype) -> str:
    """A dtype as the schema names it: `float32`."""
    return str(dtype).removeprefix("torch.")
