"""The one error: what is refused, of which leaf, and by whom.

A check raises it without a speaker, since it does not know what the user called. The function that the user called
names itself once: `with speaking("adam.update"):` around its checks, or `@speaking("chain")` above its `def`.

Imports: nothing
"""

from contextlib import ContextDecorator
from typing import Any, Self


class Refused(Exception):
    """Something that is refused. It is raised as one of the kinds below, each of which is also an error of Python's.

    Args:
        reason: The rule, what was given instead, and the way out.
        leaf: Path of the leaf that it is about; "" for a tree that is one leaf, and for what is about no leaf.
        speaker: Who refuses, in the words of whoever called it; None until a boundary has put its name to it.
    """

    def __init__(self, reason: str, leaf: str = "", speaker: str | None = None):
        super().__init__(reason)  # the one argument that pickle hands back; the rest it finds in the attributes
        self.reason = reason
        self.leaf = leaf
        self.speaker = speaker

    @classmethod
    def at(cls, what: str, path: str, rest: str) -> Self:
        """About one leaf of a tree: `params['a.w'] must be a tensor, …`."""
        return cls(f"{name_at(what, path)} {rest}", path)

    def __str__(self) -> str:
        return self.reason if self.speaker is None else f"{self.speaker}: {self.reason}"


class WrongValue(Refused, ValueError):
    """A value that cannot be meant."""


class WrongType(Refused, TypeError):
    """A value of a class that cannot be meant."""


class WrongState(Refused, RuntimeError):
    """Something that was left, here or on another rank, in a state that cannot be gone on from."""


class NoAccess(Refused, OSError):
    """A place that cannot be read or written."""


class NotThere(Refused, FileNotFoundError):
    """A file that is needed and not there."""


class NotInstalled(Refused, ImportError):
    """A package that is needed and not installed."""


class speaking(ContextDecorator):
    """Put a name to what is refused inside, unless a boundary further in has put its own.

    Example:
        >>> with speaking("compile(tx)"), speaking("adam.update"):
        ...     raise WrongValue("params['w'] must be a tensor, got int", leaf="w")
        Traceback (most recent call last):
        functional_lowbit._refused.WrongValue: adam.update: params['w'] must be a tensor, got int
    """

    def __init__(self, speaker: str):
        self._speaker = speaker

    def __enter__(self) -> None:
        """Nothing is kept, so that it may be entered again."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Refused) and error.speaker is None:
            error.speaker = self._speaker


def kind_of(error: BaseException) -> str:
    """The name of an error's class, for texts; of what is refused, that of Python's error."""
    return (type(error).__bases__[1] if isinstance(error, Refused) else type(error)).__name__


def words_of(error: BaseException, speaker: str) -> str:
    """The text of an error, for whoever says it again: without its speaker, if that is `speaker`."""
    return error.reason if isinstance(error, Refused) and error.speaker == speaker else str(error)


def name_at(what: str, path: str) -> str:
    """How a reason calls a leaf of a tree: `params['a.w']`, or `params` if the tree is that leaf."""
    return f"{what}[{path!r}]" if path else what
