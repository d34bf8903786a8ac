"""The parameters to plan for: of a model's files, of a checkpoint, or of shapes that are typed in."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._plan_params import planned_params
from functional_lowbit.cli._mistakes import Mistake, said
from functional_lowbit.cli._pending import is_tensor
from functional_lowbit.cli._sections import OURS, Section, sections
from functional_lowbit.cli._stores import open_store

MODEL_KEYS = ("params", "model", "model_state_dict", "state_dict", "module")  # where checkpoints keep a model
MOMENTS = ("mu", "nu", "trace")  # fields whose leaves have their parameter's shape
SPEAKER = "plan"

Params = dict[str, Tensor]


def of_shapes(text: str, dtype: torch.dtype | None) -> Params:
    """`1000x512,512` as two parameters.

    Raises:
        Mistake: for what are no shapes.
    """
    found: Params = {}
    for i, shape in enumerate(text.split(",")):
        if not re.fullmatch(r"\d+(x\d+)*", shape.strip()):
            raise Mistake(f"--shapes must be sizes joined by x, and shapes by commas, as 1000x512,512; got {text!r}")
        sizes = [int(size) for size in shape.strip().split("x")]
        found[str(i)] = torch.empty(sizes, dtype=dtype or torch.float32, device="meta")
    return found


def of_path(path: str, dtype: torch.dtype | None, unsafe: bool) -> tuple[Params, list[str]]:
    """The parameters of a model or checkpoint on the meta device, and what there is to say about them.

    Raises:
        Mistake: for a path where there are none.
        Broken: for a damaged file.
    """
    place = Path(path)
    is_model = place.suffix in (".safetensors", ".json") or (place.is_dir() and not (place / ".metadata").is_file())
    if place.suffix == ".safetensors" and place.is_file() and sections(open_store(path, unsafe).tree):
        is_model = False  # a file of fl.checkpoint.save_safetensors
    if not is_model:
        return _of_checkpoint(path, dtype, unsafe)
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            found = planned_params(SPEAKER, path, dtype)
    except (OSError, ValueError, ImportError) as error:
        raise Mistake(said(error, SPEAKER)) from error
    return found, [said(w.message, SPEAKER) for w in noted if str(w.message).startswith(f"{SPEAKER}: ")]


def _of_checkpoint(path: str, dtype: torch.dtype | None, unsafe: bool) -> tuple[Params, list[str]]:
    tree = open_store(path, unsafe).tree
    found = _model_in(tree)
    if found:
        return {name: _meta(x.shape, dtype or x.dtype) for name, x in found.items()}, []
    owners: Params = {}
    for section in sections(tree):
        owners |= _owners(section, dtype)
    if not owners:
        raise Mistake(f"{path!r} holds neither a model's tensors nor an optimizer state")
    return owners, ["the parameters are those that the optimizer state has moments of"]


def _model_in(tree: Any) -> dict[str, Any]:
    """Floating-point tensors of a model: under one of the usual names, or all of a file that holds nothing else."""
    if not isinstance(tree, Mapping):
        return {}
    for key in MODEL_KEYS:
        if isinstance(tree.get(key), Mapping):
            return _floating(tree[key])
        flat = {n.removeprefix(f"{key}."): x for n, x in tree.items() if str(n).startswith(f"{key}.")}
        if flat:
            return _floating(flat)
    return _floating(tree) if all(is_tensor(x) for x in tree.values()) else {}


def _floating(tensors: Mapping[Any, Any]) -> dict[str, Any]:
    """By name, also those in dicts inside."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if isinstance(x, Mapping):
            found |= {f"{name}.{inner}": kid for inner, kid in _floating(x).items()}
        elif is_tensor(x) and x.dtype.is_floating_point:
            found[str(name)] = x
    return found


def _owners(section: Section, dtype: torch.dtype | None) -> Params:
    found: Params = {}
    for leaf in section.leaves:
        words = leaf.path.split(".")
        if section.library == OURS and leaf.described is not None:
            at = next((i for i, word in enumerate(words) if word in MOMENTS), None)
            if at is None or "shape" not in leaf.described:
                continue
            # `weight.0.mu` of an optimizer, `0.mu.weight` of a state.
            name = ".".join(words[at + 1 :]) or ".".join(words[: max(0, at - 1)])
            found.setdefault(name, _meta(leaf.described["shape"], dtype or torch.float32))
        elif leaf.described is None and words[-1] in ("exp_avg", "momentum_buffer", "state1"):
            found[".".join(words[:-1])] = _meta(leaf.parts[""].shape, dtype or torch.float32)
    return found


def _meta(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
