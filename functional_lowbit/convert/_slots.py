"""Where a functional state keeps what a converter fills: moments by field and parameter, and step counters."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import moments_of
from functional_lowbit._core.contract.masked_node import MaskedNode
from functional_lowbit._core.state.donate import copy_leaf
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._optree import Tree
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
    found = Slots([], [], True)
    whole = True

    def walk(node: Any, path: str) -> tuple[set[str], list[tuple[str, Tensor]]]:
        """Parameters below, and counters that wait for some."""
        nonlocal whole
        level = None if isinstance(node, QuantizedTensor) else _optree.children(node)
        if level is None:
            return set(), []
        declared = moments_of(type(node))
        waiting: list[tuple[str, Tensor]] = []
        owners: set[str] = set()
        fields = getattr(node, "_fields", level[1])
        counter = f"{path}step" if "step" in fields else None
        for kid, name in zip(level[0], level[1], strict=True):
            if name in declared:
                for owner, leaf in named_leaves(kid):
                    if leaf is None:
                        whole = False
                        continue
                    inside = f"{path}{name}.{owner}" if owner else f"{path}{name}"
                    found.slots.append(Slot(inside, name, owner, leaf, counter))
                    owners.add(owner)
            elif name in COUNTERS and isinstance(kid, Tensor) and kid.ndim == 0 and kid.dtype == torch.int64:
                waiting.append((f"{path}{name}", kid))
            else:
                below, still = walk(kid, f"{path}{name}.")
                owners |= below
                waiting += still
        if owners:
            found.counters.extend(Counter(p, frozenset(owners), x) for p, x in waiting)
            waiting = []
        return owners, waiting

    _, waiting = walk(state, "")
    found.counters.extend(Counter(p, frozenset(), x) for p, x in waiting)
    return found._replace(whole=whole)


def named_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) in the order in which dicts were filled, as `model.parameters()` goes; not sorted, as trees are.

    The leaf is None where a mask has taken it out. What is None in the tree is no leaf.
    """
    level = None if isinstance(tree, QuantizedTensor) else _optree.children(tree)
    if level is None:
        yield path, tree
    elif isinstance(tree, MaskedNode):
        yield path, None
    elif isinstance(tree, dict):
        for name, kid in tree.items():
            yield from named_leaves(kid, f"{path}.{name}" if path else str(name))
    else:
        for kid, name in zip(level[0], level[1], strict=True):
            yield from named_leaves(kid, f"{path}.{name}" if path else name)


def filled(speaker: str, state: Any, makers: Mapping[str, Callable[[], Any]]) -> Any:
    """A new state with other leaves where `makers` has their path, and copies of its own elsewhere.

    Raises:
        ValueError: for a leaf on the meta device that nothing is made for. Nothing is made before.
    """
    _refuse_meta(speaker, state, "", makers)
    return _filled(state, "", makers)


def _refuse_meta(speaker: str, node: Any, path: str, makers: Mapping[str, Any]) -> None:
    level = None if isinstance(node, QuantizedTensor) else _optree.children(node)
    if level is not None and path not in makers:
        for kid, name in zip(level[0], level[1], strict=True):
            _refuse_meta(speaker, kid, f"{path}.{name}" if path else name, makers)
        return
    part = node.codes if isinstance(node, QuantizedTensor) else node
    if path not in makers and isinstance(part, Tensor) and local_of(part).device.type == "meta":
        raise ValueError(
            f"{speaker}: {path} of the target is on the meta device, and saved has nothing for it; make the target of "
            "parameters that have memory"
        )


def _filled(node: Any, path: str, makers: Mapping[str, Callable[[], Any]]) -> Any:
    if path in makers:
        return makers[path]()
    level = None if isinstance(node, QuantizedTensor) else _optree.children(node)
    if level is None:
        return _optree.map_leaves(copy_leaf, node)
    kids, names, rebuild = level
    return rebuild([_filled(k, f"{path}.{n}" if path else n, makers) for k, n in zip(kids, names, strict=True)])


def listed(words: Collection[str]) -> str:
    """Words for an error."""
    return ", ".join(sorted(words)) or "none"
