"""The command line on what one rank wrote with torch.save, read where no process group is."""

import pytest
import torch
import world as w
from cli_files import command
from torch.distributed.tensor import Shard
from world import World

import functional_lowbit as fl

ROWS, OWN = 33, 17  # of the whole, and on the first of two ranks


def save_own_part(path: str) -> None:
    params = {"w": w.shard(torch.ones(ROWS, 256), w.mesh(2), Shard(0))}
    torch.save({"params": params, "optimizer": fl.state_dict(fl.adamw8bit(1e-3).init(params))}, path.format(w.rank()))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_shard_is_inspected_and_not_converted(world: World, capsys, tmp_path):
    world.run(save_own_part, str(tmp_path / "{}.pt"))
    file, out = tmp_path / "0.pt", tmp_path / "out.pt"
    ran = command(capsys, "inspect", file)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    own = OWN * (256 + 4)  # a byte for each code, and a scale for each row
    assert f"optimizer: fl.state_dict of version {fl.__version__} (functional-lowbit), 3 leaves, 8.85 kB" in lines
    (line,) = [x for x in lines if x.startswith("0.mu.w ")]
    assert line.split() == ["0.mu.w", "companded8", f"({ROWS},", "256)", "256", f"{own:,}"]  # no numbers behind it
    assert "beside it: params (1 tensor, 17.4 kB)" in lines
    assert command(capsys, "convert", file, out, "--to", "root4") == (
        2,
        "",
        "functional-lowbit convert: leaf '0.mu.w' is one rank's shard; save with fl.checkpoint.save, and convert "
        "that\n",
    )
    assert not out.exists()
