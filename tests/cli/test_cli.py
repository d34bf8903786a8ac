"""The command line as a whole: help, exit status, JSON, progress, and what happens to errors."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from cli_files import command, state_of, torch_file
from tiers import slow

import functional_lowbit as fl
from functional_lowbit._core.report.columns import table
from functional_lowbit.cli import main
from functional_lowbit.cli._output import as_json, counted, picture, size

RUN = [sys.executable, "-m", "functional_lowbit"]
COMMANDS = ["plan", "inspect", "convert", "bench"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "demo.pt"
    torch_file(path, state_of())
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_examples(capsys, name):
    ran = command(capsys, name, "--help")
    assert ran.status == 0
    assert ran.err == ""
    assert f"functional-lowbit {name} " in ran.out.partition("examples:")[2]
    assert "--json" in ran.out


def test_the_help_lists_all_commands_and_the_exit_status(capsys):
    ran = command(capsys, "--help")
    assert all(f"    {name} " in ran.out for name in COMMANDS)
    assert "exit status:\n  0    all is well\n" in ran.out


def test_the_version(capsys):
    assert command(capsys, "--version") == (0, f"functional-lowbit {fl.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "functional-lowbit: error: the following arguments are required: COMMAND\n"),
        (["inspect"], "functional-lowbit inspect: error: the following arguments are required: PATH\n"),
        (
            ["bench", "--size", "4X"],
            "functional-lowbit bench: error: argument --size: must be a number of at least 1, as 4194304 or 4M; got "
            "'4X'\n",
        ),
        (
            ["bench", "--rounds", "0"],
            "functional-lowbit bench: error: argument --rounds: must be a whole number of at least 1, got '0'\n",
        ),
        (
            ["plan", "--mesh", "2x0"],
            "functional-lowbit plan: error: argument --mesh: must be sizes of at least 1 joined by x, as 2x4; got "
            "'2x0'\n",
        ),
        (
            ["plan", "--mesh", "2", "--ranks", "2"],
            "functional-lowbit plan: error: argument --ranks: not allowed with argument --mesh\n",
        ),
    ],
)
def test_arguments_that_cannot_be_read_are_status_2(capsys, argv, text):
    ran = command(capsys, *argv)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.endswith(text)


def test_a_mistake_is_one_line_and_no_traceback(capsys):
    assert command(capsys, "inspect", "missing.pt") == (
        2,
        "",
        "functional-lowbit inspect: there is no 'missing.pt'\n",
    )


def test_debug_keeps_the_traceback_of_a_mistake(capsys):
    with pytest.raises(Exception, match=r"^there is no 'missing\.pt'$"):
        main(["inspect", "--debug", "missing.pt"])


def test_groups_that_are_none_are_no_bug(capsys, tmp_path):
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": 3}, tmp_path / "odd.pt")
    assert command(capsys, "inspect", tmp_path / "odd.pt").status == 0


def test_json_is_one_document_and_what_others_print_goes_to_stderr(capsys, tmp_path):
    class Loud:
        def __reduce__(self):
            return print, ("loud",)

    torch_file(tmp_path / "loud.pt", state_of(), extra=Loud())
    ran = command(capsys, "inspect", "--json", "--unsafe", tmp_path / "loud.pt")
    assert ran.err == "loud\n"
    document = json.loads(ran.out)
    assert document["command"] == "inspect"
    assert document["version"] == fl.__version__


def test_json_has_no_nan():
    assert json.loads(as_json({"a": [float("nan"), 1.0], "b": {"c": float("inf")}})) == {
        "a": [None, 1.0],
        "b": {"c": None},
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1.00 kB"), (52_345, "52.3 kB")),
        *((999_000, "999 kB"), (2_978_080, "2.98 MB"), (13_476_831_232, "13.5 GB"), (5_000_000_000_000, "5,000 GB")),
    ],
)
def test_sizes_have_three_digits(count, text):
    assert size(count) == text


def test_words_in_the_plural():
    assert [counted(n, what) for n, what in ((1, "leaf"), (2, "leaf"), (1000, "tensor"), (0, "entry"))] == [
        "1 leaf",
        "2 leaves",
        "1,000 tensors",
        "0 entries",
    ]


def test_a_table_sets_numbers_to_the_right():
    assert table(("a", "n"), [("x", "1"), ("yy", "10")], ("n",)) == "a    n\nx    1\nyy  10"


def test_a_picture_of_progress():
    assert picture("read", 1, 4, 3.0, "0.mu.w") == "read [######..................]  25%  0:09  0.mu.w"
    assert picture("read", 0, 4, 0.0) == "read [........................]   0%  -:--"
    assert picture("read", 5, 4, 60.0) == "read [########################] 100%  0:00"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def read_until(terminal, text):
    """What a process has written on its terminal, until it has written `text`."""
    seen, deadline = b"", time.monotonic() + 60
    while text not in seen and time.monotonic() < deadline:
        seen += os.read(terminal, 4096)
    assert text in seen, seen
    return seen


def test_progress_is_for_terminals_and_ctrl_c_is_status_130():
    terminal, slave = os.openpty()
    with subprocess.Popen(
        [*RUN, "bench", "--size", "4K", "--rounds", "1000000", "--only", "adamw companded8"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment(),
    ) as process:
        os.close(slave)
        assert process.stdout is not None
        seen = read_until(terminal, b"torch fused")
        process.send_signal(signal.SIGINT)
        seen += read_until(terminal, b"interrupted\r\n")
        assert process.stdout.read() == b""
        assert process.wait(60) == 130
    os.close(terminal)
    assert b"\r\x1b[Ktime steps [....." in seen
    assert seen.endswith(b"\r\x1b[Kfunctional-lowbit bench: interrupted\r\n")  # the bar is taken away first
    assert b"Traceback" not in seen


@slow
def test_progress_of_a_conversion(checkpoint, tmp_path):
    terminal, slave = os.openpty()
    argv = [*RUN, "convert", str(checkpoint), str(tmp_path / "out.pt"), "--to", "root4"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=slave, env=environment()) as process:
        os.close(slave)
        seen = read_until(terminal, b"\r\x1b[Kverify [########################] 100%  0:00\r\x1b[K")
        assert process.wait(60) == 0
    os.close(terminal)
    assert b"\r\x1b[Kconvert [........................]   0%  -:--" in seen
    assert b"\r\x1b[Kconvert [########################] 100%  0:00  1.0." in seen


@slow
def test_a_terminal_without_the_letters_is_no_error(checkpoint, tmp_path):
    name = tmp_path / "é.pt"
    shutil.copy(checkpoint, name)
    ended = subprocess.run(
        [*RUN, "inspect", str(name)],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(os.fsencode(tmp_path) + b"/\\xe9.pt: file of torch.save, ")


@slow
def test_a_reader_that_goes_away_is_no_error(checkpoint):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [*RUN, "inspect", str(checkpoint)], stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


@slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full, which is Linux's")
def test_a_full_disk_under_the_output_is_one_line(checkpoint):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*RUN, "inspect", str(checkpoint)], stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    text = b"functional-lowbit inspect: cannot write the output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, text)


def test_closed_streams_are_no_error(checkpoint, monkeypatch):
    """Python says None for a stream that `>&-` has closed."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with contextlib.ExitStack() as closed:
        statuses = [main(["inspect", str(checkpoint)]), main(["inspect", "missing.pt"])]
        for stream in (sys.stdout, sys.stderr):
            closed.enter_context(stream)
    assert statuses == [0, 2]


def test_a_pipe_is_no_file(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("inspect", "plan"):
        text = "is no file (a pipe or a device); write what comes from it into a file first"
        assert command(capsys, name, tmp_path / "pipe") == (
            2,
            "",
            f"functional-lowbit {name}: {str(tmp_path / 'pipe')!r} {text}\n",
        )
