"""Which operations a leaf function may use: what it declares about itself is checked against what it does.

A rank holds a part of each leaf. A function that takes the mean of what it is given would take the mean of that part,
and nothing would say so; such a function is refused, with the operation's name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_lowbit._private import (
    DispatchMode,
    disable_current_modes,
    in_function_transform,
    schema_of,
    version_of,
)
from functional_lowbit._refused import WrongValue

# Operations without torch.Tag.pointwise that leave each element where it is, or make tensors from numbers.
_NAMES = (
    "_conj _local_scalar_dense _neg_view _prelu_kernel _reshape_alias _reshape_copy _to_copy _unsafe_view alias "
    "bucketize clone complex copy copy_ detach detach_ empty empty_like empty_strided expand expand_copy fill fill_ "
    "floor_divide floor_divide_ full full_like hardswish lift lift_fresh lift_fresh_copy log_sigmoid_forward "
    "masked_fill masked_fill_ new_empty new_empty_strided new_full new_ones new_zeros ones ones_like polar reshape "
    "resolve_conj resolve_neg rsub scalar_tensor squeeze unsqueeze view view_copy where zero zero_ zeros zeros_like"
)
AT_THEIR_PLACES = frozenset(_NAMES.split())


class MixesElements(Exception):
    """A leaf function used an operation that combines elements, moves them, or draws at random.

    The text is the operation and what is wrong with it; `way_out` what to do instead.
    """

    way_out = (
        "use fl.reduce.sum, mean, norm or max and declare the function with leafwise(..., reduces=True), or have it "
        "given whole leaves with elementwise=False"
    )


class WritesToArguments(MixesElements):
    """A leaf function wrote into g, p or a moment."""

    way_out = "it must be pure: clone what it writes to"


class DrawsAtRandom(MixesElements):
    """A leaf function drew random numbers."""

    way_out = "make the noise from a key with fl.rounding, or hand it in with the gradients"


# What takes numbers out of a tensor behind the dispatcher's back.
_LEAKS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage})


class _NoLeaks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAKS and args[0].ndim:
            raise MixesElements(f"Tensor.{func.__name__}, after which nothing is known of what becomes of its elements")
        return func(*args, **(kwargs or {}))


class Guard(DispatchMode):
    """While it is entered, an operation that does not leave elements at their places raises `MixesElements`."""

    def __enter__(self) -> Any:
        self._leaks = _NoLeaks()
        self._leaks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        super().__exit__(*error)
        self._leaks.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, if each element of its result is made of elements at one place."""
        if not _keeps_places(func):
            name = str(func).removesuffix(".default")
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                raise DrawsAtRandom(f"{name}, which is random, so that ranks with copies of a leaf would part")
            raise MixesElements(
                f"{name}, which combines elements or moves them, where a rank holds only a part of them"
            )
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1024)
def _keeps_places(op: Any) -> bool:
    schema = schema_of(op)
    if schema is None:  # a higher-order operator
        return False
    namespace, name = schema.name.split("::")
    if name == "equal":  # tagged, but its answer is about all elements
        return False
    return torch.Tag.pointwise in op.tags or (namespace == "aten" and name in AT_THEIR_PLACES)


# (shape of the leaf, value of all in `c`); a function may take a mean of large leaves only, or for some values only.
TRIALS = (((2, 3), 0.5), ((256, 256), 2.0))


class _AnyScalar:
    """Stands for `c`: every hyperparameter has some value."""

    def __init__(self, value: float):
        self._value = value

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return torch.full((), self._value, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=4096)
def _verdict(function: Callable[..., Any], state_class: Any, moments: tuple[str, ...]) -> Exception | None:
    """What a function does that is not elementwise, or why it cannot be tried; None if there is nothing."""
    verdicts = [_trial(function, state_class, moments, shape, value) for shape, value in TRIALS]
    return next((v for v in verdicts if isinstance(v, MixesElements)), next(filter(None, verdicts), None))


def _trial(
    function: Callable[..., Any], state_class: Any, moments: tuple[str, ...], shape: tuple[int, ...], scalar: float
) -> Exception | None:
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        g, p, *values = [
            torch.full(shape, 0.25 + 0.125 * i, dtype=torch.float32, device="cpu") for i in range(2 + len(moments))
        ]
        fields = {**dict.fromkeys(state_class._fields), **dict(zip(moments, values, strict=True))}
        try:
            with Guard():
                function(g, state_class(**fields), p, _AnyScalar(scalar))
        except MixesElements as mixes:
            return mixes.with_traceback(None)  # which would keep tensors alive
        except Exception as other:  # it may be right for its real arguments; it is watched there then
            return other.with_traceback(None)
        if any(map(version_of, (g, p, *values))):
            return WritesToArguments("an operation that writes into one of its arguments")
    return None


def check_elementwise(function: Callable[..., Any], state_class: Any, moments: Sequence[str]) -> bool:
    """Refuse a leaf function that is declared elementwise and is not. It is tried once, see `TRIALS`.

    Returns:
        Whether it could be tried. If not, it must be watched where it runs.
    """
    if not can_watch():
        return True
    try:
        mixes = _verdict(function, state_class, tuple(moments))
    except TypeError:  # a callable that cannot be hashed is tried each time
        mixes = _verdict.__wrapped__(function, state_class, tuple(moments))
    if isinstance(mixes, MixesElements):
        raise WrongValue(
            f"the leaf function {name_of(function)} is elementwise by its declaration, but calls {mixes}; "
            f"{mixes.way_out}"
        )
    return mixes is None


def can_watch() -> bool:
    """Whether operations are those that a function was written with: not so inside torch.func and torch.compile."""
    return not torch.compiler.is_compiling() and not in_function_transform()


@contextmanager
def watched(guard: Guard | None, function: Callable[..., Any], path: str) -> Iterator[None]:
    """While a function is given a rank's part of a leaf; it is not watched if there is no guard."""
    if guard is None:
        yield
        return
    try:
        with guard:
            yield
    except MixesElements as mixes:
        reason = f"at {path!r}, the leaf function {name_of(function)} calls {mixes}; {mixes.way_out}"
        raise WrongValue(reason, path) from None


def name_of(function: Callable[..., Any]) -> str:
    """How a leaf function is called in errors."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
