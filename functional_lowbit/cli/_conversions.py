"""One optimizer state of a checkpoint as another: of ours in a format, or of torch.optim."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit import formats
from functional_lowbit._core.contract.base import Moment
from functional_lowbit._core.state.named import Named
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, encode
from functional_lowbit.checkpoint import _schema
from functional_lowbit.checkpoint._reading import joined, write_again
from functional_lowbit.checkpoint._state_dict import flat
from functional_lowbit.cli._numbers import take
from functional_lowbit.cli._output import Advance, Mistake
from functional_lowbit.cli._sections import OURS, Section, Unread, names_of
from functional_lowbit.convert._library import any_saved, each_read
from functional_lowbit.convert._match import named_leaves
from functional_lowbit.convert._own import is_own
from functional_lowbit.optim import _entries
from functional_lowbit.sharding import ShardSpec
from functional_lowbit.transforms._low_bit import LowBit

MOMENTS = ("mu", "nu", "trace")  # fields that the recipes in few bits keep in few bits; accumulators stay as they are
MIN_SIZE = 4096  # as of `fl.low_bit`
CPU = torch.device("cpu")


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

    def layout(self, described: Mapping[str, Any], min_size: int) -> Layout | None:
        """How `fl.low_bit` would keep a moment; None for float32."""
        rule = LowBit(fl.identity(), self.format, self.block_size, min_size, None)
        like = torch.empty(described["shape"], dtype=torch.float32, device="meta")
        return rule.layout("", Moment(described["signed"]), "", like)


class Converted(NamedTuple):
    """A state that was converted."""

    node: Any  # what stands in the checkpoint now
    made: dict[str, Made]  # what was done to each leaf
    how_to_load: str


def to_format(section: Section, target: Target, advance: Advance) -> Converted:
    """A state as one of ours in a format; one of ours keeps its leaves and their names, so it loads as before."""
    if section.library != OURS:
        return _foreign_to_format(section, target, advance)
    made: dict[str, Made] = {}
    for leaf in section.leaves:
        if leaf.described:
            made[leaf.path] = _reformat(leaf, leaf.described, target)
            advance(made[leaf.path].bytes_before, leaf.path)
    if _schema.SCHEMA in section.node:
        node = flat((_named(leaf), made[leaf.path].leaf) for leaf in section.leaves)
        return Converted(node, made, "load it as before, into a state of this format")
    state, names = dict(section.node["state"]), names_of(section.node["param_groups"])
    for key in state:
        own = [leaf for leaf in section.leaves if leaf.prefix == f"{names.get(key, key)}." and leaf.path in made]
        if own:
            leaves = {leaf.name: made[leaf.path].leaf for leaf in own}
            state[key] = _entries.save(leaves, {leaf.name: _named(leaf) for leaf in own}, CPU)
    return Converted({**section.node, "state": state}, made, "load it as before, with an optimizer of this format")


def _named(leaf: Unread) -> Named:
    """A leaf's place in its own state."""
    return _schema.named(leaf.name, dict(leaf.described or {}))


def _reformat(leaf: Unread, described: Mapping[str, Any], target: Target) -> Made:
    """A leaf of ours as the target wants it; what is no moment stays as it is."""
    parts = {ending: take(x) for ending, x in leaf.parts.items()}
    if any(isinstance(x, Tensor) and ShardSpec.of(x) is not None for x in parts.values()):
        raise Mistake(f"leaf {leaf.path!r} is one rank's shard; save with fl.checkpoint.save, and convert that")
    nbytes = sum(x.nbytes for x in parts.values() if isinstance(x, Tensor))
    stored, before = joined(leaf.path, described, parts), described.get("format") or described["parts"][""]
    in_few_bits = described["kind"] == "quantized"
    is_moment = leaf.role == "moment" and described["field"] in MOMENTS and before == "float32"
    if not in_few_bits and not is_moment:
        return Made(stored, before, before, nbytes, nbytes, 0.0)
    values = stored.dequantize() if isinstance(stored, QuantizedTensor) else stored
    layout = target.layout(described, 0 if in_few_bits else target.min_size)  # a small one was chosen to rest so
    if layout is None:  # what was float32 stays the same tensor, which may be in the file twice
        return Made(values.clone() if in_few_bits else values, before, "float32", nbytes, values.nbytes, 0.0)
    if isinstance(stored, QuantizedTensor) and stored.layout._replace(threshold=layout.threshold) == layout:
        return Made(stored, before, before, nbytes, stored.nbytes, 0.0)
    new = write_again(values, layout) if in_few_bits else encode(values, layout)
    return Made(new, before, new.format.name, nbytes, new.nbytes, relative_error(new.dequantize(), values))


