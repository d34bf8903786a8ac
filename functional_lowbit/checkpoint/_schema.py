"""The schema of a saved state: a JSON string that says what each leaf is, and which library wrote it."""

import json
from math import prod
from typing import Any

from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._core.version import __version__

SCHEMA = "schema"  # the one entry of a saved state that belongs to no leaf
VERSION = 2
OLDEST = 1  # which is still read
NUMBERS = {"bool": bool, "int": int, "float": float, "str": str}  # bool before int, which it is one of
SUBCLASSES = {"float64": "float", "str_": "str"}  # numpy's, which were once written under their own names
OLD_CODES = "codes of version 1"  # whose leaves were cut into blocks by other rules
MOST = 1 << 60  # elements of a leaf: torch counts the bytes in 63 bits
VALUES = ".values"  # the part of a leaf whose blocks the mesh cuts: float32 numbers instead of codes


def describe(path: str, leaf: Any) -> dict[str, Any]:
    """What the schema says of a leaf; `parts` maps the ending of an entry's name to the entry's dtype."""
    if isinstance(leaf, QuantizedTensor):
        layout = leaf.layout
        codec = layout.format.codec(layout.signed)
        if layout.cut:
            parts = {VALUES: "float32"}
        else:
            parts = {".codes": _name(codec.dtype)}
            if layout.format.scaled:
                parts[".scales"] = "float32"
        return {
            "kind": "quantized",
            "format": layout.format.name,
            "signed": layout.signed,
            "block_size": layout.block_size,
            "shape": list(layout.shape),
            "stored": "values" if layout.cut else "codes",
            "parts": parts,
        }
    if isinstance(leaf, Tensor):
        return {"kind": "tensor", "shape": list(leaf.shape), "stored": "values", "parts": {"": _name(leaf.dtype)}}
    kind = type(plain(leaf)).__name__
    if kind in NUMBERS:
        return {"kind": kind, "parts": {"": kind}}
    raise TypeError(
        f"state_dict: leaf {path!r} must be a tensor, a bool, a number or a string, got {type(leaf).__name__}"
    )


def plain(leaf: Any) -> Any:
    """A number or string of a subclass (numpy's float64, an enum) as what it stands for; all else as it is."""
    if isinstance(leaf, str):
        return str.__str__(leaf)  # str() of an enum would be its name
    return next((kind(leaf) for kind in NUMBERS.values() if isinstance(leaf, kind)), leaf)


def write(leaves: dict[str, Any]) -> str:
    """The schema's text, for leaves by path."""
    return json.dumps({"version": VERSION, "library": __version__, "leaves": leaves}, sort_keys=True)


def read(speaker: str, text: Any) -> dict[str, dict[str, Any]]:
    """Leaves by path, each as `describe` says it today.

    Raises:
        ValueError: for what `write` did not write, here or in an older version.
    """
    if not isinstance(text, str):
        raise ValueError(f"{speaker}: the entry {SCHEMA!r} must be a string, got {type(text).__name__}")
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{speaker}: the entry {SCHEMA!r} is no JSON: {error}; the file is damaged") from error
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < OLDEST:
        raise ValueError(f"{speaker}: the schema must have a version, got {version!r}; the file is damaged")
    if version > VERSION:
        raise ValueError(
            f"{speaker}: the schema has version {version}, written by functional_lowbit "
            f"{document.get('library', '(unknown)')}; functional_lowbit {__version__} reads versions {OLDEST} to "
            f"{VERSION}; use the newer library"
        )
    leaves = document.get("leaves")
    if not isinstance(leaves, dict):
        raise ValueError(f"{speaker}: the schema must have leaves, got {type(leaves).__name__}; the file is damaged")
    if version == 1:
        leaves = {path: _from_version_1(leaf) for path, leaf in leaves.items()}
    return {path: _checked(speaker, path, leaf) for path, leaf in leaves.items()}


def _checked(speaker: str, path: str, leaf: Any) -> dict[str, Any]:
    """A leaf's description, if it says all that is asked of it."""
    if not isinstance(leaf, dict):
        raise ValueError(f"{speaker}: the schema's leaf {path!r} must be a dict, got {leaf!r}; the file is damaged")
    kind = leaf.get("kind")
    if isinstance(kind, str) and kind in SUBCLASSES:
        return {"kind": SUBCLASSES[kind], "parts": {"": SUBCLASSES[kind]}}
    for key in QUANTIZED_KEYS if kind == "quantized" else NUMBER_KEYS if kind in list(NUMBERS) else TENSOR_KEYS:
        rule, fits = KEYS[key]
        if key not in leaf:
            raise ValueError(f"{speaker}: the schema's leaf {path!r} must have {key!r}; the file is damaged")
        if not fits(leaf[key]):
            raise ValueError(
                f"{speaker}: the schema's leaf {path!r} must have {rule} as {key!r}, got {leaf[key]!r}; the file is "
                "damaged"
            )
    endings = _endings(leaf)
    if endings is not None and set(leaf["parts"]) != endings:
        raise ValueError(
            f"{speaker}: the schema's leaf {path!r} must have the parts {sorted(endings)}, got "
            f"{sorted(leaf['parts'])}; the file is damaged"
        )
    return leaf


def _endings(leaf: dict[str, Any]) -> set[str] | None:
    """The endings of the names of a leaf's entries; None for a format that is not known here."""
    if leaf["kind"] != "quantized":
        return {""}
    if leaf["stored"] == "values":
        return {VALUES}
    if leaf["format"] not in formats.names():
        return None
    return {".codes", ".scales"} if formats.get(leaf["format"]).scaled else {".codes"}


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_size, x)) and prod(x) < MOST


def _is_size(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


KEYS = {  # what each must be
    "kind": ("a string", _is_text),
    "format": ("a string", _is_text),
    "signed": ("a bool", lambda x: isinstance(x, bool)),
    "block_size": ("a whole number of at least 1", lambda x: _is_size(x) and x > 0),
    "shape": ("a list of sizes", _is_shape),
    "stored": ("'codes' or 'values'", lambda x: x in ("codes", "values", OLD_CODES)),
    "parts": ("names of dtypes by endings", lambda x: isinstance(x, dict) and all(map(_is_text, x.values()))),
}
QUANTIZED_KEYS = ("kind", "format", "signed", "block_size", "shape", "stored", "parts")
TENSOR_KEYS = ("kind", "shape", "stored", "parts")
NUMBER_KEYS = ("kind", "parts")


def _from_version_1(leaf: Any) -> Any:
    """Version 1 named no parts, and kept cut leaves as the codes of each shard."""
    if not isinstance(leaf, dict):
        return leaf
    kind = leaf.get("kind")
    if kind == "tensor":
        return {**leaf, "stored": "values", "parts": {"": leaf.get("dtype")}}
    if kind != "quantized" or leaf.get("format") not in formats.names():
        return {**leaf, "stored": "codes", "parts": {"": kind}}
    format = formats.get(leaf["format"])
    parts = {".codes": _name(format.codec(leaf.get("signed", True)).dtype)}
    return {
        **leaf,
        "stored": OLD_CODES,
        "parts": {**parts, ".scales": "float32"} if format.scaled else parts,
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
