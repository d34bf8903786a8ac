"""fl.convert under fully_shard: torch's sharded state as ours and back, at any number of ranks what one process gives.

Gradients are given, the same whole tensors everywhere, so that every world size has one result to the last bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import world as w
from helpers import same
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from world import World

import functional_lowbit as fl

LR = 1e-2


def fresh() -> nn.Module:
    """129, 65 and 3 rows: uneven at 2 ranks, and the last rank of 4 holds nothing of the last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(129, 64), nn.Linear(64, 65), nn.Linear(65, 3))
    if dist.is_initialized():
        fully_shard(model, mesh=w.mesh())
    return model


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh()
    optimizer = torch.optim.AdamW(model.named_parameters(), LR, weight_decay=0.1)
    for k in range(2):
        for i, p in enumerate(model.parameters()):
            grad = w.random(tuple(p.shape), 100 * k + i)
            p.grad = w.shard(grad, p.device_mesh, *p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
    return model, optimizer


def converted(format: str) -> Any:
    """The state, and what three further ways of saving it give."""
    model, optimizer = trained()
    params = dict(model.named_parameters())
    target = fl.adamw8bit(LR, format=format).init(params)
    state = fl.convert.from_torch(optimizer.state_dict(), target, params)
    wanted = w.of_state(state)
    helpers = get_optimizer_state_dict(model, optimizer)
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for saved in (helpers, whole):
        assert w.of_state(fl.convert.from_torch(saved, target, params)) == wanted
    shell = fl.optim.Optimizer(params.items(), fl.adamw8bit(LR, format=format), backend="eager")
    shell.load_state_dict(fl.convert.from_torch(optimizer, shell))
    assert w.of_state(shell.parts()[0][0]) == wanted
    plain = {name: torch.empty(p.shape) for name, p in params.items()}  # sharded state into whole tensors
    gathered = fl.convert.from_torch(optimizer, fl.adamw8bit(LR, format=format).init(plain), plain)
    assert w.of_state(gathered) == wanted

    back = fl.convert.to_torch(state, optimizer)
    if format == "float32":
        assert all(same(local(back["state"][i]), local(x)) for i, x in optimizer.state_dict()["state"].items())
    other = fresh()
    loaded = torch.optim.AdamW(other.parameters(), LR)
    loaded.load_state_dict(back)
    for i, p in enumerate(other.parameters()):
        for entry, x in loaded.state[p].items():
            assert same(local({"": x}), local({"": back["state"][i][entry]}))
            if entry != "step" and isinstance(p, DTensor):
                assert x.placements == p.placements
                assert x.shape == p.shape
    return wanted


def local(entries: dict[str, Any]) -> dict[str, Any]:
    return {k: x.to_local() if isinstance(x, DTensor) else x for k, x in entries.items()}


@pytest.mark.parametrize("format", ["companded8", "dynamic4", "float32"])
def test_sharded_states(world: World, alone: Callable[..., Any], format: str) -> None:
    plain = alone(converted, format)
    for result in world.run(converted, format):
        assert result == plain


def another_sharding() -> Any:
    """Saved on a mesh by rows; the target is replicated."""
    model, optimizer = trained()
    params = dict(model.named_parameters())
    everywhere = {n: w.shard(torch.empty(p.shape), w.mesh(), Replicate()) for n, p in params.items()}
    state = fl.convert.from_torch(optimizer, fl.adamw8bit(LR).init(everywhere), everywhere)
    assert all(x.placements == (Replicate(),) for x in (state[0].mu["0.weight"].codes, state[0].mu["1.bias"]))
    return w.of_state(state)


def replicated() -> Any:
    model, optimizer = trained()
    return w.of_state(fl.convert.from_torch(optimizer, fl.adamw8bit(LR).init(dict(model.named_parameters()))))


def test_another_sharding(worlds: Callable[[int], World], alone: Callable[..., Any]) -> None:
    plain = alone(replicated)
    for result in worlds(2).run(another_sharding):
        assert result == plain


def own_file() -> str:
    model, _ = trained()
    params = dict(model.named_parameters())
    try:
        fl.convert.to_torch(fl.state_dict(fl.adamw8bit(LR).init(params)), [{"params": list(params)}])
    except ValueError as error:
        return str(error)
    return ""


def test_a_sharded_file_of_ours_is_refused(worlds: Callable[[int], World]) -> None:
    text = (
        "to_torch: leaf '0.mu.0.weight' of saved is sharded; load it with fl.load_state_dict or fl.checkpoint.load, "
        "and convert then"
    )
    assert worlds(2).run(own_file) == [text] * 2
