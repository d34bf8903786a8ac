"""with_format: one recipe more, which differs from another in the default of its `format`."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from functional_lowbit._core.contract.base import GradientTransformation, Hyper
from functional_lowbit.transforms._adam import adam, adamw
from functional_lowbit.transforms._lion import lion
from functional_lowbit.transforms._low_bit import FormatChoice, Where, low_bit
from functional_lowbit.transforms._masked import Mask
from functional_lowbit.transforms._sgd import sgd

P = ParamSpec("P")


def with_format(
    recipe: Callable[P, GradientTransformation], name: str, format: str, doc: str
) -> Callable[P, GradientTransformation]:
    """A recipe under another name, with another default format.

    Args:
        recipe: A function with the keyword-only argument `format`. It is called with the same arguments.
        name: Of the variable that the result is assigned to, in the module of `recipe`.
        format: The new default.
        doc: The new docstring.
    """

    @functools.wraps(recipe)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        kwargs.setdefault("format", format)
        return recipe(*args, **kwargs)

    signature = inspect.signature(recipe)
    parameters = [p.replace(default=format) if p.name == "format" else p for p in signature.parameters.values()]
    renamed.__name__ = renamed.__qualname__ = name
    renamed.__doc__ = doc
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what help() shows
    return renamed


def sgd8bit(
    learning_rate: Hyper,
    momentum: Hyper = 0.9,
    nesterov: bool = False,
    *,
    format: FormatChoice = "companded8",
    block_size: int | None = None,
    where: Where | None = None,
) -> GradientTransformation:
    """SGD with momentum in 8 bits: `low_bit(sgd(...), format)`. Arguments as in `sgd` and `low_bit`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.sgd8bit(0.1).init({"w": torch.zeros(64, 64)})[0].trace["w"]
        QuantizedTensor(companded8, shape=(64, 64), block_size=256)
    """
    return low_bit(sgd(learning_rate, momentum, nesterov), format, block_size=block_size, where=where)


def adam8bit(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    eps_root: Hyper = 0.0,
    *,
    nesterov: bool = False,
    format: FormatChoice = "companded8",
    block_size: int | None = None,
    where: Where | None = None,
) -> GradientTransformation:
    """Adam with moments in 8 bits: `low_bit(adam(...), format)`. Arguments as in `adam` and `low_bit`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> state = fl.adam8bit(0.1).init({"w": torch.zeros(64, 64)})
        >>> state[0].mu["w"]
        QuantizedTensor(companded8, shape=(64, 64), block_size=256)
    """
    tx = adam(learning_rate, b1, b2, eps, eps_root, nesterov=nesterov)
    return low_bit(tx, format, block_size=block_size, where=where)


def adamw8bit(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.999,
    eps: Hyper = 1e-8,
    eps_root: Hyper = 0.0,
    weight_decay: Hyper = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    format: FormatChoice = "companded8",
    block_size: int | None = None,
    where: Where | None = None,
) -> GradientTransformation:
    """AdamW with moments in 8 bits: `low_bit(adamw(...), format)`. Arguments as in `adamw` and `low_bit`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> state = fl.adamw8bit(0.1, format="dynamic8").init({"w": torch.zeros(64, 64)})
        >>> state[0].nu["w"]
        QuantizedTensor(dynamic8, shape=(64, 64), block_size=256)
    """
    tx = adamw(learning_rate, b1, b2, eps, eps_root, weight_decay, mask, nesterov=nesterov)
    return low_bit(tx, format, block_size=block_size, where=where)


adam4bit = with_format(
    adam8bit,
    "adam4bit",
    "root4",
    """Adam with moments in 4 bits: `adam8bit(..., format="root4")`, in blocks of 128 elements.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.adam4bit(0.1).init({"w": torch.zeros(64, 64)})[0].mu["w"]
        QuantizedTensor(root4, shape=(64, 64), block_size=128)
    """,
)


adamw4bit = with_format(
    adamw8bit,
    "adamw4bit",
    "root4",
    """AdamW with moments in 4 bits: `adamw8bit(..., format="root4")`, in blocks of 128 elements.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> state = fl.adamw4bit(0.1).init({"w": torch.zeros(256, 256)})
        >>> fl.describe(state).total_bytes / 256**2  # bytes per parameter
        1.0626220703125
    """,
)


adamfp8 = with_format(
    adam8bit,
    "adamfp8",
    "e4m3",
    """Adam with moments in FP8: `adam8bit(..., format="e4m3")`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.adamfp8(0.1).init({"w": torch.zeros(64, 64)})[0].mu["w"]
        QuantizedTensor(e4m3, shape=(64, 64), block_size=256)
    """,
)


adamwfp8 = with_format(
    adamw8bit,
    "adamwfp8",
    "e4m3",
    """AdamW with moments in FP8: `adamw8bit(..., format="e4m3")`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.adamwfp8(0.1, format="e5m2").init({"w": torch.zeros(64, 64)})[0].nu["w"]
        QuantizedTensor(e5m2, shape=(64, 64), block_size=256)
    """,
)


def lion8bit(
    learning_rate: Hyper,
    b1: Hyper = 0.9,
    b2: Hyper = 0.99,
    weight_decay: Hyper = 1e-3,
    mask: Mask | None = None,
    *,
    format: FormatChoice = "companded8",
    block_size: int | None = None,
    where: Where | None = None,
) -> GradientTransformation:
    """Lion with momentum in 8 bits: `low_bit(lion(...), format)`. Arguments as in `lion` and `low_bit`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.lion8bit(0.1).init({"w": torch.zeros(64, 64)})[0].mu["w"]
        QuantizedTensor(companded8, shape=(64, 64), block_size=256)
    """
    tx = lion(learning_rate, b1, b2, weight_decay, mask)
    return low_bit(tx, format, block_size=block_size, where=where)
