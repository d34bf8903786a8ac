"""Hugging Face's Trainer: groups with and without decay, accumulation, clipping, warm-up, bfloat16, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launched import accelerated, launched
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

import functional_lowbit as fl


def trainer(
    folder: Path,
    bf16: bool = False,
    optim: str = "adamw_torch",
    model: Any = None,
    fsdp: dict[str, Any] | None = None,
    **optimizer: Any,
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=tiny.STEPS,
        per_device_train_batch_size=tiny.BATCH,
        gradient_accumulation_steps=tiny.ACCUMULATE,
        max_grad_norm=tiny.CLIP,
        learning_rate=tiny.PEAK_LR,
        adam_epsilon=tiny.HYPER["eps"],
        adam_beta2=tiny.HYPER["betas"][1],
        weight_decay=tiny.HYPER["weight_decay"],
        lr_scheduler_type="cosine",
        warmup_steps=2,
        save_strategy="steps",
        save_steps=tiny.HALF,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        bf16=bf16,
        optim=optim,
        fsdp=fsdp is not None,
        fsdp_config=fsdp,
    )
    return Trainer(model or tiny.llama(), arguments, train_dataset=tiny.Rows(128), **optimizer)


def finish(trainer: Trainer, resume: Path | None = None) -> tiny.Run:
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume / f"checkpoint-{tiny.HALF}"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return tiny.run(losses, trainer.model, trainer.optimizer)


def train(name: str, folder: Path, bf16: bool = False, resume: Path | None = None) -> tiny.Run:
    return finish(trainer(folder, bf16, optimizer_cls_and_kwargs=tiny.OPTIMIZERS[name]), resume)


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "bf16"])
def bf16(request: pytest.FixtureRequest) -> bool:
    """Whether forward and backward run in mixed precision."""
    return request.param


@pytest.fixture(scope="module")
def folder(bf16: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def torchs(bf16: bool, tmp_path_factory: pytest.TempPathFactory) -> tiny.Run:
    return train("torch", tmp_path_factory.mktemp("torch"), bf16)


@pytest.fixture(scope="module")
def eight_bits(bf16: bool, folder: Path) -> tiny.Run:
    return train("8 bits", folder, bf16)


def test_learns_in_few_bits(eight_bits, torchs):
    tiny.has_learned_in_few_bits(eight_bits, torchs)


def test_goes_on_from_a_checkpoint(eight_bits, bf16, folder, tmp_path):
    resumed = train("8 bits", tmp_path, bf16, resume=folder)
    assert tiny.equal(resumed, eight_bits)
    assert resumed.losses == eight_bits.losses


def test_in_32_bits_it_is_torchs(bf16, torchs, tmp_path):
    own = train("float32", tmp_path, bf16)
    assert own.lr == torchs.lr < tiny.PEAK_LR / 5  # the schedule came to its end
    if bf16:  # one unit in the last place of a parameter may round an activation otherwise, by 2**-8 of it
        torch.testing.assert_close(own.losses, torchs.losses, rtol=2**-8, atol=0)
    else:
        assert tiny.distance(own, torchs) <= tiny.ROUNDING
        torch.testing.assert_close(own.losses, torchs.losses, rtol=tiny.ROUNDING, atol=0)


def test_optimizer_and_schedule_made_by_the_user(tmp_path):
    """OneCycleLR moves `lr` and `betas`."""

    def run(cls: type[torch.optim.Optimizer], **options: Any) -> tiny.Run:
        model = tiny.llama()
        optimizer = cls(model.named_parameters(), **tiny.HYPER, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=tiny.PEAK_LR, total_steps=tiny.STEPS + 1)
        return finish(trainer(tmp_path / cls.__name__, model=model, optimizers=(optimizer, schedule)))

    own, torchs = run(fl.optim.AdamW8bit, format="float32"), run(torch.optim.AdamW)
    assert tiny.distance(own, torchs) <= tiny.ROUNDING


def test_bfloat16_parameters_in_4_bits(tmp_path):
    """Parameters themselves in bfloat16, rounded stochastically: the noise goes on where it was."""

    def run(folder: Path, resume: Path | None = None) -> tiny.Run:
        given = (fl.optim.AdamW4bit, {**tiny.HYPER, "stochastic_rounding": True})
        return finish(trainer(folder, model=tiny.llama(torch.bfloat16), optimizer_cls_and_kwargs=given), resume)

    own = run(tmp_path / "own")
    assert {p.dtype for p in own.model.values()} == {torch.bfloat16}
    assert own.losses[-1] < own.losses[0] - 0.3
    assert tiny.equal(run(tmp_path / "resumed", tmp_path / "own"), own)


def test_by_name(tmp_path, monkeypatch):
    """The line for `optim=`, whose names are fixed: that of another library's optimizer is given ours."""
    name = OptimizerNames.ADAMW_TORCH_8BIT
    # docs/hosts.md, "By name"
    monkeypatch.setitem(
        _OPTIMIZER_HANDLERS, name, lambda context: (fl.optim.AdamW8bit, context.optimizer_kwargs | context.adam_kwargs)
    )
    named = finish(trainer(tmp_path / "named", optim="adamw_torch_8bit"))
    assert tiny.equal(named, train("8 bits", tmp_path / "given"))


def job(name: str, folder: Path, way: str, resume: Path | None = None) -> tiny.Run:
    """A training on a rank: "ddp" or "fsdp2"."""
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if way == "fsdp2" else None
    with launched(), accelerated():
        own = trainer(folder, fsdp=fsdp, optimizer_cls_and_kwargs=tiny.OPTIMIZERS[name])
        found = finish(own, resume)
        assert all(isinstance(p, DTensor) != (fsdp is None) for p in own.model.parameters())
        return found


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_on_two_ranks(way, two, tmp_path):
    torchs = two.run(job, "torch", tmp_path / "torch", way)
    own = two.run(job, "8 bits", tmp_path / "8 bits", way)
    assert tiny.equal(*own)
    tiny.has_learned_in_few_bits(own[0], torchs[0])
    assert tiny.equal(two.run(job, "8 bits", tmp_path / "resumed", way, tmp_path / "8 bits")[0], own[0])
    in_32_bits = two.run(job, "float32", tmp_path / "float32", way)
    assert tiny.distance(in_32_bits[0], torchs[0]) <= tiny.ROUNDING
