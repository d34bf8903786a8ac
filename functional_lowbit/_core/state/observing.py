"""A wrapper that looks on: it sees updates, state and parameters now and then, and changes only its own state."""

from abc import abstractmethod
from typing import Any

from functional_lowbit._core.contract.base import call_update
from functional_lowbit._core.state.like_params import like_params
from functional_lowbit._core.state.parts import Composite
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking


class Observing(Composite):
    """A composite that looks on before its one inner transformation is updated. Updates pass through it as they are.

    In the compiled step the inner transformation is fused as if this part were not there. At steps at which it wants to
    look, what comes before it is run first, since it is to see the updates; at others it costs a call of `wants` and of
    `pass_by`.

    Both methods return the state with its own fields moved on and the inner state as it was, new tensors of the same
    shapes and dtypes: the compiled step copies them into the old ones. An own field may be any tree of tensors.
    """

    sequential = True

    @abstractmethod
    def wants(self, state: Any) -> bool:
        """Whether it wants to look at this step. It should be cheap: decided by numbers on the CPU."""

    @abstractmethod
    def observe(self, updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Any:
        """Look, and return the state with its own fields moved on.

        Args:
            updates: What the inner transformation will be given, sharded like params; None at leaves that are skipped.
            state: This part's state before the step, inner state included. A moment in few bits is a
                `QuantizedTensor`, if `low_bit` is inside; where `low_bit` is outside, it may be that or float32.
            params: As the inner transformation sees them, DTensors included; None if the caller of the pure update
                passed none.
            extra: The extra arguments.
        """

    def pass_by(self, state: Any) -> Any:
        """The state after a step at which it did not look; here as it was."""
        return state

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update, looked at before or not."""
        inner_state = self.split(state)[0]
        if self.wants(state):
            with speaking(f"{type(self).__name__}.update"):
                seen = updates if params is None else like_params(updates, params)
            state = self.observe(seen, state, params, extra)
        else:
            state = self.pass_by(state)
        updates, inner_state = call_update(self.inner[0].update, updates, inner_state, params, extra)
        return updates, self.join(state, [inner_state])
