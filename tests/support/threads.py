"""Lanes that are threads: copies and kernels run beside each other, in an order that only the plan's waits decide."""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LANES = ("in", "run", "out")


class Mark:
    """A job that may be waited for."""

    def __init__(self) -> None:
        self.is_over = threading.Event()


class Threads:
    """A thread for each lane. Each job begins late, by a random time of up to `pause` seconds.

    What runs on no device but the CPU needs a copy that is not over to be seen; here it is seen, in real memory: a plan
    that forgets a wait gives other numbers, or none.
    """

    def __init__(self, seed: int = 0, pause: float = 0.001):
        self._random = random.Random(seed)
        self._pause = pause
        self._errors: list[BaseException] = []
        self._queues: dict[str, queue.SimpleQueue[Any]] = {lane: queue.SimpleQueue() for lane in LANES}
        self._threads = [threading.Thread(target=self._work, args=(self._queues[lane],), daemon=True) for lane in LANES]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: str, job: Callable[[], None], after: Sequence[Any]) -> Mark:
        """Queue a job."""
        mark = Mark()
        self._queues[lane].put((job, after, mark, self._random.uniform(0.0, self._pause)))
        return mark

    def finish(self) -> None:
        """Wait for all; raise the first error."""
        for lane in LANES:
            self._queues[lane].put(None)
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    @torch.no_grad()  # a thread has a grad mode of its own
    def _work(self, jobs: "queue.SimpleQueue[Any]") -> None:
        while (entry := jobs.get()) is not None:
            job, after, mark, pause = entry
            for other in after:
                other.is_over.wait()
            time.sleep(pause)
            try:
                if not self._errors:
                    job()
            except BaseException as error:  # raised again by finish
                self._errors.append(error)
            finally:
                mark.is_over.set()
