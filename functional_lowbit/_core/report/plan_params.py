"""What a plan is made for: any description of a model, as a tree of meta tensors."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit import _optree
from functional_lowbit._core.report import headers, model_config
from functional_lowbit._optree import Tree
from functional_lowbit._refused import NotThere, WrongType, WrongValue
from functional_lowbit.sharding import ShardSpec, local_of, wrap


def planned_params(params: Any, dtype: torch.dtype | None = None) -> tuple[Tree, list[str]]:
    """The parameters of a tree, a module, a checkpoint or a config, on the meta device; DTensors stay DTensors.

    With them comes what there is to say about them.

    Args:
        params: As in `memory_plan`.
        dtype: In place of the parameters' own dtypes.

    Raises:
        FileNotFoundError: for a path where there is nothing.
        ImportError: for a config, without the package `transformers`.
        ValueError: for a path to something else, and for a damaged file.
        TypeError: for a dtype that parameters cannot have.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise WrongType(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    notes: list[str] = []
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters())  # a tied parameter has one name here
    elif isinstance(params, (str, os.PathLike)):
        params = _from_path(Path(params), notes)
    elif model_config.is_config(params):
        params = model_config.config_params(params)
    return _optree.map_leaves(lambda x: _on_meta(x, dtype) if isinstance(x, Tensor) else x, params), notes


def _from_path(path: Path, notes: list[str]) -> dict[str, Tensor]:
    if not path.exists():
        raise NotThere(f"there is nothing at {str(path)!r}")
    if path.is_dir():
        if headers.has_files(path):
            return headers.read_params(path, notes)
        if (path / model_config.CONFIG).is_file():
            return model_config.config_params(path / model_config.CONFIG)
        raise WrongValue(f"the folder {str(path)!r} must hold safetensors files or a config.json")
    if path.name.endswith((".safetensors", headers.INDEX)):
        return headers.read_params(path, notes)
    if path.suffix == ".json":
        return model_config.config_params(path)
    raise WrongValue(
        f"params must be a .safetensors file, an index of them, a config.json or a folder with these, got {str(path)!r}"
    )


def _on_meta(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    local = local_of(x)
    return wrap(torch.empty(local.shape, dtype=dtype or x.dtype, device="meta"), ShardSpec.of(x))
