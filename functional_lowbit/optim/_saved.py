"""How an `Optimizer` is saved, loaded, pickled and copied."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.optim._param_tree import ParamTree
from functional_lowbit.optim._same_groups import check_file


class Saved(torch.optim.Optimizer):
    """The part of `Optimizer` that saves and loads its state.

    Attributes:
        LAYOUT: Names of group entries that say how the state is stored. A file's are neither loaded nor compared: of
            each leaf, the file says itself how it is stored.
    """

    LAYOUT: frozenset[str] = frozenset()
    _trees: list[ParamTree]
    _given: list[dict[str, Tensor]]  # of each group, parameter by name
    _tx: Any
    _numbers: dict[str, Any] | None
    _options: dict[str, Any]
    _is_untouched: bool
    _was_looked_at: bool

    def _plant(self, members: list[int]) -> None:
        raise NotImplementedError

    def _show(self, tree: ParamTree) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    def _read_numbers(self, source: str, groups: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim saves it. Nothing is changed; what is not computed is not copied either.

        Raises:
            ValueError: for groups whose parameters are others than when they were added.
        """
        with speaking("Optimizer.state_dict"):
            self._settle()
        handle = self.register_state_dict_post_hook(_save_state, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        """Copy a saved state into the optimizer's own tensors.

        Nothing is cast to a parameter's dtype. Everything is looked at before anything is written.

        Args:
            state_dict: What `state_dict` returned, also by way of `torch.distributed.checkpoint`.
            convert: Whether leaves of another format or block size, or in float32 instead of few bits, are converted,
                as in `fl.load_state_dict`.

        Raises:
            TypeError, ValueError: for other groups, parameters of other names, hyperparameters that `step` would
                refuse, state that is missing or belongs to no parameter, and a leaf of another format, block size,
                shape, dtype or sharding.
        """
        with speaking("Optimizer.load_state_dict"):
            if not isinstance(state_dict, Mapping):
                raise WrongType(f"state_dict must be a dict, got {type(state_dict).__name__}")
            self._settle()
        # torch would cast the state to the parameters' dtype. This hook is the last, after the user's.
        handle = self.register_load_state_dict_pre_hook(partial(_hide_state, convert=convert))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy. As in torch, hooks are left behind."""
        with speaking("Optimizer"):
            self._settle()
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": self._saved(),
            "_tx": self._tx,
            "_numbers": self._numbers,
            "_options": self._options,
            "_is_untouched": self._is_untouched,
            "_was_looked_at": self._was_looked_at,
            "_members": [tree.groups for tree in self._trees],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy, or from torch's `load_state_dict`."""
        hidden = [v for v in state["state"].values() if isinstance(v, _Hidden)]
        saved = {k: v.entries if isinstance(v, _Hidden) else v for k, v in state["state"].items()}
        if "_tx" in state:
            kept = {k: v for k, v in state.items() if k != "_members"}
            super().__setstate__({**kept, "state": defaultdict(dict), "_trees": [], "_given": [], "_is_complete": True})
            for members in state["_members"]:
                self._plant(members)
        self._load(saved, state["param_groups"], any(v.convert for v in hidden))

    def parts(self) -> list[tuple[Any, dict[str, Tensor]]]:
        """The state of each tree of parameters, and these by name. `fl.convert` reads them; nothing may be written.

        Raises:
            ValueError: for groups whose parameters are others than when they were added.
        """
        self._settle()
        return [(tree.state, tree.params) for tree in self._trees]

    def state_dict_with(self, states: Sequence[Any]) -> dict[str, Any]:
        """What `state_dict` would return if these were the states of the `parts`. Nothing is written."""
        saved = {
            p: own for tree, state in zip(self._trees, states, strict=True) for p, own in tree.saved(state).items()
        }
        params = [p for group in self.param_groups for p in group["params"]]
        return {**self.state_dict(), "state": {i: saved[p] for i, p in enumerate(params)}}

    def _saved(self) -> dict[Tensor, dict[str, Any]]:
        return {p: own for tree in self._trees for p, own in tree.saved(tree.state).items()}

    def _saved_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """What is saved of a group."""
        return group

    @speaking("Optimizer.load_state_dict")
    def _load(self, saved: Mapping[Any, Any], groups: list[dict[str, Any]], convert: bool) -> None:
        for key in saved:
            if key not in self.state:
                raise WrongValue(f"state_dict has state of {key!r}, which is in no group")
        groups = [
            {**group, **{name: value for name, value in own.items() if name in self.LAYOUT}}
            for own, group in zip(self.param_groups, groups, strict=True)
        ]
        new = [tree.checked(saved, convert) for tree in self._trees]
        self._read_numbers("state_dict['param_groups']", groups)
        self._is_untouched &= all(tree.has(leaves) for tree, leaves in zip(self._trees, new, strict=True))
        for tree, leaves in zip(self._trees, new, strict=True):
            tree.take_(leaves)
            self._show(tree)
        self.param_groups = [
            type(old)({**old, **_loaded(old, group)}) for old, group in zip(self.param_groups, groups, strict=True)
        ]


def _loaded(old: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """What is taken from a file's group. Not names: `tx` knows the parameters by their own."""
    return {
        # torch.distributed.checkpoint makes lists of tuples
        name: tuple(value) if isinstance(value, list) and isinstance(old.get(name), tuple) else value
        for name, value in group.items()
        if name != "param_names"
    }


@dataclass(frozen=True)
class _Hidden:
    """Entries of one parameter, as nothing that torch looks into."""

    entries: Any
    convert: bool


def _save_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace what rests by what is saved."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = optimizer._saved()
    groups = [optimizer._saved_group(group) for group in state_dict["param_groups"]]
    return {**state_dict, "state": {i: saved[p] for i, p in enumerate(params)}, "param_groups": groups}


def _hide_state(optimizer: Any, state_dict: dict[str, Any], convert: bool) -> dict[str, Any]:
    """Hide the state from torch, which would cast it."""
    check_file(optimizer.param_groups, state_dict)
    return {**state_dict, "state": {k: _Hidden(v, convert) for k, v in state_dict["state"].items()}}
