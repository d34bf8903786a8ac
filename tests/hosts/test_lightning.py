"""Lightning: automatic optimization on one process, and its ModelParallelStrategy (FSDP2) on two."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import tiny
import torch
from launched import LIGHTNINGS, launched
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in LIGHTNINGS]


class Module(lightning.LightningModule):
    def __init__(self, name: str):
        super().__init__()
        self.cls, self.options = tiny.OPTIMIZERS[name]
        self.model = tiny.llama()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.cls(self.model.named_parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=tiny.PEAK_LR, total_steps=tiny.STEPS + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Batches(DataLoader[Any]):
    """Goes on where it was when the checkpoint was saved. Lightning begins an ordinary DataLoader anew."""

    done = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(super().__iter__(), self.done, None):
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def train(name: str, precision: Any, folder: Path, resume: Path | None = None, sharded: bool = False) -> tiny.Run:
    """One epoch.

    Args:
        name: Of the optimizer.
        precision: Lightning's.
        folder: For checkpoints.
        resume: The folder of a run whose second half is repeated.
        sharded: Whether this is one of two ranks.
    """
    module = Module(name)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 if sharded else 1,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "auto",
        precision=precision,
        max_steps=tiny.STEPS,
        accumulate_grad_batches=tiny.ACCUMULATE,
        gradient_clip_val=tiny.CLIP,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=tiny.HALF, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=sharded,
    )
    checkpoint = None if resume is None else str(resume / f"step={tiny.HALF}.ckpt")
    trainer.fit(module, Batches(tiny.Rows(128), batch_size=tiny.BATCH), ckpt_path=checkpoint, weights_only=True)
    return tiny.run(module.losses, module.model, trainer.optimizers[0])


def job(*args: Any) -> tiny.Run:
    """`train` on a rank."""
    with launched(LIGHTNINGS):
        return train(*args, sharded=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision, tmp_path):
    torchs = train("torch", precision, tmp_path / "torch")
    own = train("8 bits", precision, tmp_path / "8 bits")
    tiny.has_learned_in_few_bits(own, torchs)
    resumed = train("8 bits", precision, tmp_path / "resumed", resume=tmp_path / "8 bits")
    assert tiny.equal(resumed, own)
    assert resumed.losses == own.losses[-len(resumed.losses) :]
    in_32_bits = train("float32", precision, tmp_path / "float32")
    if precision == "32-true":
        assert tiny.distance(in_32_bits, torchs) <= tiny.ROUNDING
    else:  # one unit in the last place of a parameter may round an activation otherwise, by 2**-8 of it
        torch.testing.assert_close(in_32_bits.losses, torchs.losses, rtol=2**-8, atol=0)


def test_model_parallel_strategy(two, tmp_path):
    torchs, _ = two.run(job, "torch", "32-true", tmp_path / "torch")
    own, other = two.run(job, "8 bits", "32-true", tmp_path / "8 bits")
    assert tiny.equal(own, other)
    tiny.has_learned_in_few_bits(own, torchs)
    resumed, _ = two.run(job, "8 bits", "32-true", tmp_path / "resumed", tmp_path / "8 bits")
    assert tiny.equal(resumed, own)
    in_32_bits, _ = two.run(job, "float32", "32-true", tmp_path / "float32")
    assert tiny.distance(in_32_bits, torchs) <= tiny.ROUNDING
