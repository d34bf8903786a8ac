"""What is read of one saved parameter, and the entries of torch.optim: plain tensors under torch's names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_lowbit._refused import WrongValue
from functional_lowbit.convert._kept import Kept
from functional_lowbit.convert._match import Shell
from functional_lowbit.convert._saved import SavedParam
from functional_lowbit.sharding import ShardSpec


class Read(NamedTuple):
    """One parameter's state."""

    words: str  # how errors speak of it
    moments: Mapping[str, Kept]  # by entry: exp_avg
    fields: Mapping[str, tuple[str, ...]]  # entry to the fields of ours that it may be
    group: int = 0
    step: int | None = None
    error: Tensor | None = None  # of FlashOptim: what the parameter lacks of its master


Reader: TypeAlias = Callable[[SavedParam, Mapping[str, Any], Mapping[str, str]], Read]
"""`reader(param, group, fields)`: `fields` are entries that the user has named, with their field."""

FIELDS = {"exp_avg": ("mu",), "exp_avg_sq": ("nu",), "momentum_buffer": ("trace",), "square_avg": ("nu",)}
LARGEST_STEP = 2**63 - 1  # counters are int64
UNSIGNED = ("exp_avg_sq", "square_avg")
WITHOUT_OURS = {"max_exp_avg_sq": "amsgrad", "mu_product": "NAdam's schedule of momentum", "exp_inf": "Adamax"}


def reader_by_names(kept: Callable[[SavedParam, str, Any], Kept]) -> Reader:
    """The reader of a library whose entries have torch's names; `kept(param, entry, value)` reads a moment."""

    def read(param: SavedParam, group: Mapping[str, Any], fields: Mapping[str, str]) -> Read:
        moments: dict[str, Kept] = {}
        for entry, value in param.entries.items():
            if entry != "step" and value is not None:
                check_entry(param, entry, fields)
                moments[entry] = kept(param, entry, value)
        return Read(param.words, moments, fields_of(moments, group, fields), param.group, read_step(param))

    return read


def plain(param: SavedParam, entry: str, value: Any) -> Kept:
    """A moment that is a tensor of numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise WrongValue(f"{entry!r} of {param.words} must be a tensor of floats, got {got}")
    return Kept(tuple(value.shape), lambda: value, ShardSpec.of(value))


def read_step(param: SavedParam) -> int | None:
    """The number of steps that one parameter has made; None where the library keeps none."""
    step = param.entries.get("step")
    if step is None:
        return None
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number or number < 0:
        raise WrongValue(f"'step' of {param.words} must be a number of at least 0, got {step!r}")
    if number > LARGEST_STEP:
        raise WrongValue(f"'step' of {param.words} must be below 2**63, got {number}")
    if number != int(number):
        raise WrongValue(f"'step' of {param.words} must be a whole number, got {number}")
    return int(number)


def check_entry(param: SavedParam, entry: str, fields: Mapping[str, str]) -> None:
    """Refuse an entry that is not understood."""
    if entry in FIELDS or entry in fields:
        return
    why = f" ({WITHOUT_OURS[entry]}, which no transformation here keeps)" if entry in WITHOUT_OURS else ""
    raise WrongValue(
        f"{param.words} has an entry {entry!r}{why}; known are {', '.join(FIELDS)} and step; pass fields= "
        "to say which field of the state another one is"
    )


def fields_of(
    entries: Mapping[str, Any], group: Mapping[str, Any], fields: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """For each entry, the fields of ours that it may be."""
    found = {entry: (fields[entry],) if entry in fields else FIELDS[entry] for entry in entries}
    if "momentum_buffer" in found and "momentum_buffer" not in fields and "ns_coefficients" in group:
        found["momentum_buffer"] = ("mu",)  # torch.optim.Muon: a running mean
    return found


def refuse_dampening(reads: Iterable[Read], groups: Sequence[Mapping[str, Any]], target: Any, step: int | None) -> None:
    """Refuse momentum that a target does not go on with: our `trace` sums whole gradients, and never the rest of them.

    An optimizer of ours whose groups have a dampening does; its first gradient counts whole, so it must know that there
    have been steps, which torch's SGD does not count.
    """
    for read in reads:
        dampening = groups[read.group].get("dampening", 0)
        if "momentum_buffer" not in read.moments or not dampening or float(dampening) == 0:
            continue
        own = target.param_groups if isinstance(target, Shell) else [{}]
        if not all("dampening" in group for group in own):
            raise WrongValue(
                f"group {read.group} has a dampening of {dampening}, which the target has not; its momentum "
                "is another sum"
            )
        if step is None and read.step is None:
            raise WrongValue(
                f"group {read.group} has a dampening of {dampening}, which the first step has not, and "
                "saved has no number of steps; pass step="
            )


def signed(entry: str) -> bool:
    """Whether a moment may be below zero."""
    return entry not in UNSIGNED
