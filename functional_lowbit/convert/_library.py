"""Which library saved an optimizer, and what its parameters look like, where no model is at hand."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._refused import speaking
from functional_lowbit.convert._bitsandbytes import MOMENTS, WRAPPED, entries_of, read_bitsandbytes
from functional_lowbit.convert._flashoptim import CODES, ERROR, read_flashoptim
from functional_lowbit.convert._own import is_own, read_own, saved_of_own
from functional_lowbit.convert._read import Read, Reader, plain, reader_by_names
from functional_lowbit.convert._saved import Saved, SavedParam, read_saved, unflattened
from functional_lowbit.convert._torchao import is_torchao, read_moment

OURS = "functional_lowbit"
READERS: dict[str, Reader] = {
    "torch": reader_by_names(plain),
    "torchao": reader_by_names(read_moment),
    "bitsandbytes": read_bitsandbytes,
    "flashoptim": read_flashoptim,
    OURS: read_own,
}


@speaking("library_of")
def library_of(saved: Any) -> str:
    """Which library an optimizer, or what its `state_dict()` returned, is from.

    It goes by the names of entries and by what they hold, so a saved optimizer without any state, or one of torchao
    whose parameters are all too small for few bits, looks like torch's.

    Args:
        saved: As in `from_torch`; or what `fl.state_dict` returned.

    Returns:
        "torch", "torchao", "bitsandbytes", "flashoptim" or "functional_lowbit".

    Raises:
        TypeError, ValueError: for what is no saved optimizer.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> fl.convert.library_of(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
        'torch'
        >>> fl.convert.library_of(fl.state_dict(fl.adam8bit(1e-3).init({"w": torch.ones(2)})))
        'functional_lowbit'
    """
    return library_in(saved)


def library_in(saved: Any) -> str:
    """As `library_of`, for whoever speaks."""
    saved = unflattened(saved)
    if is_own(saved):
        return OURS
    read = read_saved(saved)
    for p in read.params:
        if MOMENTS[0] in p.entries or WRAPPED in p.entries:
            return "bitsandbytes"
        if ERROR in p.entries or any(str(entry).endswith(CODES) for entry in p.entries):
            return "flashoptim"
        if any(is_torchao(x) for x in p.entries.values()):
            return "torchao"
    return "flashoptim" if any("master_bytewidth" in group for group in read.groups) else "torch"


def any_saved(saved: Any) -> Saved:
    """A saved optimizer of any library, ours too."""
    saved = unflattened(saved)
    return saved_of_own(saved) if is_own(saved) else read_saved(saved)


@speaking("params_of")
def params_of(saved: Any) -> dict[str, Tensor]:
    """Parameters without memory, as a saved optimizer tells of them: to convert without a model.

    Args:
        saved: As in `library_of`.

    Returns:
        Name (or number, counted through all groups) to a tensor on the meta device, in order; for what `fl.state_dict`
        returned, sorted by name. Parameters without state are left out: nothing tells their shape. The dtype is
        float32, or that of torch's moments.

    Raises:
        TypeError, ValueError: for what is no saved optimizer, or damaged.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.named_parameters())
        >>> model(torch.ones(64)).sum().backward()
        >>> optimizer.step()
        >>> saved = optimizer.state_dict()  # or torch.load(file)
        >>> params = fl.convert.params_of(saved)
        >>> fl.convert.from_torch(saved, fl.adamw8bit(1e-3).init(params), params)[0].mu["weight"]
        QuantizedTensor(companded8, shape=(64, 64), block_size=256)
    """
    found: dict[str, Tensor] = {}
    for p, read in each_read(saved):
        entries = entries_of(p)
        for entry, kept in islice(read.moments.items(), 1):
            value = entries.get(entry)
            dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float32
            found[p.label] = torch.empty(kept.shape, dtype=dtype, device="meta")
    return found


def each_read(saved: Any) -> Iterator[tuple[SavedParam, Read]]:
    """The parameters of a saved optimizer that have a state, and what is read of them."""
    source, reader = any_saved(saved), READERS[library_in(saved)]
    for p in source.params:
        if p.entries:
            yield p, reader(p, source.groups[p.group], {})
