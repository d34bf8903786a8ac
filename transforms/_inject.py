"""inject_hyperparams: hyperparameters as numbers in the state, to be changed between steps."""

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Number, call_update
from functional_lowbit._core.leafwise.scalars import at_least_float32
from functional_lowbit._core.state.parts import Renewing, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking


class InjectHyperparamsState(NamedTuple):
    """The numbers of the next step, and the state of the transformation that is made of them."""

    step: Tensor  # int64[]; updates made so far
    hyperparams: Number  # float32[] by name; may be filled, or replaced by numbers
    inner_state: Any


class InjectHyperparams(Renewing):
    """The `update` of `inject_hyperparams`.

    Args:
        factory: Makes the inner transformation.
        fixed: Its arguments that stay as they are.
        numbers: Those that are numbers in the state, or schedules of them.
        dtype: Of the numbers in the state.
    """

    state_class = InjectHyperparamsState
    name = "inject_hyperparams"

    def __init__(self, factory: Callable[..., Any], fixed: dict[str, Any], numbers: dict[str, Any], dtype: torch.dtype):
        self.factory = factory
        self.fixed = fixed
        self.schedules = {name: value for name, value in numbers.items() if _is_schedule(value)}
        self.first = {name: value for name, value in numbers.items() if name not in self.schedules}
        self.names = tuple(numbers)
        self.dtype = dtype
        self.inner = (self.make(self.firsts()),)

    @speaking("inject_hyperparams")
    def firsts(self) -> dict[str, Tensor]:
        """New tensors for the numbers of the first step."""
        step = torch.zeros((), dtype=torch.int64, device="cpu")
        values = self.first | {name: self._scheduled(name, step) for name in self.schedules}
        return {name: self._tensor(name, values[name]).detach().clone() for name in self.names}

    @speaking("inject_hyperparams")
    def make(self, numbers: dict[str, Tensor]) -> GradientTransformation:
        """The inner transformation with these numbers."""
        tx = self.factory(**self.fixed, **numbers)
        refuse.transformation("inner_factory(...)", tx)
        return tx

    def structure(self) -> Any:
        """The numbers' names, their dtype, and the first ones: a state has its own, and would not follow others."""
        return self.names, self.dtype, {name: float(value) for name, value in self.first.items()}

    def init_state(self, params: Tree, rest: Rest) -> InjectHyperparamsState:
        """The first numbers, and the inner state."""
        return InjectHyperparamsState(
            step=torch.zeros((), dtype=torch.int64, device="cpu"),
            hyperparams=self.firsts(),
            inner_state=init_with(self.inner[0], params, rest),
        )

    @speaking("inject_hyperparams")
    def advance(self, state: Any) -> tuple[dict[str, Tensor], Any]:
        """This step's numbers by name, and the state with them and with the next step's count."""
        self.split(state)
        given = state.hyperparams
        for name in given if isinstance(given, dict) else ():
            if name not in self.names:
                why = "; it was given as one that stays as it is" if name in self.fixed else ""
                raise WrongValue(f"state.hyperparams has {name!r}, but the numbers are {_list(self.names)}{why}")
        numbers = {}
        for name in self.names:
            if not isinstance(given, dict) or name not in given:
                raise WrongValue(f"state.hyperparams has no {name!r}; set a number again")
            value = self._scheduled(name, state.step) if name in self.schedules else given[name]
            numbers[name] = self._tensor(f"state.hyperparams[{name!r}]", value)
        return numbers, state._replace(step=state.step + 1, hyperparams=numbers)

    def _tensor(self, what: str, value: Any) -> Tensor:
        """A number as it stands in the state."""
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                raise WrongType(f"{what} must be a float or a float tensor, got {value.dtype}")
            value = value.detach() if isinstance(value, torch.nn.Parameter) else value
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise WrongType(f"{what} must be a number or a 0-d tensor, got {type(value).__name__}")
        else:
            value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        return refuse.finite(what, value).to(self.dtype)

    def _scheduled(self, name: str, step: Tensor) -> Any:
        """What a schedule says."""
        with at_least_float32():
            value = self.schedules[name](step)
        if isinstance(value, (Real, Tensor)) and not isinstance(value, bool):
            return value.double() if isinstance(value, Tensor) else value  # a whole number is one too
        raise WrongType(
            f"{name} is a function, and taken for a schedule of numbers, but returned {type(value).__name__}; if it is "
            "none, name it in static_args"
        )

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The update of the transformation that is made of this step's numbers."""
        numbers, new = self.advance(state)
        updates, inner = call_update(self.make(numbers).update, updates, state.inner_state, params, extra)
        kept = {name: x.clone() for name, x in numbers.items()}  # filled in the new state, the old one's stay
        return updates, new._replace(hyperparams=kept, inner_state=inner)


