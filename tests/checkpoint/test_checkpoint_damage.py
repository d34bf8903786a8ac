"""Damaged files, killed writers, disks that are full or read-only: no damage goes unnoticed, nothing is lost."""

import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import make_tree, names_in
from helpers import clone, refuses, same
from tiers import slow

import functional_lowbit as fl
from functional_lowbit.checkpoint import _files, _folder


def _cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def test_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    message = f"checkpoint.load: there is no checkpoint at '{path}'"
    refuses(FileNotFoundError, message, lambda: fl.checkpoint.load(path, make_tree(steps=0)))


def test_damaged_files(tmp_path: Path) -> None:
    path, fresh = tmp_path / "a", make_tree(steps=0)
    data, metadata = path / "__0_0.distcp", path / ".metadata"
    fl.checkpoint.save(path, make_tree())
    whole = data.stat().st_size
    before = clone(fresh)

    _cut(data, whole - 1)
    message = f"checkpoint.load: the file '{data}' is truncated: it has {whole - 1} bytes of {whole}"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, fresh))
    data.unlink()
    refuses(
        ValueError,
        f"checkpoint.load: the file '{data}' of the checkpoint is missing",
        lambda: fl.checkpoint.load(path, fresh),
    )
    data.write_bytes(b"\0" * whole)
    with pytest.raises(ValueError, match=rf"^checkpoint.load: cannot read '{path}', a file is damaged: "):
        fl.checkpoint.load(path, fresh)
    _cut(metadata, metadata.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"^checkpoint.load: cannot read '{metadata}', the file is damaged: "):
        fl.checkpoint.load(path, fresh)
    metadata.unlink()
    message = f"checkpoint.load: '{path}' is no complete checkpoint: it has no .metadata, which is written last"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, fresh))
    message = f"checkpoint.save: '{path}' must be a checkpoint or nothing yet; move away what is there"
    refuses(ValueError, message, lambda: fl.checkpoint.save(path, fresh))  # nor is anything overwritten
    assert same(fresh, before)


def test_a_part_that_no_rank_wrote(tmp_path: Path) -> None:
    """The files are as long as the metadata say, but these say nothing of the second half of a tensor."""
    path = tmp_path / "a"
    fl.checkpoint.save(path, make_tree())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    part = metadata.state_dict_metadata["params.w"].chunks[0]
    part.sizes = torch.Size([32, 64])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    message = f"checkpoint.load: the entry 'params.w' of '{path}' is not whole; a rank did not write its part"
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, make_tree(steps=0)))


def test_spoilt_metadata(tmp_path: Path) -> None:
    """They unpickle, but what comes of it lacks something or has another type."""
    path, file = tmp_path / "a", tmp_path / "a" / ".metadata"
    fl.checkpoint.save(path, make_tree())
    whole = file.read_bytes()
    message = rf"^checkpoint.load: cannot read '{file}', the file is damaged: "
    for was, has in (
        (b"properties", b"propertiet"),
        (b"state_dict_metadata", b"state_dict_metadatb"),
        (b"relative_path", b"relative_pati"),
        (b"float32", b"strided"),
        (b"chunks", b"chunkt"),
    ):
        assert was in whole
        file.write_bytes(whole.replace(was, has))
        with pytest.raises(ValueError, match=message):
            fl.checkpoint.load(path, make_tree(steps=0))


def test_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves between the look at a checkpoint and the reading of its numbers: no mixture of two is loaded."""
    path, read, waiting = tmp_path / "a", _files.read, []

    def later(folder: Path, metadata: Any, wanted: dict[str, Any]) -> None:
        if "w" in wanted and waiting:
            fl.checkpoint.save(path, waiting.pop(0))
        return read(folder, metadata, wanted)

    monkeypatch.setattr(_files, "read", later)
    one, two, three = ({"w": torch.full((9,), float(n)), "n": n} for n in (1, 2, 3))
    fl.checkpoint.save(path, one)
    waiting[:] = [two]
    assert same(fl.checkpoint.load(path, {"w": torch.zeros(9), "n": 0}), two)
    waiting[:] = [three, one]
    message = (
        f"checkpoint.load: '{path}' was replaced while it was read, twice, or is another one on another rank; load it "
        "when nothing is saved there, from a disk that all ranks see"
    )
    refuses(ValueError, message, lambda: fl.checkpoint.load(path, {"w": torch.zeros(9), "n": 0}))
    assert not waiting


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    """The disk as it is then: the old one renamed, the new one not yet."""
    path, old, new = tmp_path / "a", make_tree(), make_tree(steps=3)
    fl.checkpoint.save(path, new)
    path.rename(_folder.partial(path))
    fl.checkpoint.save(path, old)
    _folder.partial(path).mkdir(exist_ok=True)
    path.rename(_folder.previous(path))
    assert same(fl.checkpoint.load(path, make_tree(steps=0)), old)
    path.mkdir()  # as many a program does before it looks for a checkpoint
    assert same(fl.checkpoint.load(path, make_tree(steps=0)), old)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\] File too large; what was saved there before is untouched"):
            fl.checkpoint.save(path, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(fl.checkpoint.load(path, make_tree(steps=0)), old)
    fl.checkpoint.save(path, new)
    assert same(fl.checkpoint.load(path, make_tree(steps=0)), new)
    assert names_in(tmp_path) == ["a"]


KILLER = """
import os, signal, sys, time, torch, functional_lowbit as fl
torch.set_num_threads(1)
for k in range(20):
    path = f"{sys.argv[1]}/{k}/a"
    saved, say = os.pipe()
    saver = os.fork()
    if saver == 0:
        fl.checkpoint.save(path, {"w": torch.zeros(100)})
        os.write(say, b".")
        while True:
            fl.checkpoint.save(path, {"w": torch.ones(100)})
            fl.checkpoint.save(path, {"w": torch.zeros(100)})
    assert os.read(saved, 1) == b"."
    time.sleep(0.0013 * k)
    os.kill(saver, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]) == -signal.SIGKILL
