"""Real processes with real collectives, that wait for jobs.

A `World` is a group of gloo processes, one a rank, started once and then given many jobs: a start costs seconds, a job
costs nothing. What a job returns comes back, one result a rank. A job that raises fails its test with every rank's
traceback. A job that hangs fails its test with every rank's stack, and its processes are ended.
"""

import faulthandler
import hashlib
import io
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import functional_lowbit as fl
from functional_lowbit._refused import kind_of

JOB_SECONDS = 240  # a job may compile on a busy machine; none needs more than a tenth of this on a free one
COLLECTIVE_SECONDS = 60  # a rank that waits for a dead one gives up

# Forked from a process that has imported torch, a rank starts in a tenth of a second instead of five. Nothing in the
# parent of the fork has used a thread pool, a process group or the compiler.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"])


class World:
    """`size` ranks; 0 is one process without a process group, for runs of plain tensors.

    Args:
        size: Number of ranks.
        directory: For the rendezvous and the stacks.
    """

    def __init__(self, size: int, directory: Path):
        self.size = size
        self.directory = directory
        self.workers: list[Any] = []

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = JOB_SECONDS) -> list[Any]:
        """`job(*args)` on every rank: the results, in order of ranks."""
        if not self.workers:
            self._start()
        for _, pipe, _ in self.workers:
            pipe.send((job, args))
        answers: list[Any] = [None] * len(self.workers)
        deadline = time.monotonic() + seconds
        failed = False
        while any(a is None for a in answers) and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, (_, pipe, _) in enumerate(self.workers) if answers[rank] is None}
            for pipe in connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting[pipe]
                process = self.workers[rank][0]
                try:
                    ok, answer = pipe.recv()
                except EOFError:
                    process.join(10)
                    ok, answer = False, f"the process ended with code {process.exitcode}"
                answers[rank] = (ok, answer)
                if not ok and not failed:  # the others may wait for it for ever: give them a moment, then look at them
                    failed, deadline = True, min(deadline, time.monotonic() + 5)
        if all(a is not None and a[0] for a in answers):
            return [torch.load(io.BytesIO(a[1]), weights_only=False) for a in answers]
        lines = [f"{getattr(job, '__name__', job)}{args} failed in a world of {self.size}"]
        for rank, (answer, stack) in enumerate(zip(answers, self._stacks(answers), strict=True)):
            if answer is None:
                lines.append(f"-- rank {rank} did not answer; its stack:\n{stack}")
            elif "ended with code -" in str(answer[1]) and not answer[0]:
                lines.append(f"-- rank {rank}: {answer[1]}; its stack:\n{stack}")
            else:
                earlier = answers[:rank].index(answer) if answer in answers[:rank] else rank
                text = "done" if answer[0] else answer[1] if earlier == rank else f"as rank {earlier}"
                lines.append(f"-- rank {rank}: {text}")
        self.close(at_once=True)  # ranks may be at different collectives now; the next job gets new ones
        raise AssertionError("\n".join(lines))

    def _start(self) -> None:
        rendezvous = self.directory / f"rendezvous-{self.size}-{time.monotonic_ns()}"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the fork server starts
        for rank in range(max(1, self.size)):
            here, there = _processes.Pipe()
            stack = self.directory / f"stack-{self.size}-{rank}"
            process = _processes.Process(target=_serve, args=(rank, self.size, str(rendezvous), there, str(stack)))
            process.start()
            there.close()
            self.workers.append((process, here, stack))

    def _stacks(self, answers: list[Any]) -> list[str]:
        """What the ranks that did not answer are doing."""
        for answer, (process, _, _) in zip(answers, self.workers, strict=True):
            if answer is None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return [stack.read_text() if stack.exists() else "" for _, _, stack in self.workers]

    def close(self, at_once: bool = False) -> None:
        """End the processes."""
        for process, pipe, _ in self.workers:
            if at_once:
                process.kill()
            else:
                pipe.send(None)
        for process, pipe, _ in self.workers:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.workers = []


def _serve(rank: int, size: int, rendezvous: str, pipe: Any, stack: str) -> None:
    """What a rank does: jobs, until there are no more."""
    with open(stack, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file)
        faulthandler.enable(stack_file)
        torch.set_num_threads(1)
        _strict_warnings()
        if size:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            )
        while (message := pipe.recv()) is not None:
            job, args = message
            try:
                buffer = io.BytesIO()
                torch.save(job(*args), buffer)
                answer = (True, buffer.getvalue())
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
        if size:
            dist.destroy_process_group()


def _strict_warnings() -> None:
    """Warnings are errors, as in the parent; each exception has its cause."""
    warnings.simplefilter("error")
    # torch 2.13: importing the inductor backend imports torch.utils.mkldnn, which uses it.
    warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)


# What jobs are made of.


def rank() -> int:
    """This rank."""
    return dist.get_rank()


@cache
def mesh(*shape: int) -> DeviceMesh:
    """A mesh of all ranks: 1-D without arguments, else of this shape. HSDP's names in the last two dimensions."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "replicate", "shard")[-len(shape) :])


def shard(full: Tensor, on: DeviceMesh | None = None, *placements: Any) -> DTensor:
    """This rank's part of a tensor that every rank has, cut by torch; by rows, scalars repeated."""
    if not placements:
        placements = (Shard(0),) if full.ndim else (Replicate(),)
    return distribute_tensor(full, on or mesh(), list(placements), src_data_rank=None)


def whole(x: Tensor) -> Tensor:
    """The global tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def fingerprint(tree: dict[str, Any]) -> dict[str, Any]:
    """Each tensor as (dtype, global shape, global stride, hash of the global bits); equal only for equal bits.

    Gathers: every rank must call it. A rank whose tree has other keys hangs or fails, which is a test too.
    """
    return {
        name: (x.dtype, tuple(x.shape), tuple(x.stride()), digest(whole(x))) if isinstance(x, Tensor) else x
        for name, x in tree.items()
    }


def digest(x: Tensor) -> str:
    """A hash of the bits; the stride does not matter."""
    raw = x.detach().contiguous().flatten()
    return hashlib.sha256(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"").hexdigest()[:16]


def of_state(state: Any) -> dict[str, Any]:
    """The fingerprint of a state, under its checkpoint names."""
    return fingerprint(fl.state_dict(state))


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def take(tx: Any, way: str) -> Callable[..., Any]:
    """`step(grads, state, params) -> (params, state)`: compiled by a backend, or the pure functions ("pure")."""
    if way != "pure":
        return fl.compile(tx, backend=way)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return fl.apply_updates(params, updates), state

    return step


def error(function: Any, *args: Any) -> str:
    """What a call with a wrong argument says."""
    try:
        function(*args)
    except (TypeError, ValueError) as e:
        return f"{kind_of(e)}: {e}"
    return "no error"
