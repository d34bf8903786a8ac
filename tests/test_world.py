"""The harness itself: a rank that fails or hangs makes its test fail, with its traceback or its stack, and soon."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import world as w
from tiers import slow
from world import World

two = pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)


def hang_on_rank_1() -> None:
    if w.rank() == 1:
        dist.all_reduce(torch.ones(()))  # rank 0 does not come


def fail_on_rank_0() -> None:
    if w.rank() == 0:
        raise RuntimeError("on purpose")
    dist.all_reduce(torch.ones(()))


def add() -> Any:
    total = torch.ones(()) * (w.rank() + 1)
    dist.all_reduce(total)
    return total.item()


def warn() -> None:
    torch.tensor(torch.ones(()))  # torch warns


@slow
@two
def test_a_hanging_rank_shows_its_stack(world: World) -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 0: done.*rank 1 did not answer.*hang_on_rank_1"):
        world.run(hang_on_rank_1, seconds=8)
    assert time.monotonic() - begin < 40
    assert world.run(add) == [3.0, 3.0]  # new ranks


@two
def test_a_failing_rank_shows_its_traceback(world: World) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: Traceback.*on purpose.*rank 1 .*fail_on_rank_0"):
        world.run(fail_on_rank_0)


@two
def test_a_warning_is_an_error(world: World) -> None:
    with pytest.raises(AssertionError, match="UserWarning"):
        world.run(warn)
