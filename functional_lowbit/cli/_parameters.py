"""The parameters to plan for: of a model's files, of a checkpoint, or of shapes that are typed in."""

import re
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.report.plan_params import planned_params
from functional_lowbit.cli._numbers import is_tensor
from functional_lowbit.cli._output import Mistake, told
from functional_lowbit.cli._sections import sections, tensors_in
from functional_lowbit.cli._stores import open_store

MODEL_KEYS = ("params", "model", "model_state_dict", "state_dict", "module")  # where checkpoints keep a model
FIRST_MOMENTS = ("exp_avg", "momentum_buffer", "state1")  # of other libraries
MOST = 1 << 60  # elements: torch counts the bytes in 63 bits

Params = dict[str, Tensor]


def of_shapes(text: str, dtype: torch.dtype | None) -> Params:
    """`1000x512,512` as two parameters."""
    found: Params = {}
    for i, shape in enumerate(text.split(",")):
        sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r" *[0-9]+(x[0-9]+)* *", shape) else []
        if not sizes or prod(sizes) >= MOST:
            raise Mistake(f"--shapes must be sizes joined by x, and shapes by commas, as 1000x512,512; got {text!r}")
        found[str(i)] = _meta(sizes, dtype or torch.float32)
    return found


def of_path(path: str, dtype: torch.dtype | None, unsafe: bool) -> tuple[Params, list[str]]:
    """The parameters of a model or checkpoint on the meta device, and what there is to say about them."""
    place = Path(path)
    is_model = place.suffix in (".safetensors", ".json") or (place.is_dir() and not (place / ".metadata").is_file())
    if place.suffix == ".safetensors" and place.is_file() and any(sections(open_store(path, unsafe).tree)):
        is_model = False  # a file of fl.checkpoint.save_safetensors
    if not is_model:
        return _of_checkpoint(path, dtype, unsafe)
    with told(Mistake, (OSError, ValueError, ImportError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        return planned_params(path, dtype)


def _of_checkpoint(path: str, dtype: torch.dtype | None, unsafe: bool) -> tuple[Params, list[str]]:
    tree = open_store(path, unsafe).tree
    found = _once(_model_in(tree))
    if found:
        return {name: _meta(x.shape, dtype or x.dtype) for name, x in found.items()}, []
    owners: Params = {}
    for leaf in (leaf for section in sections(tree) for leaf in section.leaves):
        described = leaf.described
        if leaf.role == "moment" if described else leaf.name in FIRST_MOMENTS:
            shape = described["shape"] if described else leaf.parts[""].shape
            owners[leaf.owner] = _meta(shape, dtype or torch.float32)
    if not owners:
        raise Mistake(f"{path!r} holds neither a model's tensors nor an optimizer state")
    return owners, ["the parameters are those that the optimizer state has moments of"]


def _model_in(tree: Any) -> dict[str, Any]:
    """Floating-point tensors of a model: under one of the usual names, or all of a file that holds nothing else."""
    if not isinstance(tree, Mapping):
        return {}
    for key in MODEL_KEYS:
        if isinstance(tree.get(key), (Mapping, list, tuple)) and not is_tensor(tree[key]):
            return _floating(tree[key])
        flat = {n.removeprefix(f"{key}."): x for n, x in tree.items() if str(n).startswith(f"{key}.")}
        if flat:
            return _floating(flat)
    return _floating(tree) if all(is_tensor(x) for x in tree.values()) else {}


def _once(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tied parameters once: in a file of torch.save they share their memory."""
    found: dict[Any, str] = {}
    for name, x in tensors.items():
        place = (x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) and x.layout is torch.strided else 0
        found.setdefault(place if place and x.numel() and not x.is_meta else name, name)
    return {name: tensors[name] for name in found.values()}


def _floating(tree: Any) -> dict[str, Any]:
    return {name: x for name, x in tensors_in(tree) if x.dtype.is_floating_point}


def _meta(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
