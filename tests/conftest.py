"""What tests of several folders are given."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tiers import mark_rows
from world import World

# Hypothesis fails a test whose example takes more than 0.2 s, which on a busy machine any may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Inductor takes the processor's own word for its vector instructions. To try them takes each process a second.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

MOUNT = ["unshare", "--mount", "--map-root-user"]


@pytest.hookimpl(tryfirst=True)  # before pytest goes by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what only `make test-all` runs."""
    mark_rows(items)


# Processes that last, so that a test costs a job and not a start.


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the rendezvous, the ranks' stacks and what tests write, which all ranks of all worlds share."""
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="session")
def worlds(place: Path) -> Iterator[Callable[[int], World]]:
    """`worlds(size)`: ranks that serve all tests of this process, started by their first job. 0: see `World`."""
    known: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in known:
            known[size] = World(size, place)
        return known[size]

    yield get
    for world in known.values():
        world.close()


@pytest.fixture(scope="session")
def alone(worlds: Callable[[int], World]) -> Callable[..., Any]:
    """`alone(job, *args)`: the result of a job in a process without a process group, remembered."""
    world = worlds(0)
    known: dict[Any, Any] = {}

    def run(job: Callable[..., Any], *args: Any) -> Any:
        if (job, args) not in known:
            known[job, args] = world.run(job, *args)[0]
        return known[job, args]

    return run


@pytest.fixture(scope="session", params=[1, 2, 3, 4], ids="W={}".format)
def world(request: pytest.FixtureRequest, worlds: Callable[[int], World]) -> World:
    """The ranks of one world size."""
    return worlds(request.param)


# Disks.


@pytest.fixture
def small_disk() -> Callable[..., str]:
    """`small_disk(folder, script, *args)`: what a script prints that runs where `folder` is a disk of 1 MB."""

    def run(folder: Path, script: str, *args: str) -> str:
        mount = f"mount -t tmpfs -o size=1m tmpfs '{folder}'"
        if subprocess.run([*MOUNT, "sh", "-c", mount], capture_output=True, check=False).returncode:
            pytest.skip("needs a mount namespace of its own (unshare --mount --map-root-user)")
        done = subprocess.run(
            [*MOUNT, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", script, str(folder), *args],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