"""


@slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """One that saves without a pause is killed; each time there is a whole checkpoint, and the next save tidies up."""
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True, timeout=120)
    left = set()
    for k in range(20):
        path = tmp_path / str(k) / "a"
        left |= set(names_in(path.parent))
        loaded = fl.checkpoint.load(path, {"w": torch.full((100,), 7.0)})["w"]
        assert loaded.eq(loaded[0]).all()
        assert loaded[0] in (0, 1)
        fl.checkpoint.save(path, {"w": torch.full((100,), 2.0)})
        assert fl.checkpoint.load(path, {"w": loaded})["w"].eq(2).all()
        assert names_in(path.parent) == ["a"]
    assert ".a.checkpoint-partial" in left  # some were killed while they wrote


def test_read_only(tmp_path: Path) -> None:
    tree = make_tree()
    before = clone(tree)
    for place in ("/proc", "/sys"):  # not even root makes folders there
        with pytest.raises(OSError, match=rf"^checkpoint.save: cannot write at '{place}/a': \[Errno \d+\] "):
            fl.checkpoint.save(f"{place}/a", tree)
    name = "x" * 300
    for call, what in ((fl.checkpoint.save, "save: cannot write at"), (fl.checkpoint.load, "load: cannot read")):
        with pytest.raises(OSError, match=rf"^checkpoint.{what} '{tmp_path}/{name}': \[Errno 36\] File name too long"):
            call(tmp_path / name, tree)
    assert same(tree, before)


FORBIDDEN = """
import os, shutil, tempfile, torch, functional_lowbit as fl
folder, tree = tempfile.mkdtemp(), {"w": torch.ones(2)}  # where others may go too
try:
    fl.checkpoint.save(folder + "/a", tree)
    if os.getuid() == 0:  # root may write anywhere
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    for mode, call in ((0o500, fl.checkpoint.save), (0, fl.checkpoint.load)):
        os.chmod(folder, mode)
        try:
            call(folder + "/a", tree)
        except OSError as error:
            print(str(error).replace(folder, ""))
    os.chmod(folder, 0o700)
    print(os.listdir(folder))
finally:
    os.seteuid(os.getuid())
    shutil.rmtree(folder)
"""


def test_a_folder_without_permission() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "checkpoint.save: cannot write at '/a': [Errno 13] Permission denied: '/.a.checkpoint-partial'",
        "checkpoint.load: cannot read '/a': [Errno 13] Permission denied: '/a/.metadata'",
        "['a']",
    ]


FULL = """
import os, sys, torch, functional_lowbit as fl
path = sys.argv[1] + "/a"
fl.checkpoint.save(path, {"w": torch.zeros(100)})
big = {"w": torch.ones(1 << 18)}
for call in (fl.checkpoint.save, lambda *args: fl.checkpoint.async_save(*args).result()):
    try:
        call(path, big)
    except OSError as error:
        print(error)
print(os.listdir(sys.argv[1]), fl.checkpoint.load(path, {"w": torch.ones(100)})["w"].abs().max().item())
print(big["w"].min().item())
"""


def test_a_full_disk(tmp_path: Path, small_disk: Callable[..., str]) -> None:
    lines = small_disk(tmp_path, FULL).splitlines()
    for line, speaker in zip(lines[:2], ("save", "async_save"), strict=True):
        assert line == (
            f"checkpoint.{speaker}: could not write '{tmp_path}/a': [Errno 28] No space left on device; "
            "what was saved there before is untouched"
        )
    assert lines[2:] == ["['a'] 0.0", "1.0"]
