"""torchtitan's optimizer container and its schedules, on one process."""

from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

import functional_lowbit as fl


class Optimizers(OptimizersContainer):
    """torchtitan's container, which also knows this library's names (docs/hosts.md)."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(fl.optim, name, None) or OptimizersContainer._resolve_optimizer_factory(name)


def built(name: str, model: nn.Module) -> tuple[OptimizersContainer, Any]:
    """As torchtitan's trainer builds them: from configs."""
    cls, options = tiny.OPTIMIZERS[name]
    groups = [
        ParamGroupConfig(
            pattern="norm", optimizer_name=cls.__name__, optimizer_kwargs={**options, "weight_decay": 0.0}
        ),
        ParamGroupConfig(pattern=".*", optimizer_name=cls.__name__, optimizer_kwargs=options),
    ]
    optimizers = Optimizers.Config(param_groups=groups, implementation="foreach").build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=tiny.STEPS)
    return optimizers, schedules


def train(name: str, saved: Any = None) -> tuple[tiny.Run, Any]:
    """The run, and what torchtitan gives to `dcp.save` at half of it."""
    model = tiny.llama()
    optimizers, schedules = built(name, model)
    first = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizer"])
        schedules.load_state_dict(saved["lr_scheduler"])
        first = tiny.HALF
    losses = []
    half = None
    batches = tiny.batches(tiny.STEPS)
    for step in range(first, tiny.STEPS):
        optimizers.zero_grad()
        loss = model(**batches[step]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), tiny.CLIP)
        optimizers.step()
        schedules.step()
        losses.append(loss.item())
        if step + 1 == tiny.HALF:
            half = _copied(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizers.state_dict(),
                    "lr_scheduler": schedules.state_dict(),
                }
            )
    (optimizer,) = optimizers
    return tiny.run(losses, model, optimizer), half


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


# LRSchedulersContainer.load_state_dict calls get_lr() of torch's schedulers, which warn users of it.
@pytest.mark.filterwarnings("ignore:To get the last learning rate computed by the scheduler")
def test_torchtitan():
    torchs, _ = train("torch")
    own, half = train("8 bits")
    tiny.has_learned_in_few_bits(own, torchs)
    resumed, _ = train("8 bits", half)
    assert tiny.equal(resumed, own)
    assert resumed.losses == own.losses[-len(resumed.losses) :]
    in_32_bits, _ = train("float32")
    assert tiny.distance(in_32_bits, torchs) <= tiny.ROUNDING


def test_looking_at_the_state_takes_no_step():
    """Where a state is made late, torchtitan takes a step with gradients of zero to see it."""
    model = tiny.llama()
    optimizers, _ = built("8 bits", model)
    flat = optimizers.state_dict()
    assert flat["state.model.embed_tokens.weight.0.step"].item() == 0
    assert flat["param_groups.model.embed_tokens.weight.lr"] == tiny.PEAK_LR / 2  # the first step of the warm-up
