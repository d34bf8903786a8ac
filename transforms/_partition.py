"""partition: another transformation for each group of leaves."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Role
from functional_lowbit._core.contract.per_leaf import PerLeaf
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.parts import Composite, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.transforms._masked import Masked

Labels: TypeAlias = Tree | Callable[[Tree], Tree] | Callable[[str, Tensor], Hashable]
"""A tree of labels that begins like params (a label stands for all leaves below it), a function of params to one, or
`label(path, leaf) -> label`."""


class PartitionState(NamedTuple):
    """The state of a partition."""

    inner_states: Annotated[Any, Role("states")]  # label -> MaskedState, in the order of the transformations


class Partition(Composite):
    """The `update` of a partition: one masked transformation for each label, one after the other."""

    sequential = True  # each group leaves the leaves of the others as they are

    def __init__(
        self, transforms: Mapping[Hashable, GradientTransformation], labels: PerLeaf, masks_extra_args: bool = False
    ):
        self.labels = tuple(transforms)
        of_leaves = _LabelsOfLeaves(labels, self.labels)
        parts = [Masked(tx, _Group(of_leaves, label), masks_extra_args) for label, tx in transforms.items()]
        self.inner = tuple(part.transformation() for part in parts)

    def init_state(self, params: Tree, rest: Rest) -> PartitionState:
        """The groups' states, each for its own leaves."""
        return self.join(None, [init_with(tx, params, rest) for tx in self.inner])

    def structure(self) -> Any:
        """The labels: a partition made anew with other numbers has the same."""
        return self.labels

    @speaking("partition.update")
    def split(self, state: Any) -> Sequence[Any]:
        """The groups' states."""
        fits.state_class(state, PartitionState)
        if state.inner_states.keys() != set(self.labels):
            labels, got = (", ".join(map(repr, x)) for x in (self.labels, state.inner_states))
            raise WrongValue(
                f"the state must have the labels of transforms ({labels}), got {got}; it was made for another "
                "transformation"
            )
        return [state.inner_states[label] for label in self.labels]

    def join(self, state: Any, states: Sequence[Any]) -> PartitionState:
        """The groups' states by label."""
        return PartitionState(OrderedDict(zip(self.labels, states, strict=True)))

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """Each group's update of its own leaves."""
        new = []
        for tx, inner_state in zip(self.inner, self.split(state), strict=True):
            updates, inner_state = tx.update(updates, inner_state, params, **extra)
            new.append(inner_state)
        return updates, self.join(state, new)


class _LabelsOfLeaves:
    """The label of each leaf of a tree, in order; each is one that is known."""

    def __init__(self, per_leaf: PerLeaf, known: Sequence[Hashable]):
        self.per_leaf = per_leaf
        self.known = dict.fromkeys(known)

    @speaking("partition")
    def __call__(self, params: Tree) -> list[Hashable]:
        labels = self.per_leaf(params)
        for i, label in enumerate(labels):
            try:
                if label in self.known:
                    continue
            except TypeError as error:
                raise WrongType(f"{self._at(params, i)} must be hashable, got {label!r}") from error
            raise WrongValue(
                f"{self._at(params, i)} must be a label of transforms ({', '.join(map(repr, self.known))}), got "
                f"{label!r}"
            )
        return labels

    def _at(self, params: Tree, i: int) -> str:
        return self.per_leaf.where(_optree.flatten(params)[1], i)


class _Group:
    """The mask of one label."""

    def __init__(self, labels: _LabelsOfLeaves, label: Hashable):
        self.labels = labels
        self.label = label

    def __call__(self, params: Tree) -> list[bool]:
        return [label == self.label for label in self.labels(params)]


@speaking("partition")
def partition(
    transforms: Mapping[Hashable, GradientTransformation],
    param_labels: Labels,
    *,
    mask_compatible_extra_args: bool = False,
) -> GradientTransformation:
    """Apply another transformation to each group of leaves.

    A group sees nothing of the others: a global norm inside it is the norm of its own leaves, and nothing is stored for
    leaves of another label. Groups may differ in everything: optimizer, learning rate, weight decay, format.

    Args:
        transforms: Label to transformation. A label that no leaf has is allowed.
        param_labels: A tree of labels that begins like params (a label stands for all leaves below it); a function of
            params that returns one; or `param_labels(path, leaf) -> label`, a function with two parameters. A path
            reads like `layers.0.weight`; `leaf` is the parameter, or the update where `update` is called without
            params. Labels must not change while a state is in use.
        mask_compatible_extra_args: Whether extra arguments that have the structure of params are cut down to a group's
            leaves too.

    Returns:
        A transformation whose state is a `PartitionState`; `state.inner_states[label].inner_state` is the state of a
        group, whose moments have `MaskedNode()` at the leaves of others.

    Raises:
        TypeError: for `transforms` that are no mapping to transformations, a label that is not hashable, or a function
            of another number of arguments.
        ValueError: for labels that do not begin like params, and for a label that `transforms` has not.

    References:
        optax.partition, once optax.multi_transform, which is a name for it here too.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.partition(
        ...     {"matrix": fl.adamw4bit(1e-3), "other": fl.sgd(0.5)},
        ...     lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
        ... )
        >>> params = {"w": torch.zeros(64, 64), "b": torch.zeros(1)}
        >>> updates, state = tx.update({"w": torch.ones(64, 64), "b": torch.ones(1)}, tx.init(params), params)
        >>> updates["b"], state.inner_states["matrix"].inner_state[0].mu
        (tensor([-0.5000]), {'w': QuantizedTensor(root4, shape=(64, 64), block_size=128), 'b': MaskedNode()})
    """
    if not isinstance(transforms, Mapping):
        raise WrongType(f"transforms must be a dict from label to transformation, got {type(transforms).__name__}")
    for label, tx in transforms.items():
        refuse.transformation(f"transforms[{label!r}]", tx)
    labels = PerLeaf("partition", "param_labels", param_labels)
    return Partition(transforms, labels, mask_compatible_extra_args).transformation()


multi_transform = partition  # under optax's older name
