"""The parameters of a model that Hugging Face's transformers builds from a config, on the meta device."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import NotInstalled, WrongValue

CONFIG = "config.json"


def is_config(x: Any) -> bool:
    """Whether something is a config of transformers, without importing it."""
    names = ("PretrainedConfig", "PreTrainedConfig")
    return any(c.__name__ in names and c.__module__.startswith("transformers.") for c in type(x).__mro__)


def config_params(source: Path | Any) -> dict[str, Tensor]:
    """The parameters by name, in the config's dtype (float32 if it names none); tied ones once.

    Args:
        source: The path of a `config.json`, or a config object.

    Raises:
        ImportError: without the package `transformers`.
        ValueError: for a config that transformers makes no model of.
    """
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
