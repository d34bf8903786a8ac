"""master_weights: train half-precision parameters as if they were float32, for 1 or 2 more bytes each."""

from typing import Any

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.state import fits
from functional_lowbit._core.state.masters import MasterWeights, MasterWeightsState, master_of
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.formats._halves import CODE_DTYPES


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
    masters = []
    for p, *codes in zip(leaves, *trees, strict=True):
        masters.append(master_of(p, next((c for c in codes if isinstance(c, Tensor)), None)))
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
