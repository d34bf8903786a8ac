"""A loop of one's own on two ranks: DistributedDataParallel and fully_shard, with torch's checkpoints."""

from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def wrapped(way: str) -> nn.Module:
    """The model as it is trained: "ddp", "fsdp2", or "fsdp2 bf16", with parameters and sums of gradients in float32."""
    model = tiny.llama()
    if way == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way == "fsdp2 bf16" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(name: str, way: str, folder: Path, resume: bool = False) -> tiny.Run:
    """The checkpoint of the step HALF is saved into the folder, or gone on from."""
    model = wrapped(way)
    cls, options = tiny.OPTIMIZERS[name]
    optimizer = cls(model.named_parameters(), **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=tiny.PEAK_LR, total_steps=tiny.STEPS + 1)
    batches = tiny.batches(tiny.STEPS * tiny.ACCUMULATE, dist.get_rank(), dist.get_world_size())
    first = 0
    if resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state, "schedule": schedule.state_dict()}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = tiny.HALF
    losses = []
    for step in range(first, tiny.STEPS):
        for batch in batches[step * tiny.ACCUMULATE : (step + 1) * tiny.ACCUMULATE]:
            loss = model(**batch).loss / tiny.ACCUMULATE
            loss.backward()
            losses.append(loss.item() * tiny.ACCUMULATE)
        nn.utils.clip_grad_norm_(model.parameters(), tiny.CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step + 1 == tiny.HALF and not resume:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            saved = {"model": model_state, "optimizer": optimizer_state, "schedule": schedule.state_dict()}
            dcp.save(saved, checkpoint_id=folder)
    assert all(isinstance(p, DTensor) != (way == "ddp") for p in model.parameters())
    return tiny.run(losses, model, optimizer)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2 bf16"])
def test_plain(way, two, tmp_path):
    torchs = two.run(train, "torch", way, tmp_path / "torch")
    own = two.run(train, "8 bits", way, tmp_path / "8 bits")
    assert tiny.equal(*own)
    assert own[0].losses != own[1].losses  # each has its own rows
    tiny.has_learned_in_few_bits(own[0], torchs[0])
    resumed = two.run(train, "8 bits", way, tmp_path / "8 bits", True)
    for a, b in zip(resumed, own, strict=True):
        assert tiny.equal(a, b)
        assert a.losses == b.losses[-len(a.losses) :]
    in_32_bits = two.run(train, "float32", way, tmp_path / "float32")
    if way == "fsdp2 bf16":  # one unit in the last place of a parameter may round it otherwise in bfloat16, by 2**-8
        torch.testing.assert_close(in_32_bits[0].losses, torchs[0].losses, rtol=2**-8, atol=0)
    else:
        assert tiny.distance(in_32_bits[0], torchs[0]) <= tiny.ROUNDING
