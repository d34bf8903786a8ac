"""Accelerate: alone, and on two ranks as DDP and as FSDP2."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from launched import accelerated, launched
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


def accelerator(precision: str, sharded: bool) -> Accelerator:
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    return Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=tiny.ACCUMULATE
    )


def train(name: str, way: str, precision: str, folder: Path, resume: bool = False) -> tiny.Run:
    """The loop of Accelerate's documentation.

    Args:
        name: Of the optimizer.
        way: "ddp" (which is no wrapper at all on one process), "fsdp2": all at once, "fsdp2 first": the model first.
        precision: "no" or "bf16".
        folder: For the checkpoint.
        resume: Whether to begin with the checkpoint.
    """
    host = accelerator(precision, sharded=way != "ddp")
    model = tiny.llama()
    if way == "fsdp2 first":
        model = fsdp2_prepare_model(host, model)
    cls, options = tiny.OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **options)
    given = weakref.ref(next(model.parameters()))
    # Accelerate takes as many steps of a schedule as there are ranks.
    total = (tiny.STEPS + 1) * host.num_processes
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=tiny.PEAK_LR, total_steps=total)
    rows = tiny.Rows(tiny.STEPS * tiny.ACCUMULATE * tiny.BATCH * host.num_processes)
    data = DataLoader(rows, batch_size=tiny.BATCH)
    model, optimizer, data, schedule = host.prepare(model, optimizer, data, schedule)
    losses = []
    first = tiny.HALF * tiny.ACCUMULATE if resume else 0
    if resume:
        host.load_state(str(folder))
        data = host.skip_first_batches(data, first)
    for i, batch in enumerate(data, start=first):
        with host.accumulate(model):
            loss = model(**batch).loss
            host.backward(loss)
            if host.sync_gradients:
                host.clip_grad_norm_(model.parameters(), tiny.CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(host.gather(loss.detach()).mean().item())
        if i + 1 == tiny.HALF * tiny.ACCUMULATE and not resume:
            host.save_state(str(folder))
    if way != "ddp":
        assert all(isinstance(p, DTensor) for p in model.parameters())
        gc.collect()
        assert (given() is None) == (way == "fsdp2")  # nobody keeps a whole parameter
    return tiny.run(losses, host.unwrap_model(model), optimizer)


def job(*args: Any) -> tiny.Run:
    """`train` on a rank."""
    with launched(), accelerated():
        return train(*args)


CASES = [("alone", "no"), ("alone", "bf16"), ("ddp", "no"), ("fsdp2", "no"), ("fsdp2", "bf16"), ("fsdp2 first", "no")]


@pytest.mark.parametrize(("way", "precision"), CASES)
def test_accelerate(way, precision, request, tmp_path):
    def runs(name: str, **more: Any) -> tiny.Run:
        if way == "alone":
            with accelerated():
                return train(name, "ddp", precision, tmp_path / name, **more)
        ranks = request.getfixturevalue("two").run(job, name, way, precision, tmp_path / name, *more.values())
        assert tiny.equal(*ranks)
        return ranks[0]

    torchs = runs("torch")
    own = runs("8 bits")
    tiny.has_learned_in_few_bits(own, torchs)
    resumed = runs("8 bits", resume=True)
    assert tiny.equal(resumed, own)
    assert resumed.losses == own.losses[-len(resumed.losses) :]
    in_32_bits = runs("float32")
    if precision == "no":
        assert tiny.distance(in_32_bits, torchs) <= tiny.ROUNDING
    else:  # one unit in the last place of a parameter may round an activation otherwise, by 2**-8 of it
        torch.testing.assert_close(in_32_bits.losses, torchs.losses, rtol=2**-8, atol=0)
