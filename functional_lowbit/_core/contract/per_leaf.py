"""What a user says about each leaf: a mask, or labels."""

import inspect
from collections.abc import Callable
from typing import Any

from functional_lowbit import _optree
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue


class PerLeaf:
    """A value for each leaf of a tree, in one of four forms. Called with a tree, it returns the values in order.

    The tree may be narrowed by masks: leaves that are taken away have no value.

    Args:
        speaker: Who speaks in errors.
        name: Of the argument, in errors.
        rule: A tree of values that begins like params (a value stands for all leaves below it); a function of params to
            one; or, if it needs two positional arguments, a function of each leaf's path and the leaf. A class that is
            registered as a node is a tree, even if its instances can be called.

    Raises:
        TypeError: for a function that takes neither one positional argument nor two.
    """

    def __init__(self, speaker: str, name: str, rule: Any):
        self.speaker = speaker
        self.name = name
        self.rule = rule
        self.is_function = callable(rule) and _optree.is_leaf(rule)
        self.by_path = self.is_function and self._takes_a_path(rule)

    def __call__(self, params: Tree) -> list[Any]:
        """The value of each leaf."""
        leaves, treedef = _optree.flatten(params)
        if self.by_path:
            return [self.rule(path, leaf) for path, leaf in zip(_optree.names(treedef), leaves, strict=True)]
        given, prefix = _optree.flatten(self.rule(params) if self.is_function else self.rule)
        if prefix == treedef:
            return given
        # By number, since dicts of different classes hold the same keys in different orders.
        numbers = _optree.unflatten(treedef, range(len(leaves)))
        try:
            subtrees = _optree.flatten_up_to(prefix, numbers)
        except ValueError as error:
            difference = _optree.difference(prefix, params) or error
            reason = f"{self.name} must begin like params, but in params {difference}"
            raise WrongValue(reason, speaker=self.speaker) from error
        values: list[Any] = [None] * len(leaves)
        for value, subtree in zip(given, subtrees, strict=True):
            for i in _optree.leaves(subtree):
                values[i] = value
        return values

    def where(self, treedef: _optree.TreeDef, i: int) -> str:
        """What an error calls the value of a leaf, by the leaf's number: `mask('a.w', leaf)`, or `mask at 'a.w'`."""
        path = _optree.names(treedef)[i]
        return f"{self.name}({path!r}, leaf)" if self.by_path else f"{self.name}{f' at {path!r}' if path else ''}"

    def _takes_a_path(self, function: Callable[..., Any]) -> bool:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of a builtin: nothing is known of it
            return False
        for arguments in ((None,), (None, None)):
            try:
                signature.bind(*arguments)
            except TypeError:
                continue
            return len(arguments) == 2
        reason = f"{self.name} must be a function of params, or of (path, leaf), got one of {signature}"
        raise WrongType(reason, speaker=self.speaker)
