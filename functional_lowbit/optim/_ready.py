"""What the ready classes have in common: options, and groups that rest in formats of their own."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from torch.optim.optimizer import ParamsT

from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats import Format
from functional_lowbit.optim._groups import params_of
from functional_lowbit.optim._optimizer import Optimizer
from functional_lowbit.optim._options import DEFAULTS, HARMLESS, LAYOUT, OF_ALL, OF_GROUP, checked, shown
from functional_lowbit.optim._rules import with_floats


class Ready(Optimizer):
    """Base of the ready classes. A subclass names its format and number of bits, and its other defaults.

    Args:
        params: As in `Optimizer`. A group may have its own numbers, `format`, `block_size`, `min_size`, `where` and
            `maximize`.
        rule: Makes the transformation of a group, from numbers and options.
        hyperparams: The rule's own hyperparameters, by name.
        options: See `Options`.

    Raises:
        TypeError, ValueError: for wrong options, and what `Optimizer` refuses.
    """

    LAYOUT = LAYOUT
    BITS: ClassVar[int] = 8
    OWN: ClassVar[Mapping[str, Any]] = {}  # options whose default is another one than in DEFAULTS

    def __init_subclass__(cls, bits: int | None = None, **own: Any):
        super().__init_subclass__()
        cls.BITS = cls.BITS if bits is None else bits
        cls.OWN = {**cls.OWN, **own}
        cls.__signature__ = shown(cls.__init__, cls.OWN)  # what help() shows

    def __init__(
        self,
        params: ParamsT,
        rule: Callable[..., GradientTransformation],
        hyperparams: Mapping[str, Any],
        options: Mapping[str, Any],
    ):
        speaker = type(self).__name__
        with speaking(speaker):
            own = {**DEFAULTS, **self.OWN, **checked(options, self.BITS)}
        betas = hyperparams.get("betas", (0.0, 0.0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise WrongValue(f"betas must be 2 numbers, got {betas!r}", speaker=speaker)
        numbers = {name: _as_numbers(value) for name, value in hyperparams.items()}
        self._where = own["where"]
        self._for_all = {name: own[name] for name in OF_ALL}
        super().__init__(
            params,
            partial(with_floats, rule),
            {**numbers, **{name: own[name] for name in DEFAULTS if name in OF_GROUP}},
            backend=own["backend"],
            rounding="stochastic" if own["stochastic_rounding"] else "nearest",
            key=own["key"] if own["stochastic_rounding"] else None,
        )
        if self._where is not None and all(group["where"] is None for group in self.param_groups):
            reason = "where matched no leaf; it is called as where(path, leaf), path like 'a.0.weight'"
            raise WrongValue(reason, speaker=speaker)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have its own numbers, format, block_size, min_size, where and maximize."""
        if isinstance(param_group, dict):
            number = len(self.param_groups)
            mine = {name: value for name, value in param_group.items() if name in DEFAULTS}
            others = {name: value for name, value in param_group.items() if name not in mine}
            foreign = {name: value for name, value in mine.items() if name in HARMLESS}
            with speaking(f"{type(self).__name__}: group {number}"):
                own = checked(mine, self.BITS)
            for name, value in self._for_all.items():  # ZeroRedundancyOptimizer puts all arguments into the groups
                if (found := own.pop(name, value)) != value:
                    raise WrongValue(
                        f"group {number} has {name} = {found!r}, which is the same for all groups; give it to the "
                        "constructor",
                        speaker=type(self).__name__,
                    )
            param_group = {**others, **foreign, **own}
        super().add_param_group(param_group)

    def _plant(self, members: list[int]) -> None:
        """A predicate for all groups may match nothing in one of them, which then rests in float32."""
        for i in members:
            group = self.param_groups[i]
            if group["where"] is not None and group["where"] is self._where:
                taken = {name for tree in self._trees for name in tree.params}
                if not any(group["where"](name, p) for name, p in params_of(self.param_groups, [i], taken).items()):
                    group.update(where=None, format="float32")
        super()._plant(members)

    def _saved_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Without functions and formats, which `torch.load(weights_only=True)` would refuse."""
        return {**group, "format": _name(group["format"]), "where": None}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy."""
        return {**super().__getstate__(), "_where": self._where, "_for_all": self._for_all}


def _as_numbers(value: Any) -> Any:
    """Whole numbers and numpy's as floats: what is given decides what is a number from then on."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_as_numbers, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _name(format: Any) -> Any:
    if isinstance(format, Mapping):
        return {field: _name(own) for field, own in format.items()}
    return format.name if isinstance(format, Format) else format
