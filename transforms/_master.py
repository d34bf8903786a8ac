"""master_weights: train half-precision parameters as if they were float32, for 1 or 2 more bytes each."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Role, call_update
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.like_params import as_sharded
from functional_lowbit._core.state.parts import Rest, Widening, init_with
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats._halves import CODE_DTYPES, HALF_DTYPES, Split, read_master
from functional_lowbit.sharding import ShardSpec, local_of, wrap


class MasterWeightsState(NamedTuple):
    """What half-precision parameters lack of their float32 masters, and the state of the inner transformation."""

    # int8 like params, or [*shape, 2]: master - param, see `formats._halves`; None for other dtypes
    error: Annotated[Tree, Role("master")]
    inner_state: Any


class MasterWeights(Widening):
    """The `update` of `master_weights`. Beside each half-precision parameter is the code of what it lacks."""

    state_class = MasterWeightsState
    name = "master_weights"

    def __init__(self, inner: GradientTransformation, bits: int, resting: Any = None):
        self.inner = (inner,)
        self.bits = bits
        self.pairing = Split(bits)
        self.resting = resting

    def around(self, inner: GradientTransformation, resting: Any) -> "MasterWeights":
        """As many bits, around another transformation."""
        return MasterWeights(inner, self.bits, resting)

    @speaking("master_weights.init")
    def init_state(self, params: Tree, rest: Rest) -> MasterWeightsState:
        """No error yet, and the inner state for float32 parameters."""
        leaves, treedef = _optree.flatten(params)
        fits.params(_optree.names(treedef), leaves)
        codes = [self._no_error(p) for p in leaves]
        masters = [self.widened(p, c) for p, c in zip(leaves, codes, strict=True)]
        return MasterWeightsState(
            _optree.unflatten(treedef, codes), init_with(self.inner[0], _optree.unflatten(treedef, masters), rest)
        )

    def structure(self) -> Any:
        """How wide an error is."""
        return self.bits

    def _no_error(self, p: Tensor) -> Tensor | None:
        if p.dtype not in HALF_DTYPES:
            return None
        local = local_of(p)
        return self._kept(torch.zeros(local.shape, dtype=self.pairing.dtype, device=local.device), ShardSpec.of(p))

    def _kept(self, codes: Tensor, spec: ShardSpec | None) -> Tensor:
        """This rank's codes as they are kept, and where: int16 as two int8, since no backend gathers int16."""
        if codes.dtype == torch.int16:
            codes = codes.contiguous().unsqueeze(-1).view(torch.int8)
            spec = None if spec is None else spec.like((*spec.shape, 2))
        kept = wrap(codes.contiguous(), spec)
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
        codes = self.beside(treedef, leaves, state)
        us = [u if u is None or c is None else u.float() for u, c in zip(us, codes, strict=True)]
        masters = [self.widened(p, c) for p, c in zip(leaves, codes, strict=True)]
        given, wider = _optree.unflatten(treedef, us), _optree.unflatten(treedef, masters)
        new, inner_state = call_update(self.inner[0].update, given, state.inner_state, wider, extra)
        us = fits.same_structure("the inner updates", treedef, new)
        fits.updates(paths, us, leaves)
        stepped = [self._step(*each) for each in zip(leaves, masters, codes, us, strict=True)]
        us, codes = ([each[i] for each in stepped] for i in range(2))
        return _optree.unflatten(treedef, us), MasterWeightsState(_optree.unflatten(treedef, codes), inner_state)

    def _step(self, p: Tensor, master: Tensor, codes: Tensor | None, u: Tensor | None) -> tuple[Any, Any]:
        """One leaf, or this rank's part of it: (update, new codes)."""
        if codes is None or u is None:
            return u, codes
        u, spec = as_sharded(u, p)
        update, new_codes = Split(self.bits).step(local_of(p), local_of(master) + local_of(u).float())
        return wrap(update, spec), self._kept(new_codes, spec)

    def beside(self, treedef: _optree.TreeDef, params: Sequence[Tensor], state: Any) -> Sequence[Tensor | None]:
        """The codes. Those of other parameters, or of another number of bits, are refused."""
        fits.state_class(state, MasterWeightsState)
        codes = fits.same_structure("state.error", treedef, state.error)
        for path, p, c in zip(_optree.names(treedef), params, codes, strict=True):
            self._check_code(path, p, c)
        return codes

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
        if codes is None:
            return
        fits.sharding("state.error", path, p, codes)
        if self.resting is not None and p.device.type != "meta":
            if codes.device.type != "cpu":
                raise fits.not_on_cpu("state.error", path, codes.device)
        elif codes.device != p.device:
            raise fits.not_beside("state.error", path, codes.device, p)
        if not local_of(codes).is_contiguous():
            raise WrongValue.at("state.error", path, "must be contiguous, as init makes it; copy it")

    def part(self, p: Tensor, beside: Tensor) -> Tensor:
        """This rank's codes: int8 or int16."""
        return _codes_of(p, beside)

    def widened(self, p: Tensor, beside: Tensor | None) -> Tensor:
        """The master of a parameter: float32."""
        return master_of(p, beside)


def master_of(p: Tensor, codes: Any) -> Tensor:
    """The master of a parameter: float32, sharded alike. A parameter without codes is its own."""
    if p.dtype not in HALF_DTYPES:
        return p
    local = local_of(p).float()
    if isinstance(codes, Tensor):
        local = read_master(local, _codes_of(p, codes).to(local.device), p.dtype)
    return wrap(local, ShardSpec.of(p))


def _codes_of(p: Tensor, codes: Tensor) -> Tensor:
    """This rank's codes of its part of a parameter, int8 or int16: a view, if they are contiguous as they are kept."""
    local = local_of(codes)
    return local if local.ndim == p.ndim else local.contiguous().view(torch.int16).squeeze(-1)


@speaking("master_params")
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
    found = [at.node for at in _optree.nodes(state) if isinstance(at.node, MasterWeightsState)]
    if not found:
        raise WrongValue("the state has no MasterWeightsState inside; use fl.master_weights")
    leaves, treedef = _optree.flatten(params)
    trees = [fits.same_structure("state.error", treedef, s.error) for s in found]
    each = zip(leaves, *trees, strict=True)
    masters = [master_of(p, next((c for c in codes if isinstance(c, Tensor)), None)) for p, *codes in each]
    return _optree.unflatten(treedef, masters)


@speaking("master_weights")
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
    refuse.transformation("tx", tx)
    if bits not in CODE_DTYPES:
        raise WrongValue(f"bits must be 8 or 16, got {bits!r}")
    return MasterWeights(tx, bits).transformation()
