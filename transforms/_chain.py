"""chain: apply transformations one after the other."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import EmptyState, GradientTransformation, call_update
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._core.state.parts import Composite, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking


class Chain(Composite):
    """The `update` of a chain."""

    sequential = True

    def __init__(self, inner: Sequence[GradientTransformation]):
        self.inner = tuple(inner)

    def around(self, inner: Sequence[GradientTransformation]) -> "Chain":
        """A chain of other parts."""
        return Chain(inner)

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """A tuple of the parts' states."""
        return tuple(init_with(tx, params, rest) for tx in self.inner)

    @speaking("chain.update")
    def split(self, state: Any) -> Sequence[Any]:
        """The parts' states."""
        if not isinstance(state, tuple) or len(state) != len(self.inner):
            got = f"{type(state).__name__} of {len(state)}" if isinstance(state, tuple) else type(state).__name__
            raise WrongValue(
                f"the state must be a tuple of {len(self.inner)} states, got {got}; it was made for another "
                "transformation"
            )
        return state

    def join(self, state: Any, states: Sequence[Any]) -> Any:
        """A tuple again."""
        return tuple(states)

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """Each part's update on what the one before it returned."""
        new = []
        for tx, part_state in zip(self.inner, self.split(state), strict=True):
            updates, part_state = call_update(tx.update, updates, part_state, params, extra)
            new.append(part_state)
        return updates, self.join(state, new)


@speaking("chain")
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after the other: the updates of each are given to the next.

    Args:
        *transformations: Any number of (init, update) pairs, ours or a user's.

    Returns:
        A transformation whose state is the tuple of their states.

    Raises:
        TypeError: for an argument without `init` and `update`.

    References:
        optax.chain.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.chain(fl.clip(1.0), fl.scale(-0.5))
        >>> tx.update(torch.tensor([0.5, 4.0]), tx.init(torch.zeros(2)))[0]
        tensor([-0.2500, -0.5000])
    """
    for i, tx in enumerate(transformations):
        refuse.transformation(f"argument {i}", tx)
    return Chain(transformations).transformation()


class NamedChain(Chain):
    """The `update` of a chain whose parts have names."""

    def __init__(self, names: Sequence[str], inner: Sequence[GradientTransformation]):
        super().__init__(inner)
        self.names = tuple(names)

    def around(self, inner: Sequence[GradientTransformation]) -> "NamedChain":
        """A chain of other parts, with the same names."""
        return NamedChain(self.names, inner)

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """The parts' states, by name."""
        return self.join(None, super().init_state(params, rest))

    def structure(self) -> Any:
        """The names: a chain made anew with other numbers has the same."""
        return self.names

    @speaking("named_chain.update")
    def split(self, state: Any) -> Sequence[Any]:
        """The parts' states."""
        if not isinstance(state, dict) or state.keys() != set(self.names):
            got = f"one of {', '.join(map(str, state))}" if isinstance(state, dict) else type(state).__name__
            raise WrongValue(
                f"the state must be a dict of {', '.join(self.names)}, got {got}; it was made for another "
                "transformation"
            )
        return [state[name] for name in self.names]

    def join(self, state: Any, states: Sequence[Any]) -> Any:
        """A dict again, in the order of the parts."""
        return OrderedDict(zip(self.names, states, strict=True))


@speaking("named_chain")
def named_chain(*transformations: tuple[str, GradientTransformation]) -> GradientTransformation:
    """Apply transformations one after the other, and keep their states by name.

    Args:
        *transformations: Any number of (name, transformation) pairs. Names are strings, each another.

    Returns:
        A transformation whose state is an `OrderedDict` from name to the part's state.

    Raises:
        TypeError: for an argument that is no pair of a string and a transformation.
        ValueError: for a name that is given twice.

    References:
        optax.named_chain.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.named_chain(("clip", fl.clip(1.0)), ("momentum", fl.trace(0.9)), ("lr", fl.scale(-0.5)))
        >>> updates, state = tx.update(torch.tensor([0.5, 4.0]), tx.init(torch.zeros(2)))
        >>> updates, state["momentum"].trace
        (tensor([-0.2500, -0.5000]), tensor([0.5000, 1.0000]))
    """
    names: list[str] = []
    for i, pair in enumerate(transformations):
        if refuse.is_transformation(pair) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WrongType(f"argument {i} must be a pair (name, transformation), got {type(pair).__name__}")
        name, tx = pair
        if not isinstance(name, str):
            raise WrongType(f"the name of argument {i} must be a string, got {type(name).__name__}")
        if name in names:
            raise WrongValue(f"names must differ, got {name!r} twice")
        refuse.transformation(repr(name), tx)
        names.append(name)
    return NamedChain(names, [tx for _, tx in transformations]).transformation()


def identity() -> GradientTransformation:
    """Return the updates as they are.

    References:
        optax.identity.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.identity().update(torch.ones(1), fl.identity().init(torch.ones(1)))
        (tensor([1.]), EmptyState())
    """
    return leafwise(_identity, name="identity")


def _identity(g: Any, s: EmptyState, p: Any, c: Any) -> Any:
    return g, s


def stateless(update: Callable[[Tree, Tree], Tree]) -> GradientTransformation:
    """A transformation from a function of whole trees, without state.

    Args:
        update: `update(updates, params) -> updates`, pure.

    References:
        optax.stateless.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.stateless(lambda updates, params: fl.tree.scale(2.0, updates))
        >>> tx.update(torch.ones(1), tx.init(torch.ones(1)))[0]
        tensor([2.])
    """

    def update_fn(updates: Tree, state: EmptyState, params: Tree = None) -> tuple[Tree, EmptyState]:
        return update(updates, params), state

    return GradientTransformation(lambda params: EmptyState(), update_fn)
