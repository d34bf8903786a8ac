"""with_format: one recipe more, which differs from another in the default of its `format`."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from functional_lowbit._base import GradientTransformation

P = ParamSpec("P")


def with_format(
    recipe: Callable[P, GradientTransformation], name: str, format: str, doc: str
) -> Callable[P, GradientTransformation]:
    """A recipe under another name, with another default format.

    Args:
        recipe: A function with the keyword-only argument `format`. It is called with the same arguments.
        name: Of the variable that the result is assigned to, in the module of `recipe`.
        format: The new default.
        doc: The new docstring.
    """

    @functools.wraps(recipe)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        kwargs.setdefault("format", format)
        return recipe(*args, **kwargs)

    signature = inspect.signature(recipe)
    parameters = [p.replace(default=format) if p.name == "format" else p for p in signature.parameters.values()]
    renamed.__name__ = renamed.__qualname__ = name
    renamed.__doc__ = doc
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what help() shows
    return renamed
