"""compile: the step in place. Everything is looked at, operations run as kernels, counters go on, in this order."""

from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted, refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.state.donate import copy_leaf
from functional_lowbit._core.step import operations
from functional_lowbit._core.step.apply import ROUNDINGS
from functional_lowbit._core.step.backends import Kernels
from functional_lowbit._core.step.call import Call, begin
from functional_lowbit._core.step.noise import Noise
from functional_lowbit._core.step.plan import Params, make_plan
from functional_lowbit._core.step.program import lower
from functional_lowbit._core.step.renewal import at_, renewed
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking


class Step:
    """A compiled training step: `params, state = step(grads, state, params, **extra)`. Made by `compile`."""

    def __init__(self, tx: GradientTransformation, donate: bool, backend: str | None, noise: Noise | None):
        self._program = lower(tx.update)
        self._donate = donate
        self._noise = noise
        self._used = Kernels(backend)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for the kernels that this step uses. It stays the same after the first step."""
        return sum(kernel.graphs for kernel in self._used.values())

    @speaking("Step.renew")
    def renew(self, tx: GradientTransformation) -> None:
        """Go on with a transformation that was made anew, by the same function with other numbers.

        States and kernels stay as they are. A number that is not a hyperparameter but a part of a leaf function (held
        in its closure, or given as a default) is a part of the compiled code: another one is compiled anew.

        Raises:
            TypeError: if `tx` is no GradientTransformation.
            ValueError: if it is not built like the one before: other parts, or another format.

        Example:
            >>> import torch, functional_lowbit as fl
            >>> tx, params = fl.sgd(0.5), {"w": torch.ones(2)}
            >>> step, state = fl.compile(tx, backend="eager"), tx.init(params)
            >>> step.renew(fl.sgd(0.25))
            >>> step({"w": torch.ones(2)}, state, params)[0]
            {'w': tensor([0.7500, 0.7500])}
        """
        refuse.transformation("tx", tx)
        self._program = renewed(self._program, tx.update)

    @torch.no_grad()
    def __call__(self, grads: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
        """One step: new params and new state, in the buffers that were given if they are donated.

        An exception in the middle (an interrupt, a rank that is gone, an error in a user's own pair), after something
        has been written in place, leaves params and state half-updated. The state is marked then, and refused from
        then on; see `docs/design.md`.

        Raises:
            TypeError, ValueError: before anything is written, for gradients, parameters or a state that do not fit
                each other, and for a hyperparameter that is not finite.
            RuntimeError: for a state that an interrupted step has left half-updated.
        """
        call = self._look(grads, state, params, extra)
        if not self._donate:
            params, state = _optree.map_leaves(copy_leaf, params), _optree.map_leaves(copy_leaf, state)
            call = self._look(grads, state, params, extra)
        try:
            return params, operations.run(call, state)
        except BaseException as error:
            if call.written and self._donate:
                interrupted.mark(state, error)
            raise

    @speaking("compile(tx)")
    def _look(self, grads: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Call:
        """Look at everything before anything is written."""
        leaves = Params.of(params)
        updates = leaves.updates("grads", grads)
        moved: list[Any] = []
        self._program = at_(self._program, state, moved)  # serves again while the numbers in the state do
        plan = make_plan(self._program, leaves, state, self._noise, self._donate)
        return begin(plan, self._used, state, updates, extra, moved)


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