def _is_schedule(value: Any) -> bool:
    return callable(value) and not isinstance(value, Tensor)


def _takes_a_step(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; what has no signature is tried."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _is_number(value: Any, default: Any) -> bool:
    """Whether an argument is a number in the state: a float, or a whole number in the place of one."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.is_floating_point()
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return not isinstance(value, Integral) or isinstance(default, float)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


@speaking("inject_hyperparams")
def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: torch.dtype = torch.float32,
) -> Callable[..., GradientTransformation]:
    """Let the float hyperparameters of a transformation be numbers in its state.

    They are in `state.hyperparams`, by name, and may be changed between steps: `state.hyperparams["learning_rate"]` is
    filled (`fill_`) or replaced by a number or a 0-d tensor. The transformation is made anew of them at each step, so
    whatever `inner_factory` computes from them follows. A compiled step does so if a number has changed, and goes on
    with its kernels; but a number that the factory turns into a Python float *inside* a leaf function is compiled anew.

    Args:
        inner_factory: Makes a transformation of hyperparameters, which it takes by name. It is given float32[] tensors
            for the numbers, and must not change what it builds with them.
        static_args: Names of arguments that stay as they are, for instance functions that are no schedules.
        hyperparam_dtype: Of the numbers in the state, whatever dtype parameters have.

    Returns:
        A function with the arguments of `inner_factory`. A float, a 0-d float tensor, or an int where the default is a
        float, becomes a number in the state; a function is a schedule of one, `f(step)` with `step` int64[], counted
        from 0, whatever its entry in the state is set to; all else (ints, bools, strings, None, trees) stays as it is.

    Raises:
        TypeError: for a factory that is no function or takes arguments without names, and for one that makes no
            transformation; at `update`, for a hyperparameter that is no number.
        ValueError: for `static_args` that are no arguments of the factory; at `update`, for hyperparameters that are
            missing, unknown, not 0-d or not finite. Ranges are looked at once, when the transformation is made.

    References:
        optax.inject_hyperparams, where the dtype follows the parameters, and ints are numbers too.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.inject_hyperparams(fl.adamw8bit)(learning_rate=0.1), {"w": torch.ones(2)}
        >>> state = tx.init(params)
        >>> list(state.hyperparams)
        ['learning_rate', 'b1', 'b2', 'eps', 'eps_root', 'weight_decay']
        >>> state.hyperparams["learning_rate"].fill_(0.5)
        tensor(0.5000)
        >>> params, state = fl.compile(tx, backend="eager")({"w": torch.ones(2)}, state, params)
        >>> params
        {'w': tensor([0.4999, 0.4999])}
    """
    if not callable(inner_factory) or refuse.is_transformation(inner_factory):
        raise WrongType(
            f"inner_factory must be a function that makes a transformation, got {type(inner_factory).__name__}"
        )
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    parameters = signature.parameters
    for parameter in parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise WrongType(
                f"inner_factory must take its arguments by name, but has {parameter}; wrap it in a function that does"
            )
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if has_rest else sorted(static.difference(parameters))
    if unknown:
        raise WrongValue(f"static_args has {unknown[0]!r}, but the arguments of inner_factory are {_list(parameters)}")

    @speaking("inject_hyperparams")
    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            given.update(value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        numbers, fixed = {}, {}
        for name, value in given.items():
            default = parameters[name].default if name in parameters else None
            if name not in static and _is_schedule(value) and not _takes_a_step(value):
                raise WrongType(
                    f"{name} is a function, and taken for a schedule of numbers, but is not one of the step alone; if "
                    "it is none, name it in static_args"
                )
            is_number = name not in static and (_is_schedule(value) or _is_number(value, default))
            (numbers if is_number else fixed)[name] = value
        plain = {name: value for name, value in numbers.items() if not _is_schedule(value)}
        part = InjectHyperparams(inner_factory, fixed, numbers, hyperparam_dtype)
        part.make({**part.firsts(), **plain})  # for the ranges of floats, which tensors do not have
        return part.transformation()

    return make
