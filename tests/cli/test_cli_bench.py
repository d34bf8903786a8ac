"""`bench`: what is timed, and that its numbers belong together. How long a step takes is no test."""

import json
import statistics

import pytest
import torch
from cli_files import command

import functional_lowbit as fl
from functional_lowbit.cli._contenders import leaves, makers, parameters, shapes

OURS = [f"adamw {name}" for name in fl.formats.names() if name != "float32"]


def timed(capsys, *argv):
    ran = command(capsys, "bench", "--json", "--no-peers", *argv)
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def test_the_numbers_belong_together(capsys):
    document = timed(capsys, "--size", "8K", "--rounds", "3", "--only", "companded8,foreach")
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["torch fused", "torch foreach", "adamw companded8"]
    assert document["parameters"] == 3 * 2048
    assert document["versions"]["torch"] == torch.__version__
    for row in rows.values():
        assert len(row["ratios"]) == 3
        assert row["ratio"] == statistics.median(row["ratios"])
        assert row["ns_per_param"] > 0
    assert rows["torch fused"]["state_bytes_per_param"] == 8 + 4 / document["parameters"]
    state = fl.describe(fl.adamw8bit(1e-3).init([torch.zeros(3, 2048)]))
    assert rows["adamw companded8"]["state_bytes_per_param"] == state.total_bytes / document["parameters"]


def test_the_table(capsys):
    ran = command(capsys, "bench", "--no-peers", "--size", "4K", "--leaves", "2", "--rounds", "1", "--only", "foreach")
    lines = ran.out.splitlines()
    assert lines[1].startswith(f"functional-lowbit {fl.__version__}, torch {torch.__version__}")
    assert lines[2] == "4,000 parameters of float32 in 2 leaves of (1, 2000), 1 round"
    assert lines[4].split("  ")[0] == "optimizer"
    assert [line.split("  ")[0] for line in lines[5:]] == ["torch fused", "torch foreach"]


def test_everything_of_ours_is_there():
    names = [name for name in makers() if not name.startswith(("torchao", "bitsandbytes"))]
    assert names == ["torch fused", "torch foreach", "adamw", *OURS]


@pytest.mark.parametrize("name", ["torch fused", "adamw"])
def test_what_is_timed_makes_a_step(name):
    p, g = (leaves([(4, 8)], torch.float32, "cpu", seed) for seed in (0, 1))
    before = p[0].clone()
    makers()[name](p, g).step()
    # AdamW's first step is lr * sign(g), and decay: lr * 0.1 * p.
    # Parameters below 4 are rounded by at most 2.4e-7 a time.
    assert torch.allclose(p[0], before * (1 - 1e-4) - 1e-3 * g[0].sign(), atol=1e-6)


@pytest.mark.parametrize(("size", "number", "shape"), [(4096, 1, (2, 2048)), (1000, 1, (1, 1000)), (10, 100, (1, 1))])
def test_shapes(size, number, shape):
    found = shapes(size, number)
    assert found == [shape] * number
    assert parameters(found) == number * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--device", "quantum"], "--device 'quantum' cannot be used here: "),
        (["--device", "meta"], "--device 'meta' cannot be used here: "),
        (["--only", "int3"], f"--only 'int3' is in none of the names: torch fused, torch foreach, adamw, {OURS[0]}, "),
    ],
)
def test_mistakes(capsys, argv, text):
    ran = command(capsys, "bench", "--no-peers", *argv)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"functional-lowbit bench: {text}")  # the rest is torch's, or all names
    assert ran.err.count("\n") == 1
