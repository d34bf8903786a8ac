"""A state of ours leaf by leaf in another format: the same leaves under the same names, so that it loads as before."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit import formats
from functional_lowbit._core.contract.base import Moment
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, encode
from functional_lowbit.checkpoint._reading import saved_layout, write_again
from functional_lowbit.cli._listed import Leaf
from functional_lowbit.cli._numbers import take
from functional_lowbit.cli._output import Broken, Mistake
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.transforms._low_bit import LowBit

TWINS = ("mu", "nu")  # a state with these has a counter `step` beside them
OUTSIDE = ("", "inner", "inner_state", "state")  # what a `trace` may be inside of, beside a number of a chain
MIN_SIZE = 4096  # as of `fl.low_bit`


class Made(NamedTuple):
    """A leaf that was made of another."""

    leaf: Any
    before: str  # its format
    after: str
    bytes_before: int
    bytes_after: int
    error: float  # norm of the difference over the norm; 0 where nothing changed


class Target(NamedTuple):
    """What is asked for."""

    format: formats.Format
    block_size: int | None
    min_size: int

    def layout(self, shape: tuple[int, ...], signed: bool, min_size: int) -> Layout | None:
        """How `fl.low_bit` would keep a moment of this shape; None for float32."""
        rule = LowBit(fl.identity(), self.format, self.block_size, min_size, None)
        like = torch.empty(shape, dtype=torch.float32, device="meta")
        return rule.layout("", Moment(signed), "", like)


def moment_of(path: str, listed: Collection[str]) -> Moment | None:
    """Whether a float32 leaf is a moment, as far as its name says."""
    words = path.split(".")
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        if word in TWINS and ".".join([*words[:i], "step"]) in listed:
            return Moment(word == "mu")
        if word == "trace" and (before.isdecimal() or before in OUTSIDE):
            return Moment(True)
    return None


def reformat(leaf: Leaf, path: str, listed: Collection[str], target: Target) -> Made:
    """A leaf as the target wants it; what is no moment stays as it is.

    Args:
        leaf: A leaf of ours, with its parts.
        path: Its path inside its state.
        listed: All paths of that state.
        target: What is asked for.

    Raises:
        Broken: for a part that is missing or cannot be read.
        Mistake: for a leaf that is a rank's shard.
    """
    described = leaf.described or {}
    parts = {ending: take(leaf.parts[ending]) for ending in described["parts"] if ending in leaf.parts}
    missing = [leaf.path + ending for ending in described["parts"] if ending not in parts]
    if missing:
        raise Broken(f"the entry {missing[0]!r} is missing; see functional-lowbit inspect")
    if any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise Mistake(f"leaf {leaf.path!r} is one rank's shard; save with fl.checkpoint.save, and convert that")
    if described["kind"] == "quantized":
        return _of_quantized(leaf, described, parts, target)
    value = parts[""]
    moment = moment_of(path, listed) if described["kind"] == "tensor" and value.dtype == torch.float32 else None
    layout = target.layout(tuple(value.shape), moment.signed, target.min_size) if moment else None
    name = described["parts"][""]
    if layout is None:
        nbytes = value.nbytes if isinstance(value, Tensor) else 0
        return Made(value, name, name, nbytes, nbytes, 0.0)
    return _made(encode(value, layout), value, name, value.nbytes)


def _of_quantized(leaf: Leaf, described: Mapping[str, Any], parts: Mapping[str, Any], target: Target) -> Made:
    own = saved_layout("convert", leaf.path, None, described, None)
    nbytes = sum(x.nbytes for x in parts.values())
    if described["stored"] == "values":
        stored, values = None, next(iter(parts.values()))
    else:
        stored = QuantizedTensor(parts[".codes"], parts.get(".scales"), own)
        values = stored.dequantize().reshape(described["shape"])
    layout = target.layout(tuple(described["shape"]), described["signed"], 0)  # it was chosen to rest in few bits
    if layout is None:
        return Made(values.clone(), own.format.name, "float32", nbytes, values.nbytes, 0.0)
    if stored is not None and own._replace(threshold=layout.threshold) == layout:
        return Made(stored, own.format.name, own.format.name, nbytes, stored.nbytes, 0.0)
    return _made(write_again(values, layout), values, own.format.name, nbytes)


def _made(new: QuantizedTensor, values: Tensor, before: str, nbytes: int) -> Made:
    return Made(new, before, new.format.name, nbytes, new.nbytes, relative_error(new.dequantize(), values))


def relative_error(new: Tensor, old: Tensor) -> float:
    """Norm of the difference over the norm, of the finite numbers; 0 for a leaf of zeros."""
    old, new = old.detach().double().flatten(), new.detach().double().flatten()
    finite = old.isfinite() & new.isfinite()
    norm = float(old[finite].norm())
    return float((new - old)[finite].norm()) / norm if norm else 0.0
