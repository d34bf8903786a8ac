"""A tensor in few bits: codes and scales, with what is needed to read them."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_lowbit import _optree, formats
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.formats import Format
from functional_lowbit.formats._grid import Grid, grid_of, lead_of
from functional_lowbit.sharding import ShardSpec, local_of, wrap


class Layout(NamedTuple):
    """What of a quantized tensor is not data. Two ranks that hold shards of one tensor have equal layouts."""

    format: Format
    signed: bool
    shape: tuple[int, ...]  # global
    block_size: int  # the longest block
    spec: ShardSpec | None  # of the tensor that the codes stand for
    threshold: int | None = None  # the size, in elements, that made `low_bit` choose a format; None: chosen by hand

    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part of the tensor."""
        return self.shape if self.spec is None else self.spec.local_shape()

    def local_grid(self) -> Grid:
        """The grid of this rank's part: a part of the whole tensor's, unless the mesh cuts blocks."""
        if self.spec is None:
            return grid_of(self.shape, self.block_size)
        if self.cut:
            return self._own_grid(self.local_shape())
        lead, local = lead_of(self.shape, self.block_size), self.local_shape()
        return grid_of(self.shape, self.block_size).part(prod(local[:lead]), prod(local[lead:]))

    def _own_grid(self, shape: tuple[int, ...]) -> Grid:
        """The grid of a shard whose blocks the mesh cuts. One with rows of less than half a block is a single row.

        Else a shard of columns of one element would have a scale for each, which takes more room than float32, and
        blocks of one element, for which the compiler makes a graph of their own.
        """
        grid = grid_of(shape, self.block_size)
        return grid_of((prod(shape),), self.block_size) if 2 * grid.row_length < self.block_size else grid

    @property
    def cut(self) -> bool:
        """Whether the mesh cuts blocks, so that they end at the shard's edge and not where the whole tensor's do."""
        return self.spec is not None and self.format.scaled and not self.spec.keeps_blocks(self.block_size)

    def store(self, codes: Tensor, scales: Tensor | None) -> "QuantizedTensor":
        """Wrap this rank's codes [n_blocks, width] and scales [n_blocks, 1] (or unscaled codes, local shape)."""
        if not self.format.scaled:
            return QuantizedTensor(wrap(codes, self.spec), None, self)
        assert scales is not None
        return QuantizedTensor(self._place(codes, self._codes_in), self._place(scales, self._scales_in), self)

    def _codes_in(self, grid: Grid) -> int:
        """Codes in one row of a grid."""
        return grid.blocks_per_row * self.format.codec(self.signed).width(grid.block)

    def _scales_in(self, grid: Grid) -> int:
        """Scales in one row of a grid."""
        return grid.blocks_per_row

    def _place(self, blocks: Tensor, per_row: Callable[[Grid], int]) -> Tensor:
        """[n_blocks, any] of this rank -> a plain tensor, or a DTensor with a global shape of its own."""
        spec = self.spec
        if not self.cut:
            grid = grid_of(self.shape, self.block_size)
            lead = lead_of(self.shape, self.block_size)
            counted = self.shape[:lead] if grid.rows > 1 else (grid.rows,) * max(lead, 1)
            whole = (*counted, per_row(grid))
            if spec is None:
                return blocks.reshape(whole)
            dims = [d if d < lead else len(whole) - 1 if d == lead else None for d in range(len(self.shape))]
            own = spec.moved(dims, whole)
            return own.wrap(blocks.reshape(own.local_shape()))
        assert spec is not None
        # The longest shard is not always the one with most blocks: 768 is 3 x 256, 640 is 4 x 160.
        grids = [self._own_grid(shape) for shape in spec.local_shapes()]
        own = spec.per_shard(max(grid.rows * per_row(grid) for grid in grids))
        flat = blocks.reshape(-1)
        if len(flat) < own.shape[-1]:
            flat = F.pad(flat, (0, own.shape[-1] - len(flat)))
        return own.wrap(flat.view(own.local_shape()))

    def empty_codes(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """This rank's codes and scales of a tensor of zeros, as `store` takes them."""
        codec = self.format.codec(self.signed)
        if codec.zero_scale is None:
            return torch.full(self.local_shape(), codec.zero_code, dtype=codec.dtype, device=device), None
        grid = self.local_grid()
        width = codec.width(grid.block)
        codes = torch.full((grid.n_blocks, width), codec.stored_zero, dtype=codec.dtype, device=device)
        return codes, torch.full((grid.n_blocks, 1), codec.zero_scale, dtype=torch.float32, device=device)


@_optree.register
class QuantizedTensor:
    """A tensor that rests as codes and scales. A pytree node of plain tensors or DTensors, no tensor subclass.

    Attributes:
        codes: The codes: [rows, codes of a row]. Without scales (bfloat16), a tensor of the original shape.
        scales: float32 [rows, blocks of a row], or None for a format without scales. A scale's meaning is the format's.
        layout: Format, sign, global shape, block size and sharding.

    If the tensor is a DTensor whose shards hold whole rows, codes and scales are DTensors with its mesh and placements
    and with their own global shape and stride. If the mesh cuts rows, each shard is quantized by itself, and the codes
    are one row for each shard, padded to the longest.
    """

    TREE_FIELDS = ("codes", "scales")
    IS_ONE_LEAF = True

    def __init__(self, codes: Any, scales: Any, layout: Layout):
        self.codes = codes
        self.scales = scales
        self.layout = layout

    @property
    def format(self) -> Format:
        """The storage format."""
        return self.layout.format

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the tensor that the codes stand for."""
        return self.layout.shape

    @property
    def block_size(self) -> int:
        """The longest block, in elements; `layout.local_grid().block` is the length in use."""
        return self.layout.block_size

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """How the original was sharded; None for a plain tensor."""
        return None if self.layout.spec is None else self.layout.spec.placements

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales on this rank."""
        return sum(local_of(x).nbytes for x in (self.codes, self.scales) if x is not None)

    def local_blocks(self) -> tuple[Tensor, Tensor | None]:
        """Views of this rank's codes [n_blocks, width] and scales [n_blocks, 1] (or unscaled codes, local shape)."""
        codes = local_of(self.codes)
        if self.scales is None:
            return codes, None
        n = self.layout.local_grid().n_blocks
        scales = local_of(self.scales).view(-1, 1)[:n]
        if n == 0:
            return codes.reshape(-1)[:0].view(0, 1), scales
        if self.layout.cut:
            width = self.format.codec(self.layout.signed).width(self.layout.local_grid().block)
            return codes.view(-1)[: n * width].view(n, width), scales
        return codes.view(n, -1), scales

    def dequantize(self) -> Tensor:
        """The numbers: float32, of the original global shape, sharded as the original was."""
        codes, scales = self.local_blocks()
        shape = self.layout.local_shape()
        width = self.layout.local_grid().block if self.format.scaled else 1
        values = self.format.codec(self.layout.signed).read(codes, scales, width)
        local = self.layout.local_grid().from_blocks(values, shape) if self.format.scaled else values.reshape(shape)
        return wrap(local.contiguous(), self.layout.spec)  # padded rows are a view with gaps

    def tree_flatten(self) -> tuple[tuple[Any, Any], Layout]:
        """For the pytree registries."""
        return (self.codes, self.scales), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Any) -> "QuantizedTensor":
        """For the pytree registries."""
        codes, scales = children
        return cls(codes, scales, layout)

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format.name}, shape={self.shape}, block_size={self.block_size})"


