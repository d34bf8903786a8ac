"""A moment as another library keeps it, and how it is written as a leaf of ours: code for code where possible."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_lowbit import formats
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor
from functional_lowbit.checkpoint._reading import write_again
from functional_lowbit.formats._format import pack
from functional_lowbit.sharding import ShardSpec, local_of, wrap

EQUAL = 4e-7  # relative; our decoded values are at most 2 ulp from the tables of torchao and bitsandbytes


class Codes(NamedTuple):
    """This rank's codes, where they mean what those of one of our formats mean.

    Blocks run over the flattened local tensor; the last one may be shorter.
    """

    format: str
    signed: bool
    codes: Callable[[], Tensor]  # [n], one for each element, as the format's codec has them (not packed)
    scales: Tensor  # float32 [n_blocks]
    block: int


class Kept(NamedTuple):
    """A moment as another library keeps it."""

    shape: tuple[int, ...]  # global
    values: Callable[[], Tensor]  # the numbers, of any float dtype, sharded as they were saved
    spec: ShardSpec | None = None  # how they were sharded
    codes: Codes | None = None


class Blocks(NamedTuple):
    """This rank's codes in any library's format, in blocks of the flattened local tensor; the last may be shorter."""

    codes: Tensor  # [n]; of half as many bytes, if two of 4 bits stand in one
    scales: Tensor  # [n_blocks], of any float dtype
    block: int  # elements
    decode: Callable[[Tensor, Tensor], Tensor]  # the numbers of codes and of as many float32 scales
    packed: bool = False

    def each(self) -> Tensor:
        """The code of each element: [n]."""
        if not self.packed:
            return self.codes
        return torch.stack([self.codes >> 4, self.codes & 15], dim=-1).reshape(-1)  # the even element has the high half

    def values(self) -> Tensor:
        """The numbers: float32 [n]."""
        codes = self.each()
        return self.decode(codes, self.scales.float().repeat_interleave(self.block)[: codes.numel()])

    def pieces(self, size: int) -> Iterator[Tensor]:
        """The numbers of some blocks after the other, of about `size` elements at a time."""
        at_once = max(1, size // self.block)
        width = at_once * self.block // (2 if self.packed else 1)
        for i, scales in enumerate(self.scales.split(at_once)):
            yield self._replace(codes=self.codes[i * width : (i + 1) * width], scales=scales).values()

    def kept(self, like: Tensor, known: Codes | None) -> Kept:
        """The moment that these are, of the shape and sharding of a tensor."""
        spec, shape = ShardSpec.of(like), local_of(like).shape
        return Kept(tuple(like.shape), lambda: wrap(self.values().reshape(shape), spec), spec, known)

    def known(self, format: str, signed: bool) -> Codes:
        """These codes, where they are those of one of our formats."""
        return Codes(format, signed, self.each, self.scales, self.block)


def by_map(qmap: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """How codes are decoded that are places in a table of numbers."""
    return lambda codes, scales: qmap.float()[codes.long()] * scales


def is_map_of(format: str, signed: bool, qmap: Tensor) -> bool:
    """Whether a table has the values of one of our formats, code for code."""
    ours = _table(format, signed)
    theirs = qmap.detach().cpu().float()
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=EQUAL, atol=0)


@cache
def _table(format: str, signed: bool) -> Tensor:
    codec = formats.get(format).codec(signed)
    codes = torch.arange(256 if codec.packing == 1 else 16, dtype=torch.uint8, device="cpu")
    return codec.decode(codes[None], torch.ones(1, 1, device="cpu"))[0]


def write(kept: Kept, own: Any) -> Any:
    """A new leaf like `own`, with the numbers of a saved moment. No memory is shared with what was saved.

    Args:
        kept: The moment.
        own: A plain tensor, a DTensor or a `QuantizedTensor`; on the meta device it only says what is wanted.
    """
    if not isinstance(own, QuantizedTensor):
        spec = ShardSpec.of(own)
        local = _placed(_part(kept, spec), local_of(own).device).to(own.dtype, copy=True)
        return wrap(local.contiguous(), spec)
    layout, device = own.layout, local_of(own.codes).device
    reused = _reusable_codes(kept, layout)
    if reused is not None and bool(reused[2].all()):
        codes, scales, _ = reused
        return layout.store(_placed(codes, device).clone(), _placed(scales, device))
    fresh = write_again(_placed(_part(kept, layout.spec).float().contiguous(), device), layout)
    if reused is None:
        return fresh
    codes, scales, usable = (_placed(x, device) for x in reused)
    fresh_codes, fresh_scales = fresh.local_blocks()
    assert fresh_scales is not None
    return layout.store(torch.where(usable, codes, fresh_codes), torch.where(usable, scales, fresh_scales))


def _reusable_codes(kept: Kept, layout: Layout) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes [n_blocks, width] and scales [n_blocks, 1] as the layout keeps them, and which blocks can be kept so.

    Possible if no block of ours crosses one of theirs: a longer block of theirs lends its scale to several of ours. A
    scale that is below the format's smallest one (an all-zero block has 0) or not finite cannot be kept.
    """
    theirs, grid = kept.codes, layout.local_grid()
    if theirs is None or (theirs.format, theirs.signed) != (layout.format.name, layout.signed):
        return None
    if not _alike(kept.spec, layout.spec) or grid.n_blocks == 0:
        return None
    if grid.padding or (theirs.block % grid.block and (grid.n_blocks > 1 or theirs.block < grid.block)):
        return None
    codec = layout.format.codec(layout.signed)
    codes = theirs.codes().reshape(grid.n_blocks, grid.block)
    first = torch.arange(grid.n_blocks, device=codes.device) * grid.block
    scales = theirs.scales.float()[first // theirs.block].view(-1, 1)
    assert codec.zero_scale is not None
    usable = scales.isfinite() & (scales >= codec.zero_scale)
    return codes if codec.packing == 1 else pack(codes), scales, usable


def _part(kept: Kept, spec: ShardSpec | None) -> Tensor:
    """This rank's part of the numbers, sharded as `spec` says. A collective where the saved ones are sharded by others.

    A plain tensor is taken for the whole one, which every rank has.
    """
    x = kept.values()
    if _alike(kept.spec, spec):
        return local_of(x)
    if kept.spec is not None:
        x = local_of(x.full_tensor())  # type: ignore[attr-defined]
    if spec is None:
        return x
    places = zip(spec.local_offset(), spec.local_shape(), strict=True)
    return x[tuple(slice(first, first + n) for first, n in places)]


def _alike(a: ShardSpec | None, b: ShardSpec | None) -> bool:
    """Whether two tensors of one shape have the same shards on every rank."""
    if a is None or b is None:
        return a is b
    return a.mesh == b.mesh and a.placements == b.placements


def _placed(x: Tensor, device: torch.device) -> Tensor:
    return x if device.type == "meta" else x.to(device)
