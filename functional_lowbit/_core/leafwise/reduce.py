"""Sums, means, norms and maxima over whole leaves, for functions that are given a part of one.

Inside a leaf function declared with `leafwise(..., reduces=True)`, these know how the leaf is sharded: each adds up
what this rank holds, and then over the ranks that hold the rest. A part that several ranks hold counts once. Everywhere
else they reduce a tensor or a DTensor as a whole. All ranks that hold parts of the leaf must call them together, one
whose part is empty among them.

Sums are exact in float64 in whatever order they are added (see `exact_sum`), and rounded to float32. So results have
the same bits on every mesh, also where a reduced dimension is cut. Only `norm` over all dimensions is `global_norm` of
the leaf, which has the same bits on every mesh that keeps rows.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_lowbit import _refused as refused, sharding
from functional_lowbit._core.leafwise import current, exact_sum, norm as norms
from functional_lowbit.sharding import _collectives

Dims: TypeAlias = int | Sequence[int] | None
"""Dimensions of a leaf that are reduced; None is all of them."""


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum over all elements, or over some dimensions.

    Args:
        x: float32, of the shape of this rank's part of the leaf; outside of leaf functions any floating-point tensor or
            DTensor.
        dim: One or several dimensions; all, if None.
        keepdim: Keep reduced dimensions, with size 1.

    Returns:
        float32. In a leaf function a plain tensor: 0-d and the same on every rank for all dimensions, else this rank's
        part of the sums. Outside, a DTensor gives a 0-d plain tensor, or a DTensor repeated where a reduced dimension
        was sharded.

    Raises:
        ValueError: for a dimension that is not there, or a tensor that is not of the leaf's shape.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.reduce.sum(torch.ones(2, 3), dim=1)
        tensor([3., 3.])
    """
    return _reduce("sum", x, dim, keepdim, _sum)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean over all elements of the whole leaf, or over some dimensions. NaN for a mean of nothing.

    Arguments, result and errors are those of `sum`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> def centered(g, s, p, c):
        ...     return g - fl.reduce.mean(g), s
        >>> tx = fl.leafwise(centered, reduces=True)
        >>> tx.update(torch.tensor([1.0, 2.0, 6.0]), tx.init(torch.zeros(3)))[0]
        tensor([-2., -1.,  3.])
    """
    return _reduce("mean", x, dim, keepdim, _mean)


def norm(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The Euclidean norm of the whole leaf, or over some dimensions.

    Over all dimensions it is `global_norm` of the leaf, with its exactness and its limits. Arguments, result and errors
    are those of `sum`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.reduce.norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dim=1)
        tensor([5., 2.])
    """
    return _reduce("norm", x, dim, keepdim, _euclidean)


