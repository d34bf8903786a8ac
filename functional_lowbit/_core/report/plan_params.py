"""What a plan is made for: any description of a model, as a tree of meta tensors."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit import _optree
from functional_lowbit._core.report import headers, model_config
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import ShardSpec, local_of, wrap


def planned_params(speaker: str, params: Any, dtype: torch.dtype | None = None) -> Tree:
    """The parameters of a tree, a module, a checkpoint or a config, on the meta device; DTensors stay DTensors.

    Args:
        speaker: For errors.
        params: As in `memory_plan`.
        dtype: In place of the parameters' own dtypes.

    Raises:
        FileNotFoundError: for a path where there is nothing.
        ImportError: for a config, without the package `transformers`.
        ValueError: for a path to something else, and for a damaged file.
        TypeError: for a dtype that parameters cannot have.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{speaker}: dtype must be a floating-point torch.dtype, got {dtype!r}")
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters())  # a tied parameter has one name here
    elif isinstance(params, (str, os.PathLike)):
        params = _from_path(speaker, Path(params))
    elif model_config.is_config(params):
        params = model_config.config_params(speaker, params)
    return _optree.map_leaves(lambda x: _on_meta(x, dtype) if isinstance(x, Tensor) else x, params)


def _from_path(speaker: str, path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise FileNotFoundError(f"{speaker}: there is nothing at {str(path)!r}")
    if path.is_dir():
        if headers.has_files(path):
            return headers.read_params(speaker, path)
        if (path / model_config.CONFIG).is_file():
            return model_config.config_params(speaker, path / model_config.CONFIG)
        raise ValueError(f"{speaker}: the folder {str(path)!r} must hold safetensors files or a config.json")
    if path.name.endswith((".safetensors", headers.INDEX)):
        return headers.read_params(speaker, path)
    if path.suffix == ".json":
        return model_config.config_params(speaker, path)
    raise ValueError(
        f"{speaker}: params must be a .safetensors file, an index of them, a config.json or a folder with these, got "
        f"{str(path)!r}"
    )


def _on_meta(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    local = local_of(x)
    return wrap(torch.empty(local.shape, dtype=dtype or x.dtype, device="meta"), ShardSpec.of(x))
