"""offload: let the moments of any transformation rest on the CPU, and pass through the parameters' device in steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, call_update
from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._core.state import fits, lanes as queues
from functional_lowbit._core.state.parts import Composite, Rest, Widening, init_with, map_moments
from functional_lowbit._core.state.resting import pinned, placing
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.sharding import ShardSpec, local_of, wrap
from functional_lowbit.transforms._chain import Chain
from functional_lowbit.transforms._low_bit import LowBit

BUFFER_SIZE = 2**26  # bytes; 2.7 ms at 25 GB/s (PCIe 4.0 x16), long beside the 10 us or so that starting a copy costs


class Offload(Composite):
    """The `update` of `offload`. Its state is the inner state, with the moments on the CPU.

    `lanes` makes the queues for a device; None: those of `lanes`, and none where the state is already on the device.
    """

    offloads = True

    def place(self, moment: Tree) -> Tree:
        """Where a moment rests."""
        return to_cpu(moment)

    def __init__(
        self, inner: GradientTransformation, buffer_size: int, lanes: Callable[[torch.device], queues.Lanes] | None
    ):
        self.inner = (inner,)
        self.buffer_size = buffer_size
        self.lanes = lanes

    def init_state(self, params: Tree, rest: Rest) -> Any:
        """The inner state, moments on the CPU. Each is moved before the next one is made."""
        with placing(to_cpu):
            return init_with(self.inner[0], params, rest)

    def __call__(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        """The inner update, leaf by leaf where each leaf is treated alone, else with all moments on the device."""
        rule = _alone(self.inner[0].update)
        if rule is not None and params is not None and isinstance(state, rule.state_class):
            return self._each(rule, updates, state, params, extra)
        return self._all(updates, state, params, extra)

    def _all(self, updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> tuple[Tree, Any]:
        devices = {path: x.device for path, x in _leaves(updates if params is None else params)}
        some = next(iter(devices.values()), torch.device("cpu"))

        @speaking("offload.update")
        def there(field: str, moment: Any, tree: Tree) -> Tree:
            return _optree.map_stored(lambda at: _moved(field, at.path, at.node, devices.get(at.path, some)), tree)

        updates, new = call_update(self.inner[0].update, updates, map_moments(there, state), params, extra)
        return updates, map_moments(lambda field, moment, tree: to_cpu(tree), new)

    @speaking("offload.update")
    def _each(self, rule: Leafwise, updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> tuple[Tree, Any]:
        """As `_all`, with one leaf on the device at a time: each makes a tree of its own, under its path."""
        leaves, treedef = _optree.flatten(params)
        us = fits.same_structure("updates", treedef, updates)
        kept = {
            name: list(fits.same_structure(f"state.{name}", treedef, getattr(state, name))) for name in rule.leaf_fields
        }
        if all(u is None for u in us):
            return self._all(updates, state, params, extra)
        shared = state
        for i, (path, p, u) in enumerate(zip(_optree.names(treedef), leaves, us, strict=True)):
            if u is None:
                continue
            fields = {name: values[i] for name, values in kept.items()}
            for name in rule.moments:
                fields[name] = _moved(name, path, fields[name], p.device)
            own = state._replace(**{name: {path: x} for name, x in fields.items()})
            new_u, shared = call_update(self.inner[0].update, {path: u}, own, {path: p}, extra)
            us[i] = new_u[path]
            for name, values in kept.items():
                new = getattr(shared, name)[path]
                values[i] = to_cpu(new) if name in rule.moments else new
        # What all leaves share goes on alike for each.
        trees = {name: _optree.unflatten(treedef, values) for name, values in kept.items()}
        return _optree.unflatten(treedef, us), shared._replace(**trees)


def _alone(update: Any) -> Leafwise | None:
    """The leaf function of an update that treats each leaf alone; None for all others."""
    while isinstance(update, LowBit):
        update = update.inner[0].update
    return update if isinstance(update, Leafwise) and update.prepare is None else None


def to_cpu(moment: Tree) -> Tree:
    """A moment on the CPU, in memory that the device of its own can reach by itself. One without data stays so."""
    return _optree.map_leaves(lambda x: _to_cpu(x) if isinstance(x, Tensor) else x, moment)


def _to_cpu(x: Tensor) -> Tensor:
    local = local_of(x)
    if local.device.type in ("cpu", "meta"):
        return x
    return pinned(x) if queues.has_streams(local.device) else wrap(local.to("cpu"), ShardSpec.of(x))


def _moved(field: str, path: str, moment: Any, device: torch.device) -> Any:
    """A moment, a tensor or a `QuantizedTensor`, from the CPU to a device."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or device.type == "meta":
            return x
        local = local_of(x)
        if local.device.type != "cpu":
            raise fits.not_on_cpu(f"state.{field}", path, local.device)
        return x if device.type == "cpu" else wrap(local.to(device), ShardSpec.of(x))

    return _optree.map_leaves(move, moment)


