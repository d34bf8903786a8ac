"""compile: the training step, fused, compiled once for all shapes, in place.

What crosses into `torch.compile` are plain, detached, local tensors: views of leaves as blocks, and one vector of
numbers. DTensors, parameters with a `.grad`, tensor subclasses and Python floats stay outside, by construction.
"""

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.step.apply import ROUNDINGS
from functional_lowbit._core.step.noise import Noise
from functional_lowbit._core.step.step import Step
from functional_lowbit._refused import WrongValue, speaking


@speaking("compile")
def compile(
    tx: GradientTransformation,
    *,
    donate: bool = True,
    backend: str | None = None,
    rounding: str = "nearest",
    key: int | Tensor | None = None,
) -> Step:
    """Make the training step of a transformation: one fused kernel for all leaves, compiled once.

    Leaf functions that follow each other are fused into one kernel that reads gradient, parameter and moments once,
    and writes parameter and moments once. It is compiled for two free sizes, so that no shape, number of leaves,
    learning rate or other number compiles it again: one graph for leaves stored in blocks and one for the others, for
    each pair of parameter and gradient dtype. Updates stay in float32 until they are added to the parameters.
    A `(init, update)` pair of the user's own runs as it is, between the kernels.

    Args:
        tx: Any transformation.
        donate: True: params and state are written in place, and returned. False: they are copied first.
        backend: "native" is C++ made for this transformation, on the CPU; "inductor" or another backend of
            torch.compile runs anywhere; "eager" needs no compiler. All give the same numbers, bit for bit. None takes
            "native" where a leaf is on the CPU, a C++ compiler is there and the leaf functions consist of operations
            that it knows, and "inductor" elsewhere.
        rounding: How new parameters are rounded to their dtype: to the "nearest" number, or "stochastic" for bfloat16
            and float16, see `rounding.stochastic_round`; others are rounded to the nearest.
        key: For "stochastic": an int of 64 bits, or an int64[] tensor that is read anew at each step. The noise of a
            step is that of `apply_updates` with the key `rounding.fold_in(key, step)`, where `step` is the first field
            of that name in the state that the step is given.

    Returns:
        `step(grads, state, params, **extra) -> (params, state)`, with the attribute `graphs`. Params may be
        `nn.Parameter`s and DTensors, with or without `.grad`; a gradient of None skips its leaf.

    Raises:
        TypeError: if `tx` is no GradientTransformation.
        ValueError: for another rounding, or without a key for "stochastic".
        NotImplementedError: at the first step, if "native" is asked for and cannot be used.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.sgd(0.5)
        >>> params = {"w": torch.ones(2)}
        >>> step = fl.compile(tx, backend="eager")
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    refuse.transformation("tx", tx)
    if rounding not in ROUNDINGS:
        raise WrongValue(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "nearest":
        return Step(tx, donate, backend, None)
    if key is None:
        raise WrongValue("rounding='stochastic' needs a key, an int or a 0-d int64 tensor")
    return Step(tx, donate, backend, Noise(key))
