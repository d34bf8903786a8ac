"""What the constructors of all ready classes take by keyword: how the state rests, and other libraries' arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._refused import WrongType, WrongValue
from functional_lowbit.transforms._low_bit import FormatChoice, Where


class Options(TypedDict, total=False):
    """Keyword arguments of every ready class. The first ones may also stand in a param group."""

    format: FormatChoice  # how moments rest, as in fl.low_bit
    block_size: int | None  # elements that share a scale; the format's own if None
    min_size: int  # smaller parameters keep float32 moments
    min_8bit_size: int | None  # bitsandbytes' name of min_size
    where: Where | None  # as in fl.low_bit
    maximize: bool  # go uphill
    stochastic_rounding: bool  # of bfloat16 and float16 parameters
    bf16_stochastic_round: bool | None  # torchao's name of stochastic_rounding
    key: int | Tensor  # of stochastic rounding, as in fl.compile
    backend: str | None  # as in fl.compile
    amsgrad: bool  # torch, torchao, bitsandbytes; False
    foreach: bool | None  # torch; has no effect
    fused: bool | None  # torch; has no effect
    capturable: bool | None  # torch; False
    differentiable: bool | None  # torch; False
    optim_bits: int | None  # bitsandbytes; the class's own number of bits, or 32, which is the default there
    args: None  # bitsandbytes
    percentile_clipping: int  # bitsandbytes; 100
    block_wise: bool  # bitsandbytes; True
    is_paged: bool  # bitsandbytes; False


DEFAULTS: Options = {
    "format": "companded8",
    "block_size": None,
    "min_size": 4096,
    "min_8bit_size": None,
    "where": None,
    "maximize": False,
    "stochastic_rounding": False,
    "bf16_stochastic_round": None,
    "key": 0,
    "backend": None,
    "amsgrad": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "optim_bits": None,
    "args": None,
    "percentile_clipping": 100,
    "block_wise": True,
    "is_paged": False,
}
LAYOUT = frozenset({"format", "block_size", "min_size", "where"})  # how a group's moments rest
OF_GROUP = LAYOUT | {"maximize"}  # what a group may have otherwise than the constructor
OF_ALL = ("stochastic_rounding", "key", "backend")  # what is the same for all groups
BOOLS = ("maximize", "stochastic_rounding")
# Other libraries' arguments: the values that change nothing, and what to do instead of another one.
HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "amsgrad": ((False, None), "there is no AMSGrad; leave it out, or write it with fl.leafwise"),
    "foreach": ((None, False, True), "leave it out"),
    "fused": ((None, False, True), "leave it out"),
    "capturable": ((False, None), "numbers are read on the CPU at each step; leave it out"),
    "differentiable": (
        (False, None),
        "a step writes in place; differentiate through the update of the transformation, for instance fl.adamw8bit",
    ),
    "optim_bits": ((None, 32), "the class says how many bits; choose another class, or format='float32'"),
    "args": ((None,), "give its entries by name, for instance min_size"),
    "percentile_clipping": ((100,), "clip with torch.nn.utils.clip_grad_norm_ before the step"),
    "block_wise": ((True,), "scales are always those of blocks; block_size says how large"),
    "is_paged": (
        (False, None),
        "moments rest on the CPU with fl.optim.Optimizer(params, fl.offload(tx)), where tx is for instance "
        "fl.adamw8bit(lr)",
    ),
}


def checked(given: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """Options with one name for each, without those of other libraries.

    Args:
        given: Options by name.
        bits: How many the class stands for.

    Raises:
        TypeError, ValueError: for a name that is no option, a value of another kind, an unknown format, and a value of
            another library's argument that is not supported.
    """
    unknown = next((name for name in given if name not in DEFAULTS), None)
    if unknown is not None:
        raise WrongType(f"there is no argument {unknown!r}; there are {', '.join(DEFAULTS)}")
    options = dict(given)
    for name, (values, way_out) in HARMLESS.items():
        if name in options:
            value = options.pop(name)
            allowed = (*values, bits) if name == "optim_bits" else values
            if not any(value is x or (type(value) is type(x) and value == x) for x in allowed):
                words = " or ".join(map(repr, allowed))
                raise WrongValue(f"{name} must be {words}, got {value!r}; {way_out}")
    for name, own in (("min_8bit_size", "min_size"), ("bf16_stochastic_round", "stochastic_rounding")):
        value = options.pop(name, None)
        if value is not None:
            if own in options and options[own] != value:
                raise WrongValue(
                    f"{name} is another name of {own}, but they are {value!r} and {options[own]!r}; give one"
                )
            options[own] = value
    for name in BOOLS:
        if name in options and not isinstance(options[name], bool):
            raise WrongType(f"{name} must be a bool, got {options[name]!r}")
    if not callable(options.get("where", callable)) and options["where"] is not None:
        raise WrongType(f"where must be a function where(path, leaf), got {options['where']!r}")
    if "format" in options:
        options["format"] = _named(options["format"])
    return options


def _named(format: FormatChoice) -> Any:
    """A format by its name, or each of them; a Format that is not registered stays itself."""
    if isinstance(format, Mapping):
        return {field: _named(own) for field, own in format.items()}
    if not isinstance(format, (str, formats.Format)):
        raise WrongType(f"format must be a name or a Format, got {type(format).__name__}")
    if isinstance(format, str) and format not in formats.names():
        raise WrongValue(f"format must be one of {', '.join(formats.names())}; got {format!r}")
    own = formats.get(format)
    return own.name if own.name in formats.names() and formats.get(own.name) is own else own


def shown(constructor: Callable[..., Any], own: Mapping[str, Any]) -> inspect.Signature:
    """What help() shows of a class: the arguments of its constructor, `**options: Unpack[Options]` one by one.

    Args:
        constructor: With `self`.
        own: Options whose default is another one than in DEFAULTS.
    """
    signature = inspect.signature(constructor)
    _, *parameters = signature.parameters.values()
    if parameters and parameters[-1].annotation == Unpack[Options]:
        defaults = {**DEFAULTS, **own}
        parameters[-1:] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
            for name, hint in Options.__annotations__.items()
        ]
    return signature.replace(parameters=parameters)
