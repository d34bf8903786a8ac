"""low_bit: store the moments of any transformation in few bits."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from functional_lowbit import _optree, formats
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Moment, call_update
from functional_lowbit._core.state.moments import read_moments, store_again
from functional_lowbit._core.state.parts import Composite, Rest, init_with, map_moments
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, check_block_size, encode, zeros
from functional_lowbit._core.state.resting import placed, rest_in_float32
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.formats import Format
from functional_lowbit.formats._grid import grid_of
from functional_lowbit.sharding import ShardSpec, local_of

FormatChoice: TypeAlias = str | Format | Mapping[str, str | Format]
"""A format, or one for each state field by name; fields that are not named rest in float32."""


Where: TypeAlias = Callable[[str, Tensor], bool | str | Format]
"""`where(path, leaf) -> bool or format`."""


class LowBit(Composite):
    """The `update` of `low_bit`. Its state is the inner state, with a `QuantizedTensor` for each stored moment."""

    def __init__(
        self,
        inner: GradientTransformation,
        format: FormatChoice,
        block_size: int | None,
        min_size: int,
        where: Where | None,
    ):
        self.inner = (inner,)
        self.by_field = {k: formats.get(v) for k, v in format.items()} if isinstance(format, Mapping) else None
        self.format = None if isinstance(format, Mapping) else formats.get(format)
        self.block_size = block_size
        self.min_size = min_size
        self.where = where

    @speaking("low_bit")
    def init_state(self, params: Tree, rest: Rest) -> Any:
        """The inner state with stored moments. An outer `low_bit` decides on fields that this one does not name."""
        seen: set[str] = set()
        stored = 0

        @speaking("low_bit")
        def keep(
            field: str, moment: Moment, path: str, param: Tensor, value: Callable[[], Tensor] | None
        ) -> Tensor | QuantizedTensor:
            nonlocal stored
            seen.add(field)
            if self.by_field is not None and self.where is None and field not in self.by_field:
                return rest(field, moment, path, param, value)  # not ours: an outer low_bit may store it
            layout = self.layout(field, moment, path, param)
            if layout is None:
                return rest_in_float32(field, moment, path, param, value)
            stored += 1
            if value is None:
                return placed(zeros(layout, local_of(param).device))
            first = local_of(value())
            if tuple(first.shape) != layout.local_shape():
                rule = f"has shape {tuple(first.shape)}, but a moment must have its parameter's, {layout.local_shape()}"
                raise WrongValue.at(f"state.{field}", path, f"{rule}; do not declare it Signed or NonNegative")
            return placed(encode(first, layout))

        state = init_with(self.inner[0], params, keep)
        unknown = set(self.by_field or ()) - seen
        if unknown and seen:
            raise WrongValue(
                f"format names the field {sorted(unknown)[0]!r}, but the state's moments are {', '.join(sorted(seen))}"
            )
        if self.where is not None and seen and not stored:
            raise WrongValue("where matched no leaf; it is called as where(path, leaf), path like 'a.0.weight'")
        return state

    @speaking("low_bit")
    def layout(self, field: str, moment: Moment, path: str, param: Tensor) -> Layout | None:
        """How a moment is stored, or None for float32. A function of the path and the global shape."""
        default = self.format if self.by_field is None else self.by_field.get(field)
        if self.where is None:
            format = default if param.numel() >= self.min_size else None
        else:
            chosen = self.where(path, param)
            if not isinstance(chosen, (bool, str, Format)):
                rule = f"where({path!r}, leaf) must return a bool or a format, got {type(chosen).__name__}"
                raise WrongType(rule, path)
            format = (default if chosen else None) if isinstance(chosen, bool) else formats.get(chosen)
        if format is None or format is formats.float32:
            return None
        shape = tuple(param.shape)
        block_size = self.block_size or self._default_block_size(format)
        if format.scaled and not _saves(format, shape, block_size):
            return None
        threshold = self.min_size if self.where is None else None
        return Layout(format, moment.signed, shape, block_size, ShardSpec.of(param), threshold)

    def _default_block_size(self, format: Format) -> int:
        """One block size for all moments of a leaf, since one kernel walks over its blocks."""
        if self.by_field is None:
            return format.block_size
        return min((f.block_size for f in self.by_field.values() if f.scaled), default=format.block_size)

    def structure(self) -> Any:
        """How moments are stored."""
        return self.by_field or self.format, self.block_size, self.min_size

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """Read the moments, update, store them again. The step itself uses the new moments before they are rounded."""
        full = read_moments(state)
        updates, new = call_update(self.inner[0].update, updates, full, params, extra)
        return updates, map_moments(
            lambda field, moment, tree, old, read: _optree.map_stored(_stored_again, old, tree, read), new, state, full
        )


def _stored_again(at: _optree.Place, new: Any, read: Any) -> Any:
    return store_again(at.node, new, read)


def _saves(format: Format, shape: tuple[int, ...], block_size: int) -> bool:
    """Whether codes and scales take less room than float32: not where rows have one element."""
    grid = grid_of(shape, block_size)
    code_bytes = -(-grid.block * format.bits // 8)
    return grid.n_blocks > 0 and code_bytes + 4 < 4 * grid.block


@speaking("low_bit")
def low_bit(
    tx: GradientTransformation,
    format: FormatChoice = "companded8",
    *,
    block_size: int | None = None,
    min_size: int = 4096,
    where: Where | None = None,
) -> GradientTransformation:
    """Store the declared moments of any transformation in few bits.

    At each step the moments are read, the transformation runs in float32, and the new moments are stored; the step
    itself uses them before they are rounded. Which leaves are stored follows from paths and global shapes only, so it
    is the same on every mesh. Leaves that would not get smaller (rows of one element) stay in float32.

    Args:
        tx: Any transformation whose states declare moments (`Signed`, `NonNegative`), also inside chains and wrappers.
        format: A name of `formats.names()`, a `Format`, or a dict from state field to either.
        block_size: Elements that share one scale, at most; >= 1. The format's default if None.
        min_size: Leaves with fewer elements (of the global shape) stay in float32.
        where: `where(path, leaf) -> bool or format` decides for each leaf instead of `min_size`. A path reads like
            `layers.0.weight`.

    Returns:
        A transformation with the state of `tx`, where each stored moment's leaf is a `QuantizedTensor`.

    Raises:
        TypeError, ValueError: for what is no GradientTransformation, an unknown format, a block size below 1, a
            negative `min_size`; at `init`, for a `where` that matches nothing or a format for a field that no state
            has.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.low_bit(fl.adam(1e-3), {"mu": "companded8", "nu": "bfloat16"})
        >>> state = tx.init({"w": torch.zeros(64, 64), "b": torch.zeros(64)})
        >>> state[0].nu["w"].codes.dtype, state[0].nu["b"].dtype
        (torch.bfloat16, torch.float32)
    """
    refuse.transformation("tx", tx)
    if block_size is not None:
        check_block_size(block_size)
    if not isinstance(min_size, int) or min_size < 0:
        raise WrongValue(f"min_size must be an int of at least 0, got {min_size!r}")
    return LowBit(tx, format, block_size, min_size, where).transformation()
