"""What a plan is made for: any description of a model, as a tree of meta tensors."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functional_lowbit import _optree
from functional_lowbit._core.report import headers
from functional_lowbit._optree import Tree
from functional_lowbit._refused import NotInstalled, NotThere, WrongType, WrongValue
from functional_lowbit.sharding import ShardSpec, local_of, wrap

CONFIG = "config.json"


def planned_params(params: Any, dtype: torch.dtype | None = None) -> tuple[Tree, list[str]]:
    """The parameters of a tree, a module, a checkpoint or a config, on the meta device; DTensors stay DTensors.

    With them comes what there is to say about them.

    Args:
        params: As in `memory_plan`.
        dtype: In place of the parameters' own dtypes.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise WrongType(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    notes: list[str] = []
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters())  # a tied parameter has one name here
    elif isinstance(params, (str, os.PathLike)):
        params = _from_path(Path(params), notes)
    elif _is_config(params):
        params = _config_params(params)
    return _optree.map_leaves(lambda x: _on_meta(x, dtype) if isinstance(x, Tensor) else x, params), notes


def _from_path(path: Path, notes: list[str]) -> dict[str, Tensor]:
    if not path.exists():
        raise NotThere(f"there is nothing at {str(path)!r}")
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return headers.read_params(path, notes)
        if (path / CONFIG).is_file():
            return _config_params(path / CONFIG)
        raise WrongValue(f"the folder {str(path)!r} must hold safetensors files or a config.json")
    if path.name.endswith((".safetensors", headers.INDEX)):
        return headers.read_params(path, notes)
    if path.suffix == ".json":
        return _config_params(path)
    raise WrongValue(
        f"params must be a .safetensors file, an index of them, a config.json or a folder with these, got {str(path)!r}"
    )


def _on_meta(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    local = local_of(x)
    return wrap(torch.empty(local.shape, dtype=dtype or x.dtype, device="meta"), ShardSpec.of(x))


def _is_config(x: Any) -> bool:
    """Whether something is a config of transformers, without importing it."""
    names = ("PretrainedConfig", "PreTrainedConfig")
    return any(c.__name__ in names and c.__module__.startswith("transformers.") for c in type(x).__mro__)


def _config_params(source: Path | Any) -> dict[str, Tensor]:
    """The parameters of a config's model by name, in its dtype (float32 if it names none); tied ones once."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise NotInstalled(
            "a model config needs the package transformers; pip install 'functional-lowbit[hosts]'"
        ) from error
    try:
        config = source
        if isinstance(source, Path):  # told not to run code beside it, transformers does not ask on the terminal
            config = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        with torch.device("meta"):
            model = _class_of(transformers, config)._from_config(config)
    except Exception as error:
        what = repr(str(source)) if isinstance(source, Path) else type(source).__name__
        raise WrongValue(f"transformers makes no model of {what}: {error}") from error
    dtype = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in model.named_parameters()}


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that the config names, or the causal language model, or the bare model, of its kind."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[type(config)] if type(config) in mapping else transformers.MODEL_MAPPING[type(config)]
