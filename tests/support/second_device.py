"""A second device on a machine that has none: "desk", whose tensors refuse to meet those of the CPU.

Its memory is the CPU's, so that it computes real numbers. Torch takes it for an accelerator written in Python: a tensor
says that it is on `desk:0`, only copies go from one device to the other, and anything else that mixes both is an error.
It has streams, which do everything in order and note what they were asked for.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import functional_lowbit as fl

DESK = torch.device("privateuseone", 0)
PINNED: dict[int, Tensor] = {}  # what was asked to be pinned, by address; kept, so that no address comes twice
CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Memory:
    """How many bytes of the second device are in use, and were at most."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}  # address -> [tensors that lie there, bytes]
        self.now = 0
        self.peak = 0

    def take(self, address: int, nbytes: int) -> None:
        """One tensor more at an address."""
        entry = self.held.setdefault(address, [0, 0])
        self.now += nbytes - entry[1]
        entry[:] = entry[0] + 1, nbytes
        self.peak = max(self.peak, self.now)

    def give(self, address: int) -> None:
        """One tensor less."""
        entry = self.held[address]
        entry[0] -= 1
        if not entry[0]:
            self.now -= self.held.pop(address)[1]

    @contextmanager
    def at_most(self, nbytes: int) -> Iterator[None]:
        """Inside, no more bytes than that come into use at once."""
        before = self.peak = self.now
        yield
        assert self.peak - before <= nbytes, (self.peak - before, nbytes)


MEMORY = Memory()


class OnDesk(Tensor):
    """A tensor of the second device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDesk":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DESK,
        )  # fmt: skip
        made.inner = inner
        storage = inner.untyped_storage()
        MEMORY.take(storage.data_ptr(), storage.nbytes())
        weakref.finalize(made, MEMORY.give, storage.data_ptr())
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDesk({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class Desk(TorchDispatchMode):
    """Inside, tensors may be made on the second device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation: on the second device if an argument is there, or if it is asked for."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, OnDesk)]
    asked = kwargs.get("device")
    wanted = None if asked is None else torch.device(asked).type == DESK.type
    if here and func not in CROSSING and any(x.ndim for x in tensors if not isinstance(x, OnDesk)):
        raise RuntimeError(f"{func} mixes tensors on {DESK} and on the CPU")
    if wanted:
        kwargs = {**kwargs, "device": "cpu"}
    if func is torch.ops.aten.is_pinned.default:
        return args[0].untyped_storage().data_ptr() in PINNED
    pin = kwargs.get("pin_memory")
    if pin:  # torch has no pinned memory of a device that is written in Python
        kwargs = {**kwargs, "pin_memory": False}
    plain = [(x.inner if isinstance(x, OnDesk) else x) for x in pytree.tree_leaves((args, kwargs))]
    args, kwargs = pytree.tree_unflatten(plain, pytree.tree_structure((args, kwargs)))
    if here and func is torch.ops.aten.sqrt.default:
        return OnDesk(fl.sqrt(args[0]))  # right to the last place, as on GPUs and not as torch's own on the CPU
    result = func(*args, **kwargs)
    if func is torch.ops.aten.copy_.default:
        return tensors[0]
    if pin:
        PINNED[result.untyped_storage().data_ptr()] = result
    is_there = bool(here) if wanted is None else wanted
    return pytree.tree_map(lambda x: OnDesk(x) if is_there and isinstance(x, Tensor) else x, result)


class Stream:
    """A stream that does everything in order."""

    log: ClassVar[list[str]] = []  # of all streams
    made: ClassVar[list["Stream"]] = []

    def __init__(self, device: Any = None):
        Stream.made.append(self)
        self.name = ("current", "in", "out")[len(Stream.made) - 1]
        self.events = 0

    def record_event(self) -> "Event":
        self.events += 1
        Stream.log.append(f"{self.name} records {self.name}{self.events}")
        return Event(f"{self.name}{self.events}")

    def wait_event(self, event: "Event") -> None:
        Stream.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: "Stream") -> None:
        Stream.log.append(f"{self.name} waits for stream {other.name}")

    def synchronize(self) -> None:
        Stream.log.append(f"host waits for stream {self.name}")


class Event:
    """A point in a stream's work."""

    def __init__(self, name: str):
        self.name = name


class Module(_DummyBackendModule):  # type: ignore[misc]
    """`torch.get_device_module("desk")`."""

    Stream = Stream
    _current: ClassVar[list[Stream]] = [Stream()]

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        Stream.log.append(f"{stream.name} does a job")
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()


def set_up() -> None:
    """Make the device known, for this process."""
    _setup_privateuseone_for_python_backend("desk", backend_module=Module())
