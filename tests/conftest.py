"""What tests of several folders are given."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from world import World

# Hypothesis fails a test whose example takes more than 0.2 s, which on a busy machine any may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MOUNT = ["unshare", "--mount", "--map-root-user"]

# Processes that last, so that a test costs a job and not a start.


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
