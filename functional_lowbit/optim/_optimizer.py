"""Optimizer: any transformation as a `torch.optim.Optimizer`."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_lowbit._base import GradientTransformation
from functional_lowbit._compile import compile
from functional_lowbit.optim import _entries
from functional_lowbit.optim._groups import NumberlessGroup, check_tx, make_tx, params_of, refuse_numbers
from functional_lowbit.optim._param_tree import ParamTree
from functional_lowbit.optim._same_groups import check_file, check_params


class Optimizer(torch.optim.Optimizer):
    """Any transformation as a `torch.optim.Optimizer`.

    The state is complete from the start, so that nothing takes a hidden step to look at it. `state[p]` holds the
    state's own tensors by name, for instance `0.mu.codes`, `0.mu.scales` and `0.step`; what all parameters share stands
    with each. Parameters and state are written in place by one compiled step.

    With a transformation, the groups given to the constructor make one tree, as for `tx.init(dict(named_parameters))`:
    a global norm is that of all. With a function and `defaults`, each group makes a tree of its own, and the numbers in
    the group are read anew at each step. A group added later makes a tree of its own in any case, whose steps count
    from 0.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either. Names are the paths that `tx` sees; without
            names, a parameter's is its number, counted through all groups. Move and shard the model first.
        tx: A transformation; or with `defaults`, a function `tx(**hyperparameters)` that makes one.
        defaults: Hyperparameters of the groups, by name. What is a float here (or a tensor, or in a tuple) is a number:
            `tx` gets a float64[] tensor for it. Other values are handed on as they are, and must not change.
        backend: As in `fl.compile`.
        rounding: As in `fl.compile`.
        key: As in `fl.compile`.

    Attributes:
        graphs: int; graphs compiled so far for the kernels in use, see `fl.compile`.

    A parameter whose `grad` is None, or that needs no gradient, is left as it is, with its state. A step without any
    gradient does nothing, as in torch.

    Raises:
        TypeError, ValueError: for a `tx` that is no transformation, a parameter on the meta device, two parameters of
            one name, a group's number that nothing reads; and what `tx.init` refuses.

    References:
        torch.optim.Optimizer, https://docs.pytorch.org/docs/stable/optim.html.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = fl.optim.Optimizer(model.named_parameters(), fl.adamw8bit(1e-3), backend="eager")
        >>> list(optimizer.state[model.weight])
        ['0.mu.codes', '0.mu.scales', '0.nu.codes', '0.nu.scales', '0.step', 'schema']
        >>> model(torch.ones(64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["0.step"]
        tensor(1)

        Numbers in the groups, for torch's schedulers:

        >>> def adamw(lr, betas, weight_decay):
        ...     return fl.adamw8bit(lr, *betas, weight_decay=weight_decay)
        >>> defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 1e-2}
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
        >>> optimizer = fl.optim.Optimizer(groups, adamw, defaults, backend="eager")
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    """

    def __init__(
        self,
        params: ParamsT,
        tx: GradientTransformation | Callable[..., GradientTransformation],
        defaults: Mapping[str, Any] | None = None,
        *,
        backend: str | None = None,
        rounding: str = "nearest",
        key: int | Tensor | None = None,
    ):
        check_tx(tx, defaults is not None)
        self._tx: Any = tx
        self._numbers = None if defaults is None else dict(defaults)
        self._options: dict[str, Any] = {"backend": backend, "rounding": rounding, "key": key}
        self._trees: list[ParamTree] = []
        self._given: list[dict[str, Tensor]] = []  # of each group, parameter by name
        self._is_complete = False
        super().__init__(params, dict(defaults or {}))
        groups = list(range(len(self.param_groups)))
        for members in [groups] if defaults is None else [[i] for i in groups]:
            self._plant(members)
        self._is_complete = True

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for the kernels in use. It stays the same after the first step."""
        return sum(tree.step.graphs for tree in self._trees)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which makes a tree of its own: its steps count from 0, and a norm is that of the group."""
        super().add_param_group(param_group)
        if self._is_complete:  # else torch's constructor is adding the first groups
            try:
                self._plant([len(self.param_groups) - 1])
            except Exception:
                self.param_groups.pop()
                raise

    def _plant(self, members: list[int]) -> None:
        """Make the tree of some groups."""
        taken = {name for tree in self._trees for name in tree.params}
        params = params_of(self.param_groups, members, taken)
        if self._numbers is None:
            refuse_numbers("Optimizer", self.param_groups, members)
            tx, hypers = self._tx, None
            for i in members:
                self.param_groups[i] = NumberlessGroup(self.param_groups[i])
        else:
            tx, hypers = make_tx(self._tx, self._numbers, self.param_groups, members[0])
        tree = ParamTree(tx, compile(tx, **self._options), params, members, hypers)
        self._trees.append(tree)
        rest = iter(params.items())
        self._given += [dict(islice(rest, len(self.param_groups[i]["params"]))) for i in members]
        self._show(tree)

    def _show(self, tree: ParamTree) -> None:
        """Let `state` hold the tree's tensors."""
        for name, p in tree.params.items():
            self.state[p] = dict(tree.live[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for all parameters that have a gradient. Everything is looked at before anything is written.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What the closure returned; None without one.

        Raises:
            TypeError, ValueError: for gradients that do not fit, hyperparameters that are not finite, out of their
                range or read by nothing, and parameters that were moved or sharded, groups whose parameters are
                others, or state that was replaced, since the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_params("Optimizer.step", self._given, self.param_groups)
        grads = [tree.check(self.state, alone=len(self._trees) == 1) for tree in self._trees]
        for place, number in self._read_numbers("Optimizer.step: param_groups", self.param_groups):
            place.fill_(number)
        for tree, own in zip(self._trees, grads, strict=True):
            if any(g is not None for g in own.values()) and tree.update_(own):
                self._show(tree)
        return loss

    def _read_numbers(self, where: str, groups: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, float]]:
        """The numbers of all groups, each with the tensor that it is for. Nothing is written."""
        found: list[tuple[Tensor, float]] = []
        for tree in self._trees:
            if tree.hypers is None:
                refuse_numbers(where.partition(":")[0], groups, tree.groups)
            else:
                found += tree.hypers.read(where, groups, tree.groups[0])
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim saves it. Nothing is changed; what is not computed is not copied either.

        Raises:
            ValueError: for groups whose parameters are others than when they were added.
        """
        check_params("Optimizer.state_dict", self._given, self.param_groups)
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
        if not isinstance(state_dict, Mapping):
            kind = type(state_dict).__name__
            raise TypeError(f"Optimizer.load_state_dict: state_dict must be a dict, got {kind}")
        check_params("Optimizer.load_state_dict", self._given, self.param_groups)
        # torch would cast the state to the parameters' dtype. This hook is the last, after the user's.
        handle = self.register_load_state_dict_pre_hook(partial(_hide_state, convert=convert))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy. As in torch, hooks are left behind."""
        check_params("Optimizer", self._given, self.param_groups)
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": self._saved(),
            "_tx": self._tx,
            "_numbers": self._numbers,
            "_options": self._options,
            "_members": [tree.groups for tree in self._trees],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy, or from torch's `load_state_dict`."""
        hidden = [v for v in state["state"].values() if isinstance(v, _Hidden)]
        saved = {k: v.entries if isinstance(v, _Hidden) else v for k, v in state["state"].items()}
        if "_tx" in state:
            rest = {k: v for k, v in state.items() if k != "_members"}
            super().__setstate__({**rest, "state": defaultdict(dict), "_trees": [], "_given": [], "_is_complete": True})
            for members in state["_members"]:
                self._plant(members)
        self._load(saved, state["param_groups"], any(v.convert for v in hidden))

    def _saved(self) -> dict[Tensor, dict[str, Any]]:
        return {
            p: _entries.save(tree.leaves[name], p.device) for tree in self._trees for name, p in tree.params.items()
        }

    def _load(self, saved: Mapping[Any, Any], groups: list[dict[str, Any]], convert: bool) -> None:
        for key in saved:
            if key not in self.state:
                raise ValueError(f"Optimizer.load_state_dict: state_dict has state of {key!r}, which is in no group")
        new = [tree.checked(saved, convert) for tree in self._trees]
        self._read_numbers("Optimizer.load_state_dict: state_dict['param_groups']", groups)
        for tree, leaves in zip(self._trees, new, strict=True):
            tree.take_(leaves)
            self._show(tree)
        self.param_groups = [  # names are not loaded: `tx` knows the parameters by their own
            type(old)({**old, **{name: value for name, value in group.items() if name != "param_names"}})
            for old, group in zip(self.param_groups, groups, strict=True)
        ]


@dataclass(frozen=True)
class _Hidden:
    """Entries of one parameter, as nothing that torch looks into."""

    entries: Any
    convert: bool


def _save_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace what rests by what is saved."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = optimizer._saved()
    return {**state_dict, "state": {i: saved[p] for i, p in enumerate(params)}}


def _hide_state(optimizer: Any, state_dict: dict[str, Any], convert: bool) -> dict[str, Any]:
    """Hide the state from torch, which would cast it."""
    check_file(optimizer.param_groups, state_dict)
    return {**state_dict, "state": {k: _Hidden(v, convert) for k, v in state_dict["state"].items()}}
