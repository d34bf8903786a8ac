"""What transformations are made of: parts that hold other parts, and how a part's state is found inside the whole.

A `Part` is a callable that serves as the `update` of a `GradientTransformation`. Called, it does what optax's update
does. The compiled step does not call it: it takes the tree of parts apart, down to leaf functions, and fuses those.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import GradientTransformation, Moment, moments_of
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.resting import rest_in_float32
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking


class Rest(Protocol):
    """Decides how a new moment is kept: `rest(field, moment, path, param, value)`.

    `value` makes this rank's part in float32, or is None for zeros.
    """

    def __call__(
        self, field: str, moment: Moment, path: str, param: Tensor, value: Callable[[], Tensor] | None
    ) -> Any: ...


class Part(ABC):
    """The `update` of a transformation whose inside is known."""

    def transformation(self) -> GradientTransformation:
        """The pair that users hold."""
        return GradientTransformation(self.init, self)

    def init(self, params: Tree) -> Any:
        """A new state, its moments in float32."""
        return self.init_state(params, rest_in_float32)

    @abstractmethod
    def init_state(self, params: Tree, rest: Rest) -> Any:
        """A new state, its moments kept as `rest` decides."""

    @abstractmethod
    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The pure update."""

    def structure(self) -> Any:
        """What this part's states are built by, beside inner parts: one made anew with other numbers has the same."""
        return ()


class Composite(Part):
    """A part that holds other parts, and their states inside its own.

    One with a `state_class` has the state of its one inner transformation in a field of its own; one without says what
    its state is made of by `split` and `join`, and if it does not, its state is the inner one.
    """

    inner: tuple[GradientTransformation, ...]
    state_class: type | None = None
    inner_field = "inner_state"
    name = ""  # who speaks in errors
    sequential = False  # whether the inner transformations see the same trees as this one, one after the other
    offloads = False  # whether the moments inside rest on the CPU, see `transforms._offload`

    def split(self, state: Any) -> Sequence[Any]:
        """The states of the inner transformations, in order."""
        if self.state_class is None:
            return (state,)
        with speaking(f"{self.name}.update"):
            fits.state_class(state, self.state_class)
        return (getattr(state, self.inner_field),)

    def join(self, state: Any, states: Sequence[Any]) -> Any:
        """This part's state with the inner states replaced."""
        return states[0] if self.state_class is None else state._replace(**{self.inner_field: states[0]})

    def narrow(self, params: Tree) -> Tree:
        """The tree that the inner transformations see; masks take leaves away."""
        return params


class Gated(Composite):
    """A composite that, at each step, may leave its inner update out."""

    @abstractmethod
    def decide(self, updates: Tree, state: Any) -> tuple[Tensor, Any]:
        """Whether the inner update is made, bool[], and this part's own state moved on (inner state as it was)."""


class HostGated(Composite):
    """A composite that makes its inner update at some steps only, which numbers on the CPU decide.

    At the other steps nothing inside it is run at all, and updates are zeros behind it.
    """

    sequential = True
    rule: Any  # the `Leafwise` of what it does with updates at every step; its state class is that of this part

    @abstractmethod
    def opens(self, state: Any) -> bool:
        """Whether the inner update is made at this step."""

    @abstractmethod
    def missed(self, moment: Tensor, state: Any) -> Tensor:
        """What a moment of the rule, or a part of it, becomes where a leaf has no gradient at this step."""


class Renewing(Composite):
    """A composite whose inner transformation is made anew from numbers in its state."""

    sequential = True

    @abstractmethod
    def advance(self, state: Any) -> tuple[dict[str, Tensor], Any]:
        """This step's numbers, 0-d, by name, and this part's own state moved on (inner state as it was).

        Raises:
            TypeError, ValueError: for numbers that cannot be meant.
        """

    @abstractmethod
    def make(self, numbers: dict[str, Tensor]) -> GradientTransformation:
        """The inner transformation with these numbers."""


class Pairing(Protocol):
    """A parameter and the tensor beside it, read and written as one wider number.

    Both functions are elementwise and are traced into kernels; those of equal pairings share kernels.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor beside the parameter, as kernels are given it."""
        ...

    def read(self, p: Tensor, beside: Tensor) -> Tensor:
        """The wider number, float32."""
        ...

    def write(self, p: Tensor, beside: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """The parameter and the tensor beside it for a new float32 number."""
        ...


class Widening(Composite):
    """A composite that keeps a tensor beside parameters, which are wider numbers with it than alone.

    The inner transformation sees these wider parameters, and updates for them, in float32. Around everything else it is
    a part of the compiled step's kernels, which read and write parameters by `pairing`; elsewhere it is called.
    """

    pairing: Pairing
    resting: Any = None  # the part that keeps the tensors on the CPU, see `transforms._offload`; None: none does

    @abstractmethod
    def around(self, inner: GradientTransformation, resting: Any) -> "Widening":
        """The same around another inner transformation, with tensors that rest as `resting` says."""

    @abstractmethod
    def beside(self, treedef: _optree.TreeDef, params: Sequence[Tensor], state: Any) -> Sequence[Tensor | None]:
        """The tensor beside each parameter, as it rests; None beside one that is wide enough alone.

        Raises:
            ValueError: for the state of other parameters or of another transformation.
        """

    @abstractmethod
    def part(self, p: Tensor, beside: Tensor) -> Tensor:
        """This rank's part of the tensor beside a parameter, shaped like its part of that: a view, to be written to."""

    @abstractmethod
    def widened(self, p: Tensor, beside: Tensor | None) -> Tensor:
        """The parameter as the inner transformation sees it, sharded as it is."""


def init_with(tx: GradientTransformation, params: Tree, rest: Rest) -> Any:
    """`tx.init(params)`, with moments kept as `rest` decides, also inside transformations that know nothing of it."""
    if isinstance(tx.update, Part):
        return tx.update.init_state(params, rest)
    leaves, treedef = _optree.flatten(params)
    paths = _optree.names(treedef)

    def keep(field: str, moment: Moment, tree: Tree) -> Tree:
        kept = []
        for path, param, value in zip(paths, leaves, _optree.flatten_up_to(treedef, tree), strict=True):
            kept.append(rest(field, moment, path, param, (lambda v=value: v)) if isinstance(value, Tensor) else value)
        return _optree.unflatten(treedef, kept)

    return map_moments(keep, tx.init(params))


def moments_in(node: Any) -> dict[str, Moment]:
    """The declared moments among the children of a node, by name."""
    return moments_of(type(node))


def map_moments(function: Callable[..., Tree], state: Any, *others: Any) -> Any:
    """A state with `function(field, moment, tree, *the others' trees)` in place of each declared moment.

    Moments are declared by the state's class (`mu: Signed`), however deep it sits in tuples, lists, dicts or other
    states.
    """

    def each(at: _optree.Place, *rests: Any) -> Any:
        return at.node if at.mark is None else function(at.name, at.mark, at.node, *rests)

    return _optree.map_stored(each, state, *others, marks=moments_in)
