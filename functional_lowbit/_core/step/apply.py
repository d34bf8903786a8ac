"""apply_updates: the last step of an optimizer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from functional_lowbit import _optree, rounding as _rounding
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.sharding._index import global_index

ROUNDINGS = ("nearest", "stochastic")


@speaking("apply_updates")
def apply_updates(params: Tree, updates: Tree, *, rounding: str = "nearest", key: int | Tensor | None = None) -> Tree:
    """Add updates to parameters: new params, each with its own dtype.

    Sums are taken in float32 (float64 for float64 params) and rounded to the param's dtype: to the nearest number, or
    stochastically, to one of the two neighbours, so that an update too small to move a bfloat16 param moves it on
    average. The noise is a hash of key, path and element, so every rank and world size gives the same bits.

    Args:
        params: Any pytree of floating-point tensors and DTensors. Not written to.
        updates: A tree like params; None leaves a parameter as it is.
        rounding: "nearest", or "stochastic" for bfloat16 and float16 params (others have nothing to round).
        key: For "stochastic": an int of 64 bits or an int64[] tensor, another one at each step, for instance
            `fl.rounding.fold_in(seed, step)`.

    Raises:
        TypeError, ValueError: for trees that do not fit each other, another rounding, or a key that is missing.

    References:
        optax.apply_updates. `fl.rounding.stochastic_round` says how sums are rounded.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
        >>> params, updates = torch.ones(1000, dtype=torch.bfloat16), torch.full((1000,), 0.001)
        >>> fl.apply_updates(params, updates, rounding="stochastic", key=fl.rounding.fold_in(0, 1)).double().mean()
        tensor(1.0011, dtype=torch.float64)
    """
    if rounding not in ROUNDINGS:
        raise WrongValue(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "stochastic" and key is None:
        raise WrongValue(
            "rounding='stochastic' needs a key, an int or a 0-d int64 tensor that is another one at each step: "
            "key=fl.rounding.fold_in(seed, step)"
        )
    leaves, treedef = _optree.flatten(params)
    paths = _optree.names(treedef)
    fits.params(paths, leaves)
    us = fits.same_structure("updates", treedef, updates)
    fits.updates(paths, us, leaves)
    keys = _keys(key, paths) if rounding == "stochastic" else [None] * len(paths)
    return _optree.unflatten(treedef, [_add(p, u, k) for p, u, k in zip(leaves, us, keys, strict=True)])


def _keys(key: int | Tensor | None, paths: Sequence[str]) -> Sequence[Tensor]:
    """One key a leaf."""
    return _rounding.leaf_keys(_rounding.check_key(key), paths).unbind()


def _add(p: Tensor, u: Tensor | None, key: Tensor | None) -> Tensor:
    if isinstance(p, nn.Parameter):
        p = p.detach()
    if u is None:
        return p
    spec = None
    shape = p.shape
    if hasattr(p, "device_mesh"):
        u, spec = as_sharded(u, p)
        p, u = local_of(p), local_of(u)
    total = p.to(torch.promote_types(p.dtype, torch.float32)) + u.float()
    return wrap(_round(total, p.dtype, key, shape, spec), spec)


def _round(x: Tensor, dtype: torch.dtype, key: Tensor | None, shape: Sequence[int], spec: ShardSpec | None) -> Tensor:
    """This rank's part of a leaf of a global shape -> the param's dtype."""
    if key is None or dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    index = global_index(shape, spec).elements().to(x.device)
    noise = _rounding.bits(*_rounding.words(key.to(x.device), index)).view(x.shape)
    return _rounding.stochastic_round(x, dtype, noise)
