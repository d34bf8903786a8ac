"""master_weights: train half-precision parameters as if they were float32, for 1 or 2 more bytes each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _check, _tree
from functional_lowbit._base import GradientTransformation, Tree, call_update
from functional_lowbit._like_params import as_sharded, rest_in_float32
from functional_lowbit._parts import Part, Rest, init_with
from functional_lowbit._split import CODE_DTYPES, HALF_DTYPES, read_master, step_to, write_master
from functional_lowbit.sharding import ShardSpec, local_of, wrap


class MasterWeightsState(NamedTuple):
    """What half-precision parameters lack of their float32 masters, and the state of the inner transformation."""

    error: Tree  # int8 [*shape] or [*shape, 2], like params; master - param, see `_split`; None for other dtypes
    inner_state: Any


class MasterWeights(Part):
    """The `update` of `master_weights`."""

    def __init__(self, inner: GradientTransformation, bits: int):
        self.inner = inner
        self.bits = bits

    def init(self, params: Tree) -> MasterWeightsState:
        """No error yet, and the inner state for float32 parameters."""
        return self.init_state(params, rest_in_float32)

    def init_state(self, params: Tree, rest: Rest) -> MasterWeightsState:
        """No error yet, and the inner state for float32 parameters."""
        leaves, treedef = _tree.flatten(params)
        _check.params("master_weights.init", _tree.names(treedef), leaves)
        codes = [self._no_error(p) for p in leaves]
        masters = [master_of(p, c) for p, c in zip(leaves, codes, strict=True)]
        return MasterWeightsState(
            _tree.unflatten(treedef, codes), init_with(self.inner, _tree.unflatten(treedef, masters), rest)
        )

    def structure(self) -> Any:
        """How wide an error is."""
        return self.bits

    def _no_error(self, p: Tensor) -> Tensor | None:
        if p.dtype not in HALF_DTYPES:
            return None
        local = local_of(p)
        return _rest(torch.zeros(local.shape, dtype=CODE_DTYPES[self.bits], device=local.device), ShardSpec.of(p))

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update of the masters; returned is the step from each parameter to its new value."""
        speaker = "master_weights.update"
        if params is None:
            raise ValueError(f"{speaker}: params are needed; call update(updates, state, params)")
        _check.state_class(speaker, state, MasterWeightsState)
        leaves, treedef = _tree.flatten(params)
        paths = _tree.names(treedef)
        us = _check.same_structure(speaker, "updates", treedef, updates)
        _check.updates(speaker, paths, us, leaves)
        codes = _check.same_structure(speaker, "state.error", treedef, state.error)
        self.check_codes(speaker, paths, leaves, codes)
        us = [wide(u, p) for u, p in zip(us, leaves, strict=True)]
        masters = [master_of(p, c) for p, c in zip(leaves, codes, strict=True)]
        new, inner_state = call_update(
            self.inner.update,
            _tree.unflatten(treedef, us),
            state.inner_state,
            _tree.unflatten(treedef, masters),
            extra,
        )
        new_us = _check.same_structure(speaker, "the inner updates", treedef, new)
        _check.updates(speaker, paths, new_us, leaves)
        stepped = [self._step(*each) for each in zip(leaves, masters, codes, new_us, strict=True)]
        return _tree.unflatten(treedef, [u for u, _ in stepped]), MasterWeightsState(
            _tree.unflatten(treedef, [c for _, c in stepped]), inner_state
        )

    def _step(self, p: Tensor, master: Tensor, codes: Tensor | None, u: Tensor | None) -> tuple[Any, Any]:
        """One leaf, or this rank's part of it: (update, new codes)."""
        if codes is None or u is None:
            return u, codes
        u, spec = as_sharded(u, p)
        new_p, new_codes = write_master(local_of(master) + local_of(u).float(), p.dtype, self.bits)
        update, new_codes = step_to(local_of(p), new_p, new_codes)
        return wrap(update, spec), _rest(new_codes, spec)

    def check_codes(self, speaker: str, paths: Sequence[str], params: Sequence[Tensor], codes: Sequence[Any]) -> None:
        """Refuse the codes of other parameters, or of another number of bits."""
        for path, p, c in zip(paths, params, codes, strict=True):
            self._check_code(speaker, path, p, c)

    def _check_code(self, speaker: str, path: str, p: Tensor, codes: Any) -> None:
        whole = tuple(p.shape) if self.bits == 8 else (*p.shape, 2)
        expected = (torch.int8, whole) if p.dtype in HALF_DTYPES else None
        got = (codes.dtype, tuple(codes.shape)) if isinstance(codes, Tensor) else None
        if got != expected:
            words = ["none" if x is None else f"{x[0]} of shape {x[1]}" for x in (expected, got)]
            raise ValueError(
                f"{speaker}: state.error[{path!r}] must be {words[0]} for a {p.dtype} parameter, got {words[1]}; the "
                "state was made for other parameters or another number of bits"
            )
        if isinstance(codes, Tensor):
            _check.sharding(speaker, f"state.error[{path!r}]", p, codes)
        if isinstance(codes, Tensor) and codes.device != p.device:
            raise ValueError(
                f"{speaker}: state.error[{path!r}] is on {codes.device}, but its parameter is on {p.device}; make the "
                "state with init(params) after the parameters are moved"
            )
        if isinstance(codes, Tensor) and not local_of(codes).is_contiguous():
            raise ValueError(f"{speaker}: state.error[{path!r}] must be contiguous, as init makes it; copy it")