@speaking("quantize")
def quantize(x: Tensor, format: str | Format, *, signed: bool = True, block_size: int | None = None) -> QuantizedTensor:
    """Store a tensor in few bits.

    Args:
        x: A floating-point tensor or DTensor of any shape.
        format: A name of `formats.names()`, or a `Format`.
        signed: False for a tensor that is never below 0, which has formats of its own.
        block_size: Elements that share one scale, at most; >= 1. The format's default if None.

    Returns:
        A `QuantizedTensor`; `.dequantize()` gives float32.

    Raises:
        TypeError: for a tensor that is not floating-point.
        ValueError: for an unknown format or a block size below 1.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> q = fl.quantize(torch.tensor([[0.0, 0.5, -1.0]]), "companded8")
        >>> q.codes
        tensor([[   0,   85, -127]], dtype=torch.int8)
        >>> q.dequantize().shape
        torch.Size([1, 3])
    """
    format = formats.get(format)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise WrongType(f"x must be a floating-point tensor, got {kind}")
    block_size = check_block_size(format.block_size if block_size is None else block_size)
    layout = Layout(format, signed, tuple(x.shape), block_size, ShardSpec.of(x))
    return encode(local_of(x), layout)


def encode(local: Tensor, layout: Layout) -> QuantizedTensor:
    """Quantize this rank's part of a tensor."""
    local = local.float()
    codec = layout.format.codec(layout.signed)
    if layout.format.scaled:
        if local.numel() == 0:
            return zeros(layout, local.device)
        local = layout.local_grid().to_blocks(local)
    codes, scales = codec.write(local)
    return layout.store(codes, scales)


def zeros(layout: Layout, device: torch.device) -> QuantizedTensor:
    """A quantized tensor of zeros; no float32 tensor of its size is made."""
    codes, scales = layout.empty_codes(device)
    return layout.store(codes, scales)


def check_block_size(block_size: Any) -> int:
    """A block size, if it is an int of at least 1."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise WrongValue(f"block_size must be an int of at least 1, got {block_size!r}")
    return block_size
