"""The leaves of a state by their paths, each with what the classes of the state say of it."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import Role, moments_of, roles_of, statistics_of

LIKE_PARAMS = ("moment", "statistic", "master", "record")  # roles of fields that have a leaf for each parameter
ROLES = (*LIKE_PARAMS, "counter", "number")
BY_PARAM = object()  # marks what is one parameter's in a dict by parameters


class Named(NamedTuple):
    """Where a leaf is in a state, and what it is there."""

    path: str  # 0.mu.layers.0.weight
    role: str | None = None  # one of `ROLES`; None, as the next three, for what no state class declares
    field: str | None = None  # of the state class
    param: str | None = None  # path of the parameter that it is of; "" if params are one tensor; None: of all
    signed: bool | None = None  # of a moment
    entry: str = ""  # the path without the parameter's part: 0.mu
    owner: str | None = None  # the parameter, by the names that are given to `map_named`


def map_named(visit: Callable[[Named, Any], Any], state: Any, params: Collection[str] = ()) -> Any:
    """A state with `visit(named, leaf)` in place of each leaf; a `QuantizedTensor` is one leaf.

    Args:
        visit: Makes what stands in the leaf's place.
        state: Any tree.
        params: Names of the parameters, where owners are asked for. What no class declares has an owner if it is in a
            dict with exactly these names; labels, names in a `named_chain` and hyperparameters may be called alike.
    """
    wanted = set(params)

    def free(node: Any, base: Named, is_labelled: bool = False) -> Any:
        """What no class around it declares; `is_labelled`: the names of this node are none of parameters."""

        def marks(inner: Any) -> dict[str, Any]:
            if base.owner is None and not (is_labelled and inner is node) and _is_by_param(inner, wanted):
                return dict.fromkeys(inner, BY_PARAM)
            return _declared(type(inner))

        def each(at: _optree.Place) -> Any:
            here = base._replace(path=_joined(base.path, *at.names), entry=_joined(base.entry, *at.names))
            if at.mark is None:
                return visit(here, at.node)
            if at.mark is BY_PARAM:
                return free(at.node, here._replace(entry=_joined(base.entry, *at.names[:-1]), owner=at.name))
            role, signed = at.mark
            if role.name == "states":
                return free(at.node, here, is_labelled=True)
            return declared(at.node, here._replace(role=role.name, field=at.name, signed=signed), role)

        return _optree.map_stored(each, node, marks=marks)

    def declared(node: Any, base: Named, role: Role) -> Any:
        def each(at: _optree.Place) -> Any:
            own = int(role.by_name) if role.name in LIKE_PARAMS else len(at.names)  # names that are no parameter's
            here = base._replace(path=_joined(base.path, *at.names), entry=_joined(base.entry, *at.names[:own]))
            if role.name not in LIKE_PARAMS:
                return visit(here, at.node)
            param = _joined("", *at.names[own:])
            if base.owner is None and param in wanted:
                return visit(here._replace(param=param, owner=param), at.node)
            return visit(here._replace(param=param, entry=_joined(here.entry, *at.names[own:])), at.node)

        return _optree.map_stored(each, node)

    return free(state, Named(""))


def named_leaves(state: Any) -> list[tuple[Named, Any]]:
    """All leaves, in order."""
    found: list[tuple[Named, Any]] = []
    map_named(lambda named, leaf: found.append((named, leaf)), state)
    return found


def _declared(state_class: type) -> dict[str, tuple[Role, bool | None]]:
    """What a class says of its fields, and which sign moments have."""
    moments = {name: (Role("moment"), moment.signed) for name, moment in moments_of(state_class).items()}
    others = {name: (Role("statistic"), None) for name in statistics_of(state_class)}
    return {**{name: (role, None) for name, role in roles_of(state_class).items()}, **others, **moments}


def _is_by_param(node: Any, params: Collection[str]) -> bool:
    """Whether it is a dict with a part for each parameter. A named chain is one of states."""
    if not params or not isinstance(node, dict) or set(node) != params:
        return False
    return not (isinstance(node, OrderedDict) and any(isinstance(kid, (tuple, dict)) for kid in node.values()))


def _joined(base: str, *names: str) -> str:
    return ".".join((base, *names) if base else names)
