"""Fixtures: processes that last, so that a test costs a job and not a start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for rendezvous, stacks and the compiler's cache, which all ranks of all worlds share."""
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="session")
def alone(place: Path) -> Iterator[Callable[..., Any]]:
    """`alone(job, *args)`: the result of a job in a process without a process group, remembered."""
    world = World(0, place)
    known: dict[Any, Any] = {}

    def run(job: Callable[..., Any], *args: Any) -> Any:
        if (job, args) not in known:
            known[job, args] = world.run(job, *args)[0]
        return known[job, args]

    yield run
    world.close()


@pytest.fixture(scope="session", params=[1, 2, 3, 4], ids="W={}".format)
def world(request: pytest.FixtureRequest, place: Path) -> Iterator[World]:
    """Ranks that serve all tests of one world size. pytest runs the tests of one size together."""
    world = World(request.param, place)
    yield world
    world.close()
