"""The only door to optree: flatten, map, paths, and registration of our own nodes.

Imports: nothing
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import optree
import torch.utils._pytree as torch_pytree
from optree.registry import (
    __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE,
    _NODETYPE_REGISTRY,
)
from torch import Tensor

Tree: TypeAlias = Any
"""Any pytree of tensors: dict, list, tuple, NamedTuple, registered class, a bare tensor, None."""

TreeDef = optree.PyTreeSpec
_OWN: set[type] = set()  # registered by `register`


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """Leaves in order, and the structure that rebuilds the tree from them. None is no leaf."""
    leaves, treedef = optree.tree_flatten(tree)
    for cls in dict.fromkeys(map(type, leaves)):
        if not issubclass(cls, Tensor):
            namespace = _namespace_of(cls)
            if namespace is not None:
                return optree.tree_flatten(tree, namespace=namespace)
    return leaves, treedef


def _namespace_of(cls: type) -> str | None:
    """The namespace of optree in which a user registered a class; without it optree would take the node for a leaf."""
    for key in _NODETYPE_REGISTRY:  # there is no public way to ask
        if isinstance(key, tuple) and key[1] is cls:
            return key[0]
    return None


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """The way back from `flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree; None is no leaf."""
    return flatten(tree)[0]


def map_leaves(function: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """A tree of `function(leaf, *subtrees of the rests)`; the first tree gives the structure."""
    first, treedef = flatten(tree)
    others = [treedef.flatten_up_to(rest) for rest in rests]
    return unflatten(treedef, map(function, first, *others))


@lru_cache(maxsize=64)
def names(treedef: TreeDef) -> list[str]:
    """The path of each leaf as people read it: `layers.0.weight`; the root is the empty string."""
    return [
        ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in treedef.accessors()
    ]


def flatten_up_to(treedef: TreeDef, tree: Tree) -> list[Any]:
    """The subtrees of `tree` at the leaves of `treedef`, for instance None or a `QuantizedTensor`.

    Raises:
        ValueError: if `tree` does not begin with that structure.
    """
    return treedef.flatten_up_to(tree)


def difference(treedef: TreeDef, tree: Tree, path: str = "") -> str:
    """Where a tree first leaves a structure, in words without the tensors themselves; "" if it begins like it."""
    kind = treedef.type
    if kind is None:  # a leaf
        return ""
    level = children(tree)
    both_dicts = issubclass(kind, dict) and isinstance(tree, dict)
    if level is None or not (both_dicts or type(tree) is kind):
        expected = "None" if kind is type(None) else f"a {kind.__name__}"
        got = "None" if tree is None else type(tree).__name__
        return f"{expected} was expected{f' at {path!r}' if path else ''}, got {got}"
    kids = dict(zip(level[1], level[0], strict=True))
    expected = dict(zip(map(str, getattr(kind, "_fields", treedef.entries())), treedef.children(), strict=True))
    for name in [*expected, *kids]:
        inside = f"{path}.{name}" if path else name
        if name not in kids:
            return f"{inside!r} is missing"
        if name not in expected:
            return f"{inside!r} is unexpected"
        found = difference(expected[name], kids[name], inside)
        if found:
            return found
    return ""


def children(node: Any) -> tuple[list[Any], list[str], Callable[[Sequence[Any]], Any]] | None:
    """One level of a tree: the children, their names, and how to rebuild the node; None for a leaf."""
    if isinstance(node, Tensor):
        return None
    if type(node) in _OWN:  # a mask has one such node for each leaf: optree would take most of a step's time
        cls, (kids, aux) = type(node), node.tree_flatten()
        return list(kids), list(cls.TREE_FIELDS), lambda new: cls.tree_unflatten(aux, list(new))
    try:
        kids, metadata, entries, rebuild = optree.tree_flatten_one_level(
            node, namespace=_namespace_of(type(node)) or ""
        )
    except ValueError:  # optree's answer for a leaf
        return None
    entries = getattr(node, "_fields", entries)
    return list(kids), [str(e) for e in entries], lambda new: rebuild(metadata, list(new))


def register(cls: Any) -> Any:
    """Make a class a node of optree's and of torch's pytrees, in their global namespaces.

    The class has `TREE_FIELDS`, the names of the children, `tree_flatten(self) -> (children, aux)` with a hashable
    aux, and `tree_unflatten(aux, children)`.
    """

    def flatten_node(node: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
        kids, aux = node.tree_flatten()
        return tuple(kids), aux, cls.TREE_FIELDS

    def torch_flatten_node(node: Any) -> tuple[list[Any], Any]:
        kids, aux = node.tree_flatten()
        return list(kids), aux

    optree.register_pytree_node(
        cls,
        flatten_node,
        cls.tree_unflatten,
        path_entry_type=optree.GetAttrEntry,
        namespace=GLOBAL_NAMESPACE,
    )
    torch_pytree.register_pytree_node(
        cls,
        torch_flatten_node,
        lambda kids, aux: cls.tree_unflatten(aux, kids),
        serialized_type_name=f"functional_lowbit.{cls.__name__}",
    )
    _OWN.add(cls)
    return cls
