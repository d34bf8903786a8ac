"""offload: what is refused, and what a failure leaves behind."""

from typing import Any

import pytest
import torch
from helpers import clone, refuses, run_step, same
from offload_trees import SIZE, make_grads, make_params, staged

import functional_lowbit as fl
from functional_lowbit._core.state.lanes import InOrder
from functional_lowbit.transforms._offload import offloaded


class Torn(InOrder):
    """Lanes of a device that fails in the middle."""

    def submit(self, lane: str, job: Any, after: Any) -> None:
        if lane == "out":
            raise OSError("the link is down")
        job()


def test_a_failure_in_the_middle_is_told_and_the_state_refused():
    tx, params = offloaded(fl.adamw8bit(0.1), SIZE, lambda device: Torn(device)), make_params()
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    with pytest.raises(OSError, match="the link is down"):
        step(make_grads(params)[0], state, params)
    with pytest.raises(RuntimeError, match="an earlier step in place was interrupted"):
        step(make_grads(params)[0], state, params)


def test_a_failure_before_anything_is_written_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """Where the device has no memory for the buffers, the step may be tried again."""
    tx, params = staged(fl.adamw8bit(0.1)), make_params()
    state, step, grads = tx.init(params), fl.compile(tx, backend="eager"), make_grads(params)[0]
    before = clone((params, state))
    empty = torch.empty

    def failing(*size: Any, **options: Any) -> Any:
        if options.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("no memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        step(grads, state, params)
    monkeypatch.undo()
    assert same((params, state), before)
    wanted = run_step(fl.compile(fl.adamw8bit(0.1), backend="eager", donate=False), params, [grads], clone(state))
    assert same(step(grads, state, params), wanted)


def test_errors_of_offload():
    refuses(
        ValueError,
        "offload: device must be 'cpu', where the state is to rest, got 'gpu'",
        lambda: fl.offload(fl.adam(0.1), "gpu"),
    )
    refuses(
        ValueError,
        "offload: device must be 'cpu', where the state is to rest, got 'cuda:0'",
        lambda: fl.offload(fl.adam(0.1), torch.device("cuda", 0)),
    )
    refuses(
        TypeError,
        "offload: buffer_size must be an int, in bytes, got float",
        lambda: fl.offload(fl.adam(0.1), buffer_size=1e6),  # type: ignore[arg-type]
    )
    refuses(
        ValueError,
        "offload: buffer_size must be at least 1 byte, got 0",
        lambda: fl.offload(fl.adam(0.1), buffer_size=0),
    )
    refuses(
        TypeError,
        "offload: tx must be a GradientTransformation, got function; call it: adam(...)",
        lambda: fl.offload(fl.adam),  # type: ignore[arg-type]
    )


def test_a_state_on_another_device_is_refused():
    tx, params = fl.offload(fl.scale_by_adam()), {"w": torch.ones(3)}
    state = tx.init({"w": torch.ones(3, device="meta")})
    text = (
        "state.mu['w'] is on meta, but fl.offload keeps it on the CPU; make the state with init(params) of the "
        "offloaded transformation"
    )
    refuses(ValueError, f"compile(tx): {text}", lambda: fl.compile(tx)(params, state, params))
    refuses(ValueError, f"offload.update: {text}", lambda: tx.update(params, state, params))
    refuses(ValueError, f"offload.update: {text}", lambda: tx.update(params, state))
