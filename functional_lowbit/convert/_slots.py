"""Where a functional state keeps what a converter fills: moments by field and parameter, and step counters."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.masked_node import MaskedNode
from functional_lowbit._core.state.donate import copy_leaf
from functional_lowbit._core.state.parts import moments_in
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue
from functional_lowbit.sharding import local_of

COUNTERS = ("step", "gradient_step")  # fields that count the updates made; int64[]


class Slot(NamedTuple):
    """One leaf of a declared moment."""

    path: str  # in the state: 0.mu.layers.0.weight
    field: str
    owner: str  # the parameter's path
    leaf: Any
    counter: str | None  # path of the counter in the same state


class Counter(NamedTuple):
    """A step counter, and the parameters whose updates it counts."""

    path: str
    owners: frozenset[str]  # those with a moment in the same state; else in the smallest state around it with any
    leaf: Tensor


class Slots(NamedTuple):
    """All of a state."""

    slots: list[Slot]
    counters: list[Counter]
    whole: bool  # whether no mask has taken a parameter out of a moment's tree

    def owners(self) -> list[str]:
        """Paths of the parameters, in order."""
        return list(dict.fromkeys(slot.owner for slot in self.slots))


def find_slots(state: Any) -> Slots:
    """Moments go by what a state's class declares, however deep it sits in chains and wrappers."""
    places = list(_optree.nodes(state, moments_in))
    counting = {at.names[:-1]: at.path for at in places if at.name == "step"}
    slots: list[Slot] = []
    owners: dict[tuple[str, ...], set[str]] = {}  # by every node around a moment
    whole = True
    for at in places:
        if at.mark is None:
            continue
        for owner, leaf in named_leaves(at.node):
            if leaf is None:
                whole = False
                continue
            path = f"{at.path}.{owner}" if owner else at.path
            slots.append(Slot(path, at.name, owner, leaf, counting.get(at.names[:-1])))
            for n in range(len(at.names)):
                owners.setdefault(at.names[:n], set()).add(owner)
    counters = []
    for at in places:
        if at.mark is None and at.name in COUNTERS and _is_count(at.node):
            around = (owners[at.names[:n]] for n in reversed(range(len(at.names))) if at.names[:n] in owners)
            counters.append(Counter(at.path, frozenset(next(around, ())), at.node))
    return Slots(slots, counters, whole)


def _is_count(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.dtype == torch.int64


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(path, leaf) in the order in which dicts were filled, as `model.parameters()` goes; not sorted, as trees are.

    The leaf is None where a mask has taken it out. What is None in the tree is no leaf.
    """
    for at in _optree.nodes(tree, as_filled=True):
        if at.is_leaf or isinstance(at.node, MaskedNode):
            yield at.path, at.node if at.is_leaf else None


def filled(state: Any, makers: Mapping[str, Callable[[], Any]]) -> Any:
    """A new state with other leaves where `makers` has their path, and copies of its own elsewhere.

    Raises:
        ValueError: for a leaf on the meta device that nothing is made for. Nothing is made before.
    """
    for at in _optree.stored_leaves(state):
        part = at.node.codes if isinstance(at.node, QuantizedTensor) else at.node
        if at.path not in makers and isinstance(part, Tensor) and local_of(part).device.type == "meta":
            raise WrongValue(
                f"{at.path} of the target is on the meta device, and saved has nothing for it; make the "
                "target of parameters that have memory"
            )

    def new(at: _optree.Place) -> Any:
        return makers[at.path]() if at.path in makers else _optree.map_leaves(copy_leaf, at.node)

    return _optree.map_stored(new, state)


def listed(words: Collection[str]) -> str:
    """Words for an error."""
    return ", ".join(sorted(words)) or "none"
