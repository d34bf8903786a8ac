"""checkpoint.async_save, and several that write at once."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_states import make_tree, names_in
from helpers import clone, refuses, same
from tiers import slow

import functional_lowbit as fl
from functional_lowbit.checkpoint import _folder, _save


def test_async_save_is_of_the_moment(tmp_path: Path) -> None:
    """Later steps write into the same buffers; the file has what was there when it was asked for."""
    tree = make_tree()
    wanted = clone(tree)
    first = fl.checkpoint.async_save(tmp_path / "a", tree)
    second = fl.checkpoint.async_save(tmp_path / "b", tree)
    for x in (tree["params"]["w"], tree["state"][0].mu["w"].codes, tree["state"][0].step):
        x.zero_()
    assert first.result() is None
    assert second.result() is None
    for name in ("a", "b"):
        assert same(fl.checkpoint.load(tmp_path / name, make_tree(steps=0)), wanted)
    assert names_in(tmp_path) == ["a", "b"]


def test_async_save_fails_in_its_future(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    failed = fl.checkpoint.async_save(tmp_path / "file" / "x", make_tree())
    with pytest.raises(OSError, match=r"^checkpoint.async_save: cannot write at '.*/file/x': \[Errno 20\] ") as caught:
        failed.result()
    assert [(x.name, x.levelname, x.getMessage()) for x in caplog.records] == [
        ("functional_lowbit.checkpoint", "WARNING", str(caught.value))  # which also tells who asks no future
    ]
    refuses(
        TypeError,
        "state_dict: leaf 'x' must be a tensor, a bool, a number or a string, got object",
        lambda: fl.checkpoint.async_save(tmp_path / "a", {"x": object()}),
    )


def test_one_path_is_not_written_twice_at_once(tmp_path: Path) -> None:
    big = {"w": torch.ones(4_000_000)}  # takes longer to write than to ask again
    running = fl.checkpoint.async_save(tmp_path / "a", big)
    for call, speaker in ((fl.checkpoint.save, "save"), (fl.checkpoint.async_save, "async_save")):
        message = (
            f"checkpoint.{speaker}: '{tmp_path / 'a'}' is being written by another save; wait for its result first"
        )
        refuses(ValueError, message, lambda call=call: call(tmp_path / "a", big))
    running.result()
    saving = threading.Thread(target=fl.checkpoint.save, args=(tmp_path / "a", big))
    saving.start()
    while tmp_path / "a" not in _save._running:
        assert saving.is_alive()
    message = f"checkpoint.save: '{tmp_path}/a' is being written by another save; wait for its result first"
    refuses(ValueError, message, lambda: fl.checkpoint.save(tmp_path / "a", big))
    saving.join()
    fl.checkpoint.save(tmp_path / "a", big)


WRITER = """
import sys, torch, functional_lowbit as fl
fl.checkpoint.save(sys.argv[1], {"w": torch.ones(4_000_000)})
"""


@slow
def test_one_path_is_not_written_by_two_processes(tmp_path: Path) -> None:
    """One is stopped while it writes; a killed one keeps nobody out (`test_killed_at_any_moment`)."""
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        while not _folder.partial(path).exists() or not any(_folder.partial(path).iterdir()):
            assert writer.poll() is None
        writer.send_signal(signal.SIGSTOP)
        try:
            message = f"checkpoint.save: '{path}' is being written by another process; one at a time may do so"
            refuses(ValueError, message, lambda: fl.checkpoint.save(path, {"w": torch.zeros(2)}))
        finally:
            writer.send_signal(signal.SIGCONT)
        assert writer.wait(60) == 0
    assert fl.checkpoint.load(path, {"w": torch.zeros(4_000_000)})["w"].eq(1).all()
    fl.checkpoint.save(path, {"w": torch.zeros(2)})
    assert names_in(tmp_path) == ["a"]


FORKED = """
import os, sys, torch, functional_lowbit as fl
torch.set_num_threads(1)
one, two = ({"w": torch.full((1_000_000,), float(n))} for n in (1, 2))
saving = fl.checkpoint.async_save(sys.argv[1] + "/a", one)
child = os.fork()
if child == 0:
    fl.checkpoint.async_save(sys.argv[1] + "/b", two).result()
    os._exit(0)
saving.result()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for name in "ab":
    print(fl.checkpoint.load(sys.argv[1] + "/" + name, one)["w"].unique().item())
"""


def test_a_forked_child_writes_by_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(tmp_path)],
        check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1.0", "2.0"]
