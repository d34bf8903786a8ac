"""The compiled step: everything is looked at, operations run as kernels, counters go on, in this order."""

from typing import Any

import torch

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted, refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.state.donate import copy_leaf
from functional_lowbit._core.step import operations
from functional_lowbit._core.step.backends import Kernels
from functional_lowbit._core.step.call import Call, begin
from functional_lowbit._core.step.noise import Noise
from functional_lowbit._core.step.params import Params
from functional_lowbit._core.step.plan import make_plan
from functional_lowbit._core.step.program import lower
from functional_lowbit._core.step.renewal import at, renewed
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking


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
        self._program = at(self._program, state, moved)  # serves again while the numbers in the state do
        plan = make_plan(self._program, leaves, state, self._noise, self._donate)
        return begin(plan, self._used, state, updates, extra, moved)
