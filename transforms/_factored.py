"""Adafactor's second moment: of each matrix, one number for each row and one for each column."""

from functools import partial
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, Statistic
from functional_lowbit._core.leafwise import reduce
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._optree import Tree
from functional_lowbit._refused import speaking
from functional_lowbit.formats._exact import sqrt


class FactoredState(NamedTuple):
    """Means of the squared gradient. What a leaf does not need has one element for it."""

    step: Tensor  # int64[]; updates made so far
    v_row: Annotated[Tree, Statistic()]  # float32, >= 0; means over the largest dimension, which is kept with size 1
    v_col: Annotated[Tree, Statistic()]  # float32, >= 0; means over the second largest dimension
    v: Annotated[Tree, Statistic()]  # float32, >= 0, like params; of leaves that are not factored


@speaking("scale_by_factored_rms")
def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: Hyper = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: Hyper = 1e-30,
) -> GradientTransformation:
    """Divide updates by the root of their mean square, which is kept as the product of a row and a column (Adafactor).

    Of a leaf with two dimensions of at least `min_dim_size_to_factor`, the means over its largest and over its second
    largest dimension are kept, so an (m, n) matrix takes m + n numbers and not m * n. Of other leaves each element's
    mean square is kept. Both in float32. The mean decays by `1 - (step + 1 - step_offset) ** -decay_rate`.

    Args:
        factored: False keeps each element's mean square for all leaves.
        decay_rate: Exponent of the decay, >= 0.
        step_offset: Step at which the decay begins anew, for finetuning.
        min_dim_size_to_factor: The two largest dimensions of a leaf that is factored have at least this size.
        epsilon: Added to the squared gradient, >= 0; in units of the squared gradient.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or negative.

    References:
        optax.scale_by_factored_rms (whose `decay_rate_fn` is fixed here to its default); Shazeer & Stern, 2018,
        https://arxiv.org/abs/1804.04235, Algorithm 4 without clipping.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.scale_by_factored_rms(min_dim_size_to_factor=2)
        >>> state = tx.init(torch.zeros(2, 3))
        >>> state.v_row.shape, state.v_col.shape, state.v.shape
        (torch.Size([2, 1]), torch.Size([1, 3]), torch.Size([1, 1]))
        >>> tx.update(torch.full((2, 3), 5.0), state)[0]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    refuse.hyperparameter("decay_rate", decay_rate, at_least=0.0)
    refuse.hyperparameter("epsilon", epsilon, at_least=0.0)
    split = partial(_two_largest, factored, min_dim_size_to_factor)
    return leafwise(
        partial(_rescale, split),
        state=FactoredState,
        hyperparams={"decay_rate": decay_rate, "epsilon": epsilon},
        scalars=partial(_decay, step_offset),
        reduces=True,
        over={"v_row": partial(_over, split, 1), "v_col": partial(_over, split, 0), "v": partial(_whole, split)},
        name="scale_by_factored_rms",
    )


def _two_largest(factored: bool, least: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(second largest dimension, largest one) of a leaf that is factored; of equal ones, the later is the larger."""
    if not factored or len(shape) < 2:
        return None
    d1, d0 = sorted(range(len(shape)), key=lambda d: shape[d])[-2:]
    return None if shape[d1] < least else (d1, d0)


def _over(split: Any, which: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    dims = split(shape)
    return None if dims is None else (dims[which],)


def _whole(split: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return () if split(shape) is None else None


def _decay(step_offset: int, s: FactoredState, h: Any) -> dict[str, Tensor]:
    decay = 1 - (s.step.double() - step_offset + 1) ** -h.decay_rate
    return {"decay": decay, "keep": 1 - decay}


def _rescale(split: Any, g: Tensor, s: FactoredState, p: Tensor, c: Any) -> tuple[Tensor, FactoredState]:
    square = g * g + c.epsilon
    dims = split(reduce.shape(g))
    if dims is None:
        v = c.decay * s.v + c.keep * square
        return g / sqrt(v), s._replace(v=v)
    d1, d0 = dims
    v_row = c.decay * s.v_row + c.keep * reduce.mean(square, d0, keepdim=True)
    v_col = c.decay * s.v_col + c.keep * reduce.mean(square, d1, keepdim=True)
    # v is v_row * v_col / mean(v_row); as a mean over a part of the leaf, v_row is spread out over it.
    rows = v_row / reduce.mean(v_row.expand(g.shape), d1, keepdim=True)
    return g / (sqrt(rows) * sqrt(v_col)), s._replace(v_row=v_row, v_col=v_col)
