"""Storage formats for moments, by name.

Imports: nothing
"""

from functional_lowbit.formats._format import Codec as Codec, Format as Format

# The order of these lines is that of `names()`.
# isort: off
from functional_lowbit.formats.companded import companded8 as companded8
from functional_lowbit.formats.dynamic import dynamic8 as dynamic8
from functional_lowbit.formats.fp8 import e4m3 as e4m3, e5m2 as e5m2
from functional_lowbit.formats.root4 import root4 as root4
from functional_lowbit.formats.dynamic import dynamic4 as dynamic4
from functional_lowbit.formats.floats import bfloat16 as bfloat16, float32 as float32
# isort: on

_TABLE: dict[str, Format] = {x.name: x for x in list(vars().values()) if isinstance(x, Format)}


def names() -> tuple[str, ...]:
    """The names of all formats.

    Example:
        >>> import functional_lowbit as fl
        >>> "companded8" in fl.formats.names()
        True
    """
    return tuple(_TABLE)


def get(format: str | Format) -> Format:
    """The format of a name; a `Format` is passed through.

    Raises:
        ValueError: for a name that is none of `names()`.
        TypeError: for anything that is neither a name nor a `Format`.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise TypeError(f"formats.get: format must be a name or a Format, got {type(format).__name__}")
    if format not in _TABLE:
        raise ValueError(f"formats.get: format must be one of {', '.join(_TABLE)}; got {format!r}")
    return _TABLE[format]
