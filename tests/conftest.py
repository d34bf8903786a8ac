"""What tests of several folders are given."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis fails a test whose example takes more than 0.2 s, which on a busy machine any may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MOUNT = ["unshare", "--mount", "--map-root-user"]


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
