"""init takes the memory of its own shard, and on meta tensors none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import world as w
from tiers import slow
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from world import World

import functional_lowbit as fl

SCRIPT = Path(__file__).parents[2] / "support" / "seven_billion.py"
FORMATS = ("companded8", "root4", "e4m3")
PAGE = 4096


@slow
@pytest.mark.parametrize(("rank", "mesh"), [(63, "64"), (0, "8x8")])
def test_one_rank_of_a_7b_model(rank: int, mesh: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(rank), mesh, *FORMATS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for format in FORMATS:
        found = seen[format]
        # Adam's two moments, each with a float32 scale for a block; 1% is left for 65 vectors and for shorter blocks.
        each = fl.formats.get(format).bits / 8 + 4 / fl.formats.get(format).block_size
        assert found["described"] <= 1.01 * 2 * each * found["parameters"]
        assert found["global"] > 60 * found["described"]
        # A tensor of more than a few kilobytes begins on a page of its own; the objects around it are smaller.
        slack = PAGE * found["tensors"]
        assert slack < 0.05 * found["described"]
        assert 0.9 * found["described"] <= found["init"] <= found["described"] + slack
        assert found["meta init"] <= slack
        assert found["described on meta"] == found["described"]
        assert found["same rows"]
        assert found["meta devices"] == ["cpu", "meta"]  # the counter is a number
    # In place: no more than one leaf of this rank in float32.
    assert seen["step"] <= seen["largest"]


def schema(state: Any) -> dict[str, Any]:
    """What can be known of each tensor without its numbers."""
    return {
        n: (x.dtype, tuple(x.shape), x.stride(), getattr(x, "placements", None), str(fl.sharding.local_of(x).shape))
        for n, x in fl.state_dict(state).items()
        if isinstance(x, Tensor)
    }


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 129), nn.LayerNorm(129), nn.Linear(129, 1025), nn.Conv2d(3, 64, 5))


def on_meta(format: str, sharded: bool) -> Any:
    seen = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = module()
        if sharded:
            fully_shard(model, mesh=w.mesh())
        params = dict(model.named_parameters())
        state = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3, format=format)).init(params)
        tensors = [x for n, x in fl.state_dict(state).items() if isinstance(x, Tensor) and not n.endswith("step")]
        assert {x.device.type for x in tensors} == {device}
        assert {isinstance(x, DTensor) for x in tensors} == {sharded}
        seen.append((schema(state), fl.describe(state).rows))
    return seen


@pytest.mark.parametrize("format", fl.formats.names())
def test_a_state_on_meta_is_the_state_without_its_numbers(format: str) -> None:
    planned, made = on_meta(format, False)
    assert planned == made


@pytest.mark.parametrize("world", [2, 4], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("format", FORMATS)
def test_a_module_on_meta_under_fully_shard(world: World, format: str) -> None:
    for planned, made in world.run(on_meta, format, True):
        assert planned == made
