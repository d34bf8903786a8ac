"""Queues of a device in which copies and kernels run beside each other, and memory that can be copied meanwhile."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch


class Lanes(Protocol):
    """Three queues, "in", "run" and "out". What is queued in one of them is done in order."""

    def submit(self, lane: str, job: Callable[[], None], after: Sequence[Any]) -> Any:
        """Queue a job, to begin when those of other lanes are over whose marks are in `after`; returns its mark."""
        ...

    def finish(self) -> None:
        """Wait until the host may read what was copied back. Called once, whatever happened before."""
        ...


class InOrder:
    """Lanes of a device without streams of its own choice: it does all that is queued in order."""

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)

    def submit(self, lane: str, job: Callable[[], None], after: Sequence[Any]) -> None:
        """Queue the job on the device, behind all others."""
        job()

    def finish(self) -> None:
        """Wait for the device."""
        self._module.synchronize()


class Streams:
    """Lanes of an accelerator. Kernels run on the current stream, copies on two others.

    What was queued on the current stream before this is made is over before a copy begins: buffers are allocated first.
    """

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)
        copies_in, copies_out = _side_streams(device)
        self._streams = {"in": copies_in, "run": self._module.current_stream(device), "out": copies_out}
        begin = self._streams["run"].record_event()
        for stream in (copies_in, copies_out):
            stream.wait_event(begin)

    def submit(self, lane: str, job: Callable[[], None], after: Sequence[Any]) -> Any:
        """Queue a job on the lane's stream; the mark is an event."""
        stream = self._streams[lane]
        for event in after:
            stream.wait_event(event)
        with self._module.stream(stream):
            job()
        return stream.record_event()

    def finish(self) -> None:
        """Wait for the copies; the buffers' memory may be used by the current stream from then on."""
        for lane in ("in", "out"):
            self._streams["run"].wait_stream(self._streams[lane])
        self._streams["out"].synchronize()
        self._streams["in"].synchronize()  # behind it only after an error


@lru_cache(maxsize=64)
def _side_streams(device: torch.device) -> tuple[Any, Any]:
    """Two streams beside the current one, the same ones at each step."""
    module = torch.get_device_module(device)
    return module.Stream(device), module.Stream(device)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device: streams where it has them."""
    return Streams(device) if has_streams(device) else InOrder(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies run beside kernels on a device, and so whether memory on the CPU is worth pinning."""
    if device.type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) and module.is_available()
