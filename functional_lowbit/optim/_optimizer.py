"""Optimizer: any transformation as a `torch.optim.Optimizer`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.step.step import compile
from functional_lowbit._refused import speaking
from functional_lowbit.optim._groups import NumberlessGroup, check_tx, make_tx, params_of, refuse_numbers
from functional_lowbit.optim._orphans import refuse_orphans
from functional_lowbit.optim._param_tree import ParamTree
from functional_lowbit.optim._same_groups import are_like, check_params
from functional_lowbit.optim._saved import Saved


class Optimizer(Saved):
    """Any transformation as a `torch.optim.Optimizer`.

    The state is complete from the start, so that nothing takes a hidden step to look at it. `state[p]` holds the
    state's own tensors by name, for instance `0.mu.codes`, `0.mu.scales` and `0.step`; what all parameters share stands
    with each. Parameters and state are written in place by one compiled step.

    With a transformation, the groups given to the constructor make one tree, as for `tx.init(dict(named_parameters))`:
    a global norm is that of all. With a function and `defaults`, each group makes a tree of its own, and the function
    is called anew at each step before which a number in the group has changed; nothing is compiled for that. A group
    added later makes a tree of its own in any case, whose steps count from 0.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either. Names are the paths that `tx` sees; without
            names, a parameter's is its number, counted through all groups. Move and shard the model first.
        tx: A transformation; or with `defaults`, a function `tx(**hyperparameters)` that makes one.
        defaults: Hyperparameters of the groups, by name. What is a float here (or a tensor, or in a tuple) is a number,
            which may change at any time: `tx` gets a float for it, or a tensor where the default is one. Other values
            are handed on as they are, and must not change.
        backend: As in `fl.compile`.
        rounding: As in `fl.compile`.
        key: As in `fl.compile`.

    Attributes:
        graphs: int; graphs compiled so far for the kernels in use, see `fl.compile`; those of each tree are counted.

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
        self._is_untouched = True  # no step was taken, and nothing but zeros was loaded
        self._was_looked_at = False  # whether the first step has looked for the model's own parameters
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
        if self._is_complete:
            with speaking("Optimizer.add_param_group"):
                self._settle()
        super().add_param_group(param_group)
        if self._is_complete:  # else torch's constructor is adding the first groups
            try:
                self._plant([len(self.param_groups) - 1])
            except Exception:
                self.param_groups.pop()
                raise

    @speaking("Optimizer")
    def _plant(self, members: list[int]) -> None:
        """Make the tree of some groups."""
        taken = {name for tree in self._trees for name in tree.params}
        params = params_of(self.param_groups, members, taken)
        if self._numbers is None:
            refuse_numbers(self.param_groups, members)
            tx, hypers = self._tx, None
            for i in members:
                if not isinstance(self.param_groups[i], NumberlessGroup):
                    self.param_groups[i] = NumberlessGroup(self.param_groups[i])
        else:
            tx, hypers = make_tx(self._tx, self._numbers, self.param_groups, members[0])
        tree = ParamTree(tx, compile(tx, **self._options), params, members, hypers)
        self._trees.append(tree)
        left = iter(params.items())
        self._given += [dict(islice(left, len(self.param_groups[i]["params"]))) for i in members]
        self._show(tree)

    def _show(self, tree: ParamTree) -> None:
        """Let `state` hold the tree's tensors."""
        for name, p in tree.params.items():
            self.state[p] = dict(tree.live[name])

    def _settle(self) -> None:
        """Refuse groups whose parameters are others than those given.

        Before the first step they may be: Accelerate puts the sharded parameters into the groups, each where the whole
        one was, and moves the model after the optimizer was made. Then the state is made anew, for them.
        """
        if self._is_untouched and are_like(self._given, self._places(), self.param_groups):
            old = self._trees, self._given, dict(self.state)
            self._trees, self._given = [], []
            self.state.clear()
            try:
                for tree in old[0]:
                    self._plant(tree.groups)
            except Exception:
                self._trees, self._given = old[:2]
                self.state.clear()
                self.state.update(old[2])
                raise
        check_params(self._given, self.param_groups)

    def _places(self) -> dict[str, Any]:
        """Where each parameter was when its tree was made, by name."""
        return {name: place for tree in self._trees for name, place in zip(tree.params, tree.places, strict=True)}

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
                others, or state that was replaced, since the optimizer was made; at the first step, for parameters
                that are the model's no longer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with speaking("Optimizer.step"):
            self._settle()
            grads = [tree.check(self.state, alone=len(self._trees) == 1) for tree in self._trees]
            if not self._was_looked_at:
                refuse_orphans([(tree.params, own) for tree, own in zip(self._trees, grads, strict=True)])
                self._was_looked_at = True
            self._read_numbers("param_groups", self.param_groups)
        for tree, own in zip(self._trees, grads, strict=True):
            if any(g is not None for g in own.values()):
                self._is_untouched = False
                if tree.update_(own):
                    self._show(tree)
        return loss

    def _read_numbers(self, source: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Let each tree go on with the numbers of its group. Parameters and state are not written to."""
        for tree in self._trees:
            tree.read_numbers(source, groups)
