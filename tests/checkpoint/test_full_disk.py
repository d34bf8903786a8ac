"""A disk that is full: all ranks are told, and the old checkpoint stays."""

from collections.abc import Callable
from pathlib import Path

from tiers import slow

FULL = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import functional_lowbit as fl
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mesh, path = init_device_mesh("cpu", (2,)), sys.argv[1] + "/a"
def shard(x):
    return {"w": distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)}
fl.checkpoint.save(path, shard(torch.zeros(100, 2)))
big, text = shard(torch.ones(1 << 10, 1 << 8)), "no error"
try:
    fl.checkpoint.save(path, big)
except OSError as error:
    text = str(error)
whole = fl.checkpoint.load(path, shard(torch.ones(100, 2)))["w"].full_tensor().abs().max().item()
line = f"{text} {os.listdir(sys.argv[1])} {whole} {big['w'].full_tensor().min().item()}\\n"
os.write(1, line.encode())  # at once, since two ranks write
dist.destroy_process_group()
if rank == 0:
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""


@slow
def test_a_full_disk(small_disk: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    lines = small_disk(tmp_path / "disk", FULL, str(tmp_path / "meeting")).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line in [
            f"checkpoint.save: could not write '{tmp_path}/disk/a' on rank {rank}: [Errno 28] No space left on device; "
            "what was saved there before is untouched ['a'] 0.0 1.0"
            for rank in (0, 1)
        ]