def max(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element of the whole leaf, or over some dimensions. NaN if one is NaN; of nothing it is -Inf.

    Arguments, result and errors are those of `sum`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.reduce.max(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dim=0, keepdim=True)
        tensor([[3., 4.]])
    """
    return _reduce("max", x, dim, keepdim, _max)


def shape(x: Tensor) -> tuple[int, ...]:
    """The shape of the whole leaf; `x.shape` is only that of this rank's part.

    What a rule decides by shape it must decide by this one, or the mesh would change the algorithm.

    Args:
        x: float32, of the shape of this rank's part of the leaf; outside of leaf functions any tensor or DTensor.

    Raises:
        ValueError: for a tensor that is not of the leaf's shape.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.reduce.shape(torch.ones(2, 3))
        (2, 3)
    """
    spec = _spec("shape", x, current.CURRENT.get())
    return tuple(x.shape) if spec is None else spec.shape


def _reduce(name: str, x: Tensor, dim: Dims, keepdim: bool, function: Callable[..., Tensor]) -> Tensor:
    with current.unwatched() as leaf:
        spec = _spec(name, x, leaf)
        dims = _dims(name, x, dim)
        local = sharding.part_of(x)
        if dim is None and function is _euclidean:
            result = norms.global_norm(sharding.wrap(local, spec)).to(local.device)
        else:
            # torch gives empty tensors strides of 0 too, so narrow only where no rank's part is empty: all do the same.
            once = spec is None or all(map(prod, spec.local_shapes()))
            of = (_once(local, dims) if once else local, dims, spec) if x.ndim else (local.reshape(1), (0,), None)
            result = function(*of)  # float32, reduced dimensions kept
            result = result.reshape(()) if dim is None else result.expand(_left(local, dims))
        if dim is None:
            return result.reshape([1] * x.ndim) if keepdim else result
        kept = result if keepdim else result.squeeze(dims)
        return kept if leaf is not None or spec is None else _collectives.reduced(spec, dims, keepdim).wrap(kept)


def _left(x: Tensor, dims: tuple[int, ...]) -> list[int]:
    """The shape of what is left, reduced dimensions kept."""
    return [1 if d in dims else n for d, n in enumerate(x.shape)]


def _once(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A tensor without its repetitions: what was expanded along a dimension that is kept is reduced once."""
    for d in range(x.ndim):
        if d not in dims and x.stride(d) == 0 and x.shape[d] > 1:
            x = x.narrow(d, 0, 1)
    return x


def _spec(name: str, x: Any, leaf: current.Leaf | None) -> sharding.ShardSpec | None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise refused.WrongType(f"x must be a floating-point tensor, got {kind}", speaker=f"reduce.{name}")
    if leaf is None:
        return sharding.ShardSpec.of(x)
    if tuple(x.shape) != leaf.shape:
        raise refused.WrongValue(
            f"x must have the shape of this rank's part of the leaf at {leaf.path!r}, {leaf.shape}, got "
            f"{tuple(x.shape)}; reduce g, p, or what is made of them element by element (expand what is smaller)",
            leaf.path,
            f"reduce.{name}",
        )
    return leaf.spec


def _dims(name: str, x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dimensions, not negative, in order."""
    if dim is None:
        return tuple(range(x.ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    if not given or any(not -x.ndim <= d < x.ndim for d in given) or len({d % x.ndim for d in given}) < len(given):
        raise refused.WrongValue(
            f"dim must name one or several different dimensions of a tensor of {x.ndim}, got {dim!r}; None stands for "
            "all",
            speaker=f"reduce.{name}",
        )
    return tuple(sorted(d % x.ndim for d in given))


def _sum(x: Tensor, dims: tuple[int, ...], spec: sharding.ShardSpec | None) -> Tensor:
    return exact_sum.exact_sum(x, dims, spec).float()


def _mean(x: Tensor, dims: tuple[int, ...], spec: sharding.ShardSpec | None) -> Tensor:
    shape, count = x.shape if spec is None else spec.shape, 1
    for d in dims:
        count *= shape[d]
    return (exact_sum.exact_sum(x, dims, spec) / count).float()


def _euclidean(x: Tensor, dims: tuple[int, ...], spec: sharding.ShardSpec | None) -> Tensor:
    return exact_sum.exact_sum(x.float(), dims, spec, squares=True).sqrt().float()


def _max(x: Tensor, dims: tuple[int, ...], spec: sharding.ShardSpec | None) -> Tensor:
    x = x.float()
    if any(x.shape[d] == 0 for d in dims):
        largest = x.new_full(_left(x, dims), float("-inf"))
    else:
        largest = x.amax(dims, keepdim=True)
    if spec is None:
        return largest + 0.0  # of -0.0 and 0.0 either may be found first
    # A collective need not pass NaN on, so it goes beside the number.
    is_nan = largest.isnan()
    both = torch.stack([torch.where(is_nan, float("inf"), largest), is_nan.float()])
    largest, is_nan = _collectives.all_reduce_(both, spec, dims, largest=True)
    return torch.where(is_nan > 0, float("nan"), largest) + 0.0