def _leaves(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    leaves, treedef = _optree.flatten(tree)
    return ((path, x) for path, x in zip(_optree.names(treedef), leaves, strict=True) if isinstance(x, Tensor))


@speaking("offload")
def offload(
    tx: GradientTransformation, device: str | torch.device = "cpu", *, buffer_size: int = BUFFER_SIZE
) -> GradientTransformation:
    """Let the declared moments of any transformation rest on the CPU, while parameters are on another device.

    The compiled step copies the state of a few leaves to the device while the kernel works on that of the leaves before
    them, and back behind it: two staging buffers are all that the state takes there. The numbers are those of the
    transformation alone, bit for bit. Where the parameters are on the CPU too, nothing is copied.

    `low_bit` may be inside or outside. Shared state (the step) and statistics are small and rest where they would
    without this. Put it around the part that has the moments, or around all: `offload(chain(a, b))` is
    `chain(offload(a), offload(b))`. The errors of `master_weights` rest on the CPU with `offload(master_weights(tx))`,
    and with the parameters with `master_weights(offload(tx))`. What the step cannot take apart (a user's own pair with
    moments, a leaf function that needs whole leaves) is run by the pure update.

    Args:
        tx: Any transformation whose states declare moments (`Signed`, `NonNegative`).
        device: Where the moments rest: the CPU. In pinned memory, if the parameters' device copies beside kernels.
        buffer_size: Bytes of one staging buffer, at least 1. A leaf with more state goes through in pieces; one block's
            state, or one row's if the leaf is not contiguous, is the least that a buffer holds.

    Returns:
        A transformation with the state of `tx`, its moments on the CPU. The pure update has one leaf's moments on the
        device at a time, or those of all leaves where `tx` looks at the whole tree (a gate, a mask, a user's pair).

    Raises:
        TypeError: if `tx` is no GradientTransformation, or `buffer_size` no int.
        ValueError: for another device than the CPU, or a buffer below 1 byte; at `update` and in the step, for a state
            on another device.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.chain(fl.clip_by_global_norm(1.0), fl.offload(fl.adamw8bit(1e-3)))
        >>> params = {"w": torch.ones(64, 64)}  # on any device
        >>> state, step = tx.init(params), fl.compile(tx, backend="eager")
        >>> params, state = step({"w": torch.ones(64, 64)}, state, params)
        >>> state[1][0].mu["w"].codes.device
        device(type='cpu')
    """
    refuse.transformation("tx", tx)
    if str(device) != "cpu":
        raise WrongValue(f"device must be 'cpu', where the state is to rest, got {str(device)!r}")
    if isinstance(buffer_size, bool) or not isinstance(buffer_size, int):
        raise WrongType(f"buffer_size must be an int, in bytes, got {type(buffer_size).__name__}")
    if buffer_size < 1:
        raise WrongValue(f"buffer_size must be at least 1 byte, got {buffer_size}")
    return offloaded(tx, buffer_size)


def offloaded(
    tx: GradientTransformation, buffer_size: int, lanes: Callable[[torch.device], queues.Lanes] | None = None
) -> GradientTransformation:
    """As `offload`, with lanes of one's own: then state is staged on every device, the CPU too."""
    part = tx.update
    if isinstance(part, Chain):
        part = part.around([offloaded(inner, buffer_size, lanes) for inner in part.inner])
    elif isinstance(part, Widening):
        part = part.around(offloaded(part.inner[0], buffer_size, lanes), Offload(tx, buffer_size, lanes))
    else:
        part = Offload(tx, buffer_size, lanes)
    return part.transformation()
