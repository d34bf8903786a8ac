"""States that an exception left half-updated: marked, and refused from then on."""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from functional_lowbit import _optree
from functional_lowbit._refused import WrongState, kind_of

# The tensors of such states, and the exception. A tensor carries no mark of its own through DTensor and pickle, and a
# state is any tree, so the mark is kept here, by identity, for as long as the tensor lives.
_marked: Any = WeakTensorKeyDictionary()


def mark(state: Any, error: BaseException) -> None:
    """Let every tensor of a state be refused from now on."""
    for leaf in _optree.leaves(state):
        if isinstance(leaf, Tensor):
            _marked[leaf] = kind_of(error)


def refuse(state: Any) -> None:
    """Refuse a state with marked tensors."""
    if not len(_marked):
        return
    for leaf in _optree.leaves(state):
        if isinstance(leaf, Tensor) and leaf in _marked:
            raise WrongState(
                f"an earlier step in place was interrupted ({_marked[leaf]}), so that this state and its parameters "
                "are partly of the old step and partly of the new one; load both from a checkpoint, the state into one "
                "that init(params) makes, or with Optimizer.load_state_dict"
            )


def forget(state: Any) -> None:
    """Let the tensors of a state be used again: all of them have been written from a checkpoint."""
    for leaf in _optree.leaves(state):
        if isinstance(leaf, Tensor):
            _marked.pop(leaf, None)
