"""The only door to optree: flatten, map, paths, registration of our own nodes, and the one walk through stored leaves.

A leaf that rests as several tensors is a node to optree, which flattens it into those. To the walk (`nodes`,
`stored_leaves`, `map_stored`) it is one leaf.

Imports: _private
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor

from functional_lowbit._private import GLOBAL_NAMESPACE, optree_namespace_of, register_torch_node

Tree: TypeAlias = Any
"""Any pytree of tensors: dict, list, tuple, NamedTuple, registered class, a bare tensor, None."""

TreeDef = optree.PyTreeSpec
Marks: TypeAlias = Callable[[Any], Mapping[str, Any]]
"""What a node says of some of its children, by name; never None. Such a child counts as one leaf, whatever is below."""

_OWN: set[type] = set()  # registered by `register`
_STORED: set[type] = set()  # those of them that are one leaf to the walk


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """Leaves in order, and the structure that rebuilds the tree from them. None is no leaf."""
    leaves, treedef = optree.tree_flatten(tree)
    for cls in dict.fromkeys(map(type, leaves)):
        if not issubclass(cls, Tensor):
            namespace = optree_namespace_of(cls)
            if namespace is not None:
                return optree.tree_flatten(tree, namespace=namespace)
    return leaves, treedef


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
    """The subtrees of `tree` at the leaves of `treedef`, for instance None or a `QuantizedTensor`."""
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
            node, namespace=optree_namespace_of(type(node)) or ""
        )
    except ValueError:  # optree's answer for a leaf
        return None
    entries = getattr(node, "_fields", entries)
    return list(kids), [str(e) for e in entries], lambda new: rebuild(metadata, list(new))


def is_leaf(node: Any) -> bool:
    """Whether optree takes something for a leaf."""
    return children(node) is None


class Place(NamedTuple):
    """Where the walk is: at a node, under the names that lead to it from the root."""

    names: tuple[str, ...]
    node: Any
    mark: Any = None  # what the node around says of this one, if it was asked
    is_leaf: bool = True

    @property
    def path(self) -> str:
        """As people read it: `layers.0.weight`; the root is the empty string."""
        return ".".join(self.names)

    @property
    def name(self) -> str:
        """The last of the names; the root has none."""
        return self.names[-1] if self.names else ""


def _no_marks(node: Any) -> Mapping[str, Any]:
    return {}


def nodes(tree: Tree, marks: Marks = _no_marks, *, as_filled: bool = False) -> Iterator[Place]:
    """Every node of a tree, leaves and those without leaves too, each before what is below it.

    Args:
        tree: Any tree. A stored leaf is one leaf.
        marks: Says which children of a node are passed whole.
        as_filled: Whether dicts are passed in the order in which they were filled, as `model.parameters()` goes; else
            in optree's, which is sorted.
    """
    return _nodes(Place((), tree), marks, as_filled)


def _nodes(at: Place, marks: Marks, as_filled: bool) -> Iterator[Place]:
    level = _below(at, marks, as_filled)
    yield at if level is None else at._replace(is_leaf=False)
    for kid in () if level is None else level[0]:
        yield from _nodes(kid, marks, as_filled)


def stored_leaves(tree: Tree, marks: Marks = _no_marks) -> Iterator[Place]:
    """The leaves of a tree in order, a stored leaf as one, with their paths. None is no leaf."""
    return (at for at in nodes(tree, marks) if at.is_leaf)


def map_stored(function: Callable[..., Any], tree: Tree, *others: Tree, marks: Marks = _no_marks) -> Tree:
    """A tree of `function(place, *the others' subtrees)` at each of its `stored_leaves`."""

    def walk(at: Place, others: Sequence[Tree]) -> Tree:
        level = _below(at, marks)
        if level is None:
            return function(at, *others)
        kids, rebuild = level
        below = [children(other) for other in others]
        for other, own in zip(others, below, strict=True):
            if own is None or len(own[0]) != len(kids):
                raise ValueError(
                    f"the trees differ in structure: {type(at.node).__name__} against {type(other).__name__}"
                )
        rests = [own[0] for own in below if own is not None]
        return rebuild([walk(kid, rest) for kid, *rest in zip(kids, *rests, strict=True)])

    return walk(Place((), tree), others)


def _below(
    at: Place, marks: Marks, as_filled: bool = False
) -> tuple[list[Place], Callable[[Sequence[Any]], Any]] | None:
    """The places of a node's children, and how to rebuild it; None for what counts as one leaf."""
    level = children(at.node) if at.mark is None and type(at.node) not in _STORED else None
    if level is None:
        return None
    kids, names, rebuild = level
    if as_filled and isinstance(at.node, dict):
        kids, names = list(at.node.values()), list(map(str, at.node))
    said = marks(at.node)
    return [Place((*at.names, name), kid, said.get(name)) for name, kid in zip(names, kids, strict=True)], rebuild


def register(cls: Any) -> Any:
    """Make a class a node of optree's and of torch's pytrees, in their global namespaces.

    The class has `TREE_FIELDS`, the names of the children, `tree_flatten(self) -> (children, aux)` with a hashable
    aux, and `tree_unflatten(aux, children)`; and `IS_ONE_LEAF = True`, if it is one leaf to the walk.
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
    register_torch_node(
        cls,
        torch_flatten_node,
        lambda kids, aux: cls.tree_unflatten(aux, kids),
        serialized_type_name=f"functional_lowbit.{cls.__name__}",
    )
    _OWN.add(cls)
    if getattr(cls, "IS_ONE_LEAF", False):
        _STORED.add(cls)
    return cls
