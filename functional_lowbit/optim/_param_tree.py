"""The parameters that one transformation updates together, with its state and its compiled step."""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.state import fits
from functional_lowbit._core.step.step import Step
from functional_lowbit._refused import WrongValue, words_of
from functional_lowbit.optim import _entries
from functional_lowbit.optim._groups import refuse_numbers
from functional_lowbit.optim._hyper import Hypers
from functional_lowbit.optim._same_groups import place_of


class ParamTree:
    """The parameters that one transformation updates together.

    Args:
        tx: The transformation.
        step: `fl.compile(tx)`, donated.
        params: Parameter by name.
        groups: Indices of the param groups that they are from.
        hypers: What `tx` reads of its group; None if it reads nothing.
    """

    def __init__(
        self,
        tx: GradientTransformation,
        step: Step,
        params: dict[str, Tensor],
        groups: list[int],
        hypers: Hypers | None,
    ):
        self.step = step
        self.params = params
        self.groups = groups
        self.hypers = hypers
        self.places = [place_of(p) for p in params.values()]
        self.link(tx.init(params))

    def link(self, state: Any) -> None:
        """Take a state, and find out which leaf belongs to which parameter."""
        self.state = state
        self.tensors = _optree.leaves(state)
        self.leaves, self.shared, self.named = _entries.entries_of(state, self.params)
        self.live = {
            name: _entries.live(leaves, self.named, self.params[name].device) for name, leaves in self.leaves.items()
        }

    def saved(self, state: Any) -> dict[Tensor, dict[str, Any]]:
        """What is saved of each parameter if this is the tree's state."""
        own = _entries.entries_of(state, self.params)
        return {p: _entries.save(own.leaves[name], own.named, p.device) for name, p in self.params.items()}

    def read_numbers(self, source: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the transformation that the group's numbers make. Nothing is compiled for it."""
        if self.hypers is None:
            refuse_numbers(groups, self.groups)
            return
        before = self.hypers.accepted
        tx = self.hypers.read(source, groups, self.groups[0])
        if tx is not None:
            try:
                self.step.renew(tx)
            except ValueError as error:
                self.hypers.accepted = before
                raise WrongValue(f"group {self.groups[0]}: {words_of(error, 'Step.renew')}") from error

    def check(self, held: Mapping[Tensor, Any], alone: bool) -> dict[str, Tensor | None]:
        """Look at everything before anything is written, and return the gradients.

        Args:
            held: `optimizer.state`. Where it has a copy of what rests, with the same numbers, what rests is put back.
            alone: Whether this is the only tree. If so, it is left to the step to look at the gradients.
        """
        for (name, p), place in zip(self.params.items(), self.places, strict=True):
            if (now := place_of(p)) != place:
                raise WrongValue(
                    f"parameter {name!r} was {_words(*place)} when the optimizer was made, and is {_words(*now)} now; "
                    "make the optimizer after the model is moved and sharded"
                )
            entries = held.get(p, {})
            for key, value in self.live[name].items():
                other = entries.get(key)
                if other is value:
                    continue
                if _entries.is_copy(other, value):  # Lightning moves all of the state to the parameters' device
                    entries[key] = value
                else:
                    raise WrongValue(
                        f"{key!r} in the state of {name!r} was replaced; use load_state_dict, which writes into the "
                        "optimizer's own tensors"
                    )
        grads = {name: p.grad if p.requires_grad else None for name, p in self.params.items()}
        if not alone:
            fits.updates(list(self.params), list(grads.values()), list(self.params.values()))
        return grads

    def update_(self, grads: Mapping[str, Tensor | None]) -> bool:
        """One step, written into parameters and state. Whether the state has other tensors now."""
        _, self.state = self.step(grads, self.state, self.params)
        tensors = _optree.leaves(self.state)
        if len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors)):
            return False
        self.link(self.state)
        return True

    def checked(self, saved: Mapping[Tensor, Any], convert: bool) -> dict[str, dict[str, Any]]:
        """New leaves, by parameter and name, from what was saved of each parameter. Nothing is written.

        A parameter that needs no gradient may be missing, and its counters are not compared: of such a one,
        `set_optimizer_state_dict` hands on nothing, or what the optimizer has now.
        """
        new: dict[str, dict[str, Any]] = {}
        for name, p in self.params.items():
            if p in saved:
                new[name] = _entries.load(name, self.leaves[name], saved[p], convert)
            elif p.requires_grad:
                raise WrongValue(
                    f"state_dict has no state of {name!r}; save it with the optimizer that has this parameter"
                )
        for key in self.shared:
            values = [(name, leaves[key]) for name, leaves in new.items() if self.params[name].requires_grad]
            for name, value in values[1:]:
                if not _entries.equal(value, values[0][1]):
                    raise WrongValue(
                        f"{key!r} is {values[0][1]} for {values[0][0]!r} and {value} for {name!r}, but one step "
                        "updates both; load into an optimizer with the groups of the saved one"
                    )
        return new

    def has(self, new: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether the state has these leaves, by parameter and name, already."""
        return all(
            _entries.equal(self.leaves[name][key], leaf) for name, leaves in new.items() for key, leaf in leaves.items()
        )

    def take_(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        """Write new leaves into the state."""
        if not new:
            return
        first = next((name for name in new if self.params[name].requires_grad), next(iter(new)))

        def write(owner: str | None, name: str, leaf: Any) -> Any:
            leaves = new.get(first if owner is None else owner)
            return leaf if leaves is None else _entries.write_(leaf, leaves[name])

        state = _entries.map_entries(write, self.state, self.params)
        interrupted.forget(state)  # what was not written is of parameters that no step touches
        self.link(state)


def _words(device: Any, shape: tuple[int, ...], mesh: Any, placements: Any) -> str:
    kind = "a tensor" if mesh is None else f"a DTensor with {placements}"
    return f"{kind} of shape {shape} on {device}"