def relative_error(new: Tensor, old: Tensor) -> float:
    """Norm of the difference over the norm, of the finite numbers; 0 for a leaf of zeros."""
    old, new = old.detach().double().flatten(), new.detach().double().flatten()
    finite = old.isfinite() & new.isfinite()
    norm = float(old[finite].norm())
    return float((new - old)[finite].norm()) / norm if norm else 0.0


def _foreign_to_format(section: Section, target: Target, advance: Advance) -> Converted:
    format, family, params = target.format.name, _family(section.node), fl.convert.params_of(section.node)
    plain = dict(named_leaves(_state(section.node, params, family, "float32")))
    state = _state(section.node, params, family, format, target.block_size)
    made = {}
    for path, leaf in named_leaves(state):
        if leaf is None:
            continue
        name, error = str(getattr(leaf, "dtype", "")).removeprefix("torch."), 0.0
        if isinstance(leaf, QuantizedTensor):
            name, error = leaf.format.name, relative_error(leaf.dequantize(), plain[path])
        made[path] = Made(leaf, section.library, name, plain[path].nbytes, leaf.nbytes, error)
    advance(sum(one.bytes_before for one in made.values()))
    recipe = f"fl.{family}(...)" if format == "float32" else f"fl.{family}8bit(..., format={format!r})"
    how = f"load it into a state of {recipe}, or with fl.convert.from_saved into any other"
    return Converted(fl.state_dict(state), made, how)


def _state(saved: Any, params: dict[str, Tensor], family: str, format: str, block_size: int | None = None) -> Any:
    tx = getattr(fl, f"{family}8bit")(1e-3, format=format, block_size=block_size)  # its state has no learning rate
    return fl.convert.from_saved(saved, tx.init(params), params)


def to_torch(section: Section) -> Converted:
    """A state as that of a torch.optim optimizer, in float32."""
    saved: Any = section.node
    if _schema.SCHEMA in saved:
        saved = {name: take(x) for name, x in saved.items()}
    family, params = _family(saved), fl.convert.params_of(saved)
    groups = _groups(family, saved, list(params))
    if section.library == OURS:
        result = fl.convert.to_torch(saved, groups)
    else:
        # Parameters that never had a gradient have no state, and may stay without: torch's load_state_dict takes that.
        keys = [key for group in groups for key in group["params"]]
        labels = {key: p.label for key, p in zip(keys, any_saved(saved).params, strict=True)}
        stepped = [{**g, "params": [labels[k] for k in g["params"] if labels[k] in params]} for g in groups]
        result = fl.convert.to_torch(_state(saved, params, family, "float32"), stepped, params)
        state = {key: result["state"][label] for key, label in labels.items() if label in result["state"]}
        result = {"state": state, "param_groups": groups}
    made = {
        f"{key}.{name}": Made(x, section.library, "float32", 0, x.nbytes, 0.0)
        for key, entries in result["state"].items()
        for name, x in entries.items()
    }
    how = "load it with the optimizer's load_state_dict"
    if any(isinstance(key, str) for key in result["state"]):
        how = (
            "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which goes by names; set "
            "the hyperparameters after that, the file has torch's defaults"
        )
    return Converted(result, made, how)


def _family(saved: Any) -> str:
    """Which kind of optimizer a state is of, by its moments."""
    fields = {f for _, read in each_read(saved) for names in read.fields.values() for f in names}
    if not fields and is_own(saved):
        raise Mistake("the state has no moments, so there is nothing to convert; make a new optimizer of torch.optim")
    return "adamw" if "nu" in fields else "lion" if "mu" in fields else "sgd"


def _groups(family: str, saved: Any, names: list[str]) -> list[dict[str, Any]]:
    """Groups for torch: the optimizer's own, with torch's defaults for what they lack."""
    if family == "lion":
        raise Mistake("torch.optim has no optimizer that keeps a first moment alone, as Lion does; convert to a format")
    probe = [torch.zeros(1)]
    made = torch.optim.AdamW(probe) if family == "adamw" else torch.optim.SGD(probe, lr=1e-3, momentum=0.9)
    if "param_groups" in saved:
        return [{**made.defaults, **group} for group in saved["param_groups"]]
    numbers = all(name.isdecimal() for name in names)
    return [{**made.defaults, "params": sorted(map(int, names)) if numbers else names}]
