"""Build C++ into a library, once for each text, and load it.

The libraries are kept in a folder of the user's, by a hash of everything that they depend on: the text, the compiler,
its flags and the processor. Of ranks that want the same library at the same time, one builds it and the others wait.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

FLAGS = ["-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC", "-fopenmp"]
# Only what leaves every bit of a result alone: no contraction into fma, no reordering.
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv"]

SMALL = 2**15  # elements; fewer are not worth waking other threads for


class NoCompiler(Exception):
    """No C++ compiler that can build a library here; the text says why."""


def load(source: str) -> ctypes.CDLL:
    """The library of a C++ source.

    Raises:
        NoCompiler: if there is no g++ (or what `CXX` names), or it fails.
    """
    try:
        compiler, version = _compiler()
        key = "\0".join([source, *compiler, version, *FLAGS, _processor()])
        path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
        if not path.exists():
            _build_alone(compiler, source, path)
        return ctypes.CDLL(str(path))
    except OSError as error:  # a full disk, a library that was built elsewhere, a compiler that is none
        raise NoCompiler(f"a library cannot be built or loaded: {error}") from error


def _build_alone(compiler: Sequence[str], source: str, path: Path) -> None:
    import fcntl  # found on Linux only, as is the compiler

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by the death of its process
        if not path.exists():
            _build(compiler, source, path)


def _build(compiler: Sequence[str], source: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        done = subprocess.run(
            [*compiler, *FLAGS, str(text), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoCompiler(f"{' '.join([*compiler, *FLAGS])} failed:\n{done.stderr[-2000:]}")
        with open(made, "rb+") as file:
            os.fsync(file.fileno())  # a library that a crash cut short would end every later run
        os.replace(made, path)


@lru_cache(maxsize=1)
def _compiler() -> tuple[list[str], str]:
    """The command, and what the compiler says of itself."""
    if sys.platform != "linux":
        raise NoCompiler(f"not tried on {sys.platform}")
    command = shlex.split(os.environ.get("CXX") or "g++")
    path = shutil.which(command[0])
    if path is None:
        raise NoCompiler(f"no C++ compiler {command[0]} on the PATH")
    done = subprocess.run([path, *command[1:], "--version"], capture_output=True, text=True, check=False)
    return [path, *command[1:]], done.stdout


@lru_cache(maxsize=1)
def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Where libraries are kept: nobody else may write there, since what lies there is run."""
    chosen = os.environ.get("FUNCTIONAL_LOWBIT_CACHE")
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (Path(chosen) if chosen else caches / "functional_lowbit").resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return Path(tempfile.mkdtemp(prefix="functional_lowbit_"))