def master_of(p: Tensor, codes: Any) -> Tensor:
    """The master of a parameter: float32, sharded alike. A parameter without codes is its own."""
    if p.dtype not in HALF_DTYPES:
        return p
    local = local_of(p).float()
    if isinstance(codes, Tensor):
        local = read_master(local, local_codes(codes, p), p.dtype)
    return wrap(local, ShardSpec.of(p))


def local_codes(codes: Tensor, p: Tensor) -> Tensor:
    """This rank's codes, int8 or int16, of its part's shape: a view, if they are contiguous as made here."""
    local = local_of(codes)
    return local if local.ndim == p.ndim else local.contiguous().view(torch.int16).squeeze(-1)


def _rest(codes: Tensor, spec: ShardSpec | None) -> Tensor:
    """This rank's codes as they are kept: int16 as two int8, since neither gloo nor NCCL gathers int16."""
    if codes.dtype == torch.int8:
        return wrap(codes.contiguous(), spec)
    pairs = codes.contiguous().unsqueeze(-1).view(torch.int8)
    return wrap(pairs, None if spec is None else spec.like((*spec.shape, 2)))


def wide(u: Tensor | None, p: Tensor) -> Tensor | None:
    """An update in float32 where its parameter has a master; the inner transformation answers in the same dtype."""
    return u if u is None or p.dtype not in HALF_DTYPES else u.float()


def master_params(params: Tree, state: Any) -> Tree:
    """The float32 master weights of parameters that are trained with `master_weights`.

    Args:
        params: The parameters, as the last step left them.
        state: The state, with a `MasterWeightsState` somewhere inside.

    Returns:
        A tree like params: float32; parameters without a master (float32, float64, masked ones) as they are, in
        float32 at least.

    Raises:
        ValueError: if there is no `MasterWeightsState` in the state, or it was made for other parameters.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.master_weights(fl.sgd(1.0)), {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> updates, state = tx.update({"w": torch.full((1,), -0.001)}, tx.init(params), params)
        >>> params = fl.apply_updates(params, updates)
        >>> params, fl.master_params(params, state)
        ({'w': tensor([1.], dtype=torch.bfloat16)}, {'w': tensor([1.0010])})
    """
    found = _find(state)
    if not found:
        raise ValueError("master_params: the state has no MasterWeightsState inside; use fl.master_weights")
    leaves, treedef = _tree.flatten(params)
    trees = [_check.same_structure("master_params", "state.error", treedef, s.error) for s in found]
    masters = []
    for p, *codes in zip(leaves, *trees, strict=True):
        masters.append(master_of(p, next((c for c in codes if isinstance(c, Tensor)), None)))
    return _tree.unflatten(treedef, masters)


def _find(state: Any) -> list[MasterWeightsState]:
    """All of them, outer ones first."""
    own = [state] if isinstance(state, MasterWeightsState) else []
    level = _tree.children(state)
    return own + ([] if level is None else [s for kid in level[0] for s in _find(kid)])


def master_weights(tx: GradientTransformation, bits: int = 16) -> GradientTransformation:
    """Keep float32 master weights of bfloat16 and float16 parameters, as the bits that the parameters lack.

    The inner transformation sees the masters, and moves them in float32. The parameter is the nearest number to its
    master; what it lacks is stored in `bits` bits. With 16 the master is a whole float32, so that bfloat16 parameters
    are those of float32 training, rounded; with 8 it has 8 significant bits more than its parameter. float32 and
    float64 parameters pass through, without an error of their own.

    Put it around everything that makes the step, `master_weights(chain(...))`, and add its updates as they are: they
    are float32, and lead exactly from each parameter to its new value.

    Args:
        tx: Any transformation. Its state may rest in few bits: `master_weights(low_bit(tx))` is
            `low_bit(master_weights(tx))`.
        bits: 8 or 16: bits stored for each parameter.

    Returns:
        A transformation with a `MasterWeightsState`. A parameter is rounded with ties away from 0. A step to less than
        2**-16 of the old parameter (float16: 2**-13) moves the master by up to half of its last place before the step
        and half of the new parameter's. float16 masters below 2**-14 are multiples of 2**-37 (16 bits) or 2**-32.

    Raises:
        TypeError: if `tx` is no GradientTransformation.
        ValueError: for another number of bits; at `update`, without params or with a state of other parameters.

    References:
        What bfloat16 parameters lose otherwise: Zamirai et al., 2020, https://arxiv.org/abs/2010.06192, who keep it by
        Kahan summation.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx, params = fl.master_weights(fl.sgd(0.25), bits=8), {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> tx.update({"w": torch.full((1,), 0.01)}, tx.init(params), params)
        ({'w': tensor([-0.0039])}, MasterWeightsState(error={'w': tensor([92], dtype=torch.int8)}, ...
    """
    _check.transformation("master_weights", "tx", tx)
    if bits not in CODE_DTYPES:
        raise ValueError(f"master_weights: bits must be 8 or 16, got {bits!r}")
    part = MasterWeights(tx, bits)
    return GradientTransformation(part.init, part)
