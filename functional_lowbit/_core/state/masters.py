"""Float32 masters of half-precision parameters: what is kept of them, and the update around another one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import GradientTransformation, call_update
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._core.state.parts import Part, Rest, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats._halves import CODE_DTYPES, HALF_DTYPES, read_master, step_to, write_master
from functional_lowbit.sharding import ShardSpec, local_of, wrap


class MasterWeightsState(NamedTuple):
    """What half-precision parameters lack of their float32 masters, and the state of the inner transformation."""

    error: (
        Tree  # int8 [*shape] or [*shape, 2], like params; master - param, see `formats._halves`; None for other dtypes
    )
    inner_state: Any


class MasterWeights(Part):
    """The `update` of `master_weights`. `resting` keeps the errors on the CPU, see `transforms._offload`."""

    def __init__(self, inner: GradientTransformation, bits: int, resting: Any = None):
        self.inner = inner
        self.bits = bits
        self.resting = resting

    @speaking("master_weights.init")
    def init_state(self, params: Tree, rest: Rest) -> MasterWeightsState:
        """No error yet, and the inner state for float32 parameters."""
        leaves, treedef = _optree.flatten(params)
        fits.params(_optree.names(treedef), leaves)
        codes = [self._no_error(p) for p in leaves]
        masters = [master_of(p, c) for p, c in zip(leaves, codes, strict=True)]
        return MasterWeightsState(
            _optree.unflatten(treedef, codes), init_with(self.inner, _optree.unflatten(treedef, masters), rest)
        )

    def structure(self) -> Any:
        """How wide an error is."""
        return self.bits

    def _no_error(self, p: Tensor) -> Tensor | None:
        if p.dtype not in HALF_DTYPES:
            return None
        local = local_of(p)
        return self._rest(torch.zeros(local.shape, dtype=CODE_DTYPES[self.bits], device=local.device), ShardSpec.of(p))

    def _rest(self, codes: Tensor, spec: ShardSpec | None) -> Tensor:
        """This rank's codes as they are kept, and where."""
        kept = _rest(codes, spec)
        return kept if self.resting is None else self.resting.place(kept)

    @speaking("master_weights.update")
    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update of the masters; returned is the step from each parameter to its new value."""
        if params is None:
            raise WrongValue("params are needed; call update(updates, state, params)")
        fits.state_class(state, MasterWeightsState)
        leaves, treedef = _optree.flatten(params)
        paths = _optree.names(treedef)
        us = fits.same_structure("updates", treedef, updates)
        fits.updates(paths, us, leaves)
        codes = fits.same_structure("state.error", treedef, state.error)
        self.check_codes(paths, leaves, codes)
        us = [wide(u, p) for u, p in zip(us, leaves, strict=True)]
        masters = [master_of(p, c) for p, c in zip(leaves, codes, strict=True)]
        new, inner_state = call_update(
            self.inner.update,
            _optree.unflatten(treedef, us),
            state.inner_state,
            _optree.unflatten(treedef, masters),
            extra,
        )
        new_us = fits.same_structure("the inner updates", treedef, new)
        fits.updates(paths, new_us, leaves)
        stepped = [self._step(*each) for each in zip(leaves, masters, codes, new_us, strict=True)]
        return _optree.unflatten(treedef, [u for u, _ in stepped]), MasterWeightsState(
            _optree.unflatten(treedef, [c for _, c in stepped]), inner_state
        )

    def _step(self, p: Tensor, master: Tensor, codes: Tensor | None, u: Tensor | None) -> tuple[Any, Any]:
        """One leaf, or this rank's part of it: (update, new codes)."""
        if codes is None or u is None:
            return u, codes
        u, spec = as_sharded(u, p)
        new_p, new_codes = write_master(local_of(master) + local_of(u).float(), p.dtype, self.bits)
        update, new_codes = step_to(local_of(p), new_p, new_codes)
        return wrap(update, spec), self._rest(new_codes, spec)

    def check_codes(self, paths: Sequence[str], params: Sequence[Tensor], codes: Sequence[Any]) -> None:
        """Refuse the codes of other parameters, or of another number of bits."""
        for path, p, c in zip(paths, params, codes, strict=True):
            self._check_code(path, p, c)

    def _check_code(self, path: str, p: Tensor, codes: Any) -> None:
        whole = tuple(p.shape) if self.bits == 8 else (*p.shape, 2)
        expected = (torch.int8, whole) if p.dtype in HALF_DTYPES else None
        got = (codes.dtype, tuple(codes.shape)) if isinstance(codes, Tensor) else None
        if got != expected:
            words = ["none" if x is None else f"{x[0]} of shape {x[1]}" for x in (expected, got)]
            rule = f"must be {words[0]} for a {p.dtype} parameter, got {words[1]}"
            raise WrongValue.at(
                "state.error", path, f"{rule}; the state was made for other parameters or another number of bits"
            )
        if not isinstance(codes, Tensor):
            return
        fits.sharding("state.error", path, p, codes)
        if self.resting is not None and p.device.type != "meta":
            if codes.device.type != "cpu":
                raise fits.not_on_cpu("state.error", path, codes.device)
        elif codes.device != p.device:
            raise fits.not_beside("state.error", path, codes.device, p)
        if not local_of(codes).is_contiguous():
            raise WrongValue.at("state.error", path, "must be contiguous, as init makes it; copy it")


def master_of(p: Tensor, codes: Any) -> Tensor:
    """The master of a parameter: float32, sharded alike. A parameter without codes is its own."""
    if p.dtype not in HALF_DTYPES:
        return p
    local = local_of(p).float()
    if isinstance(codes, Tensor):
        local = read_master(local, local_codes(codes, p).to(local.device), p.dtype)
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
