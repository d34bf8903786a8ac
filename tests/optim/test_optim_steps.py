"""fl.optim's ready classes on ranks: gradient scaling, and models that are sharded after the optimizer was made."""

import warnings
from typing import Any

import pytest
import torch
import world as w
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from world import World

import functional_lowbit as fl

TWO = pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 3))


def sharded(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0], mesh=w.mesh())
    fully_shard(model, mesh=w.mesh())
    return model


def groups_of(model: nn.Module) -> list[Any]:
    return [
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim > 1], "format": "dynamic4"},
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def ready(model: nn.Module) -> Any:
    return fl.optim.AdamW8bit(groups_of(model), lr=0.01, backend="eager")


def give_gradients(model: nn.Module, seed: int) -> None:
    for i, p in enumerate(model.parameters()):
        grad = w.random(tuple(p.shape), 10 * seed + i, p.dtype)
        p.grad = w.shard(grad, p.device_mesh, *p.placements) if isinstance(p, DTensor) else grad


def bits(model: nn.Module, optimizer: Any) -> Any:
    own = {n: {k: v for k, v in optimizer.state[p].items() if k != "schema"} for n, p in model.named_parameters()}
    return w.fingerprint(dict(model.named_parameters())), {n: w.fingerprint(x) for n, x in own.items()}


def scaled(wrong_rank: int) -> Any:
    """Bits before and after a step whose gradient has an Inf on one rank, scales, and bits after one more step."""
    model = sharded(model_of())
    optimizer, scaler = ready(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    found, scales = [], []
    for k in range(3):
        scaler.scale(torch.ones(()))  # which makes the scale, as for a loss
        give_gradients(model, k)
        for p in model.parameters():
            p.grad = p.grad * scaler.get_scale()
        if k == 1 and w.rank() == wrong_rank:
            model[0].weight.grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        found.append(bits(model, optimizer))
        scales.append(scaler.get_scale())
    return found, scales


def unscaled() -> Any:
    model = sharded(model_of())
    optimizer = ready(model)
    found = []
    for k in (0, 2):
        give_gradients(model, k)
        optimizer.step()
        found.append(bits(model, optimizer))
    return found


@TWO
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_an_inf_on_one_rank_skips_the_step_on_all(world: World, wrong_rank: int) -> None:
    """GradScaler asks all ranks of the mesh of a DTensor. The scale is a power of two, so unscaling is exact."""
    for (found, scales), expected in zip(world.run(scaled, wrong_rank), world.run(unscaled), strict=True):
        assert scales == [8.0, 4.0, 4.0]
        assert found == [expected[0], expected[0], expected[1]]


def sharded_too_late() -> str:
    model = model_of()
    optimizer = ready(model)
    sharded(model)
    model(torch.ones(2, 64)).square().sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


LOST = (
    "Optimizer.step: parameter '0.weight' has no gradient and is in no module, but a module has another one of its "
    "shape (65, 64), with a gradient; the model got new parameters after the optimizer was made (by fully_shard, "
    "parallelize_module, load_state_dict(assign=True)), so make the optimizer afterwards"
)


@TWO
def test_a_model_that_is_sharded_afterwards_is_noticed(world: World) -> None:
    assert world.run(sharded_too_late) == [LOST, LOST]


def switched(late: bool) -> Any:
    """The sharded parameters put into the groups before the first step, as Accelerate does; or made with them."""
    model = model_of()
    optimizer = ready(model) if late else None
    sharded(model)
    if optimizer is not None:
        new = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [new[name] for name in group["param_names"]]
    else:
        optimizer = ready(model)
    for k in range(2):
        give_gradients(model, k)
        optimizer.step()
    return bits(model, optimizer)


@TWO
def test_sharded_parameters_put_into_the_groups(world: World) -> None:
    assert world.run(switched, True) == world.run(switched, False)


def spread(zero: bool) -> Any:
    """The state of a DDP model spread over the ranks by torch's ZeroRedundancyOptimizer, or whole on each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit", DeprecationWarning)  # torch 2.13, of its own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = model_of()
    options: dict[str, Any] = {"lr": 0.01, "format": "dynamic4", "backend": "eager"}
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer: Any = (
        ZeroRedundancyOptimizer(wrapped.parameters(), fl.optim.AdamW8bit, **options)
        if zero
        else fl.optim.AdamW8bit(model.parameters(), **options)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for k in range(3):
        optimizer.zero_grad()
        wrapped(w.random((2, 64), 10 * k + w.rank(), torch.float32)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return w.fingerprint(dict(model.named_parameters()))


@TWO
def test_zero_redundancy(world: World) -> None:
    found = world.run(spread, True)
    assert found == world.run(spread, False)
    assert found[0] == found[1]
