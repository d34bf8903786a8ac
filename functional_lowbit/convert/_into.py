"""The way of all `from_…`: read what was saved, find whose it is, and fill the target."""

from collections.abc import Mapping
from typing import Any

from functional_lowbit._core.contract import interrupted
from functional_lowbit._core.contract.refuse import is_transformation
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.convert._fill import check_step, fill
from functional_lowbit.convert._library import READERS, any_saved, library_in
from functional_lowbit.convert._match import Sides, match
from functional_lowbit.convert._own import is_own_state
from functional_lowbit.convert._read import Read, refuse_dampening
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.convert._shell import into_optimizer
from functional_lowbit.convert._slots import find_slots, named_leaves
from functional_lowbit.optim._optimizer import Optimizer

SPEAKERS = {
    "torch": "from_torch",
    "torchao": "from_torchao",
    "bitsandbytes": "from_bitsandbytes",
    "flashoptim": "from_flashoptim",
    "functional_lowbit": "from_saved",
}


def convert(
    library: str, saved: Any, target: Any, params: Tree, step: int | None, fields: Mapping[str, str] | None
) -> Any:
    """As `from_torch`, for the state of a library."""
    speaker, fields = SPEAKERS[library], dict(fields or {})
    check_step(speaker, step)
    found = library_in(saved, speaker)
    if found != library and not (found == "torch" and library in ("torchao", "flashoptim")):
        raise ValueError(f"{speaker}: saved is from {found}; use fl.convert.{SPEAKERS[found]}")
    source, reader = any_saved(speaker, saved), READERS[library]
    sides = Sides(speaker, unordered="saved" if is_own_state(saved) else "")

    def read(p: SavedParam) -> Read:
        return reader(speaker, p, source.groups[p.group], fields)

    def check(states: list[Any], reads: Mapping[str, Read]) -> None:
        _any(speaker, states, reads)
        refuse_dampening(speaker, reads.values(), source.groups, target, step)

    if isinstance(target, Optimizer):
        if params is not None:
            raise ValueError(f"{speaker}: params must be None for an optimizer, which knows its own")
        return into_optimizer(sides, source, target, read, check, step)
    with speaking(speaker):
        interrupted.refuse(target)
    places = _targets(speaker, target, params, named=all(p.name is not None for p in source.params))
    reads = {name: read(p) for name, p in match(sides, source.params, places).items()}
    check([target], reads)
    return fill(speaker, target, reads, step, places)


def _targets(speaker: str, state: Any, params: Tree, named: bool) -> dict[str, Any]:
    """The target's parameters by name, in order; None where they are not known."""
    is_leaf = any(path == "" for path, _ in named_leaves(state))
    if state is None or is_leaf or is_transformation(state):
        raise TypeError(
            f"{speaker}: target must be a state, as tx.init(params) returns it, or an fl.optim optimizer, got "
            f"{type(state).__name__}"
        )
    slots = find_slots(state)
    if params is None:
        if not slots.whole and not named:
            raise ValueError(
                f"{speaker}: params is needed, since masks have taken parameters out of the target's moments, and "
                "saved has no names; pass the tree that the state was made for"
            )
        return dict.fromkeys(slots.owners())
    places = {name: leaf for name, leaf in named_leaves(params) if leaf is not None}
    for owner in slots.owners():
        if owner not in places:
            raise ValueError(
                f"{speaker}: the target has a moment of {owner!r}, which params has not; pass the tree that the state "
                "was made for"
            )
    return places


def _any(speaker: str, states: list[Any], reads: Mapping[str, Read]) -> None:
    """Refuse what has no state at all, but of an optimizer that keeps none."""
    if any(read.moments or read.step is not None for read in reads.values()):
        return
    if any(find_slots(state).slots for state in states):
        raise ValueError(
            f"{speaker}: saved has no state of any parameter; the optimizer has made no step, or keeps no moments"
        )
