"""fl.optim.Optimizer and torch's state-dict helpers at one number of ranks: what they change, and what is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import world as w
from optim_on_ranks import MORE, RULES, SAVED_AT, WAYS, bits, fresh, get, train
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from world import World

import functional_lowbit as fl


def backward(k: int, model: nn.Module) -> None:
    """Real gradients by FSDP. All ranks have one batch, since the ignored weight's gradient is not averaged."""
    x = torch.randint(0, 129, (8,), generator=torch.Generator().manual_seed(k))
    model(x).square().mean().backward()


def looked_at() -> Any:
    """Case 8 under fully_shard: looks before the first step, with gradients present, and after each step."""
    model, optimizer = fresh("adamw8bit", 0)
    for k in range(3):
        for moment in (backward, lambda k, model: optimizer.step()):
            for way in WAYS:
                get(model, optimizer, way)
            moment(k, model)
        optimizer.zero_grad()
    params = dict(model.named_parameters())
    own = {n: optimizer.state[p] for n, p in params.items()}
    return w.fingerprint(params), w.fingerprint({n: own[n]["1.0.mu.codes"] for n in ("0.weight", "2.weight")})


def plain() -> Any:
    """The same by `fl.compile` on the tree."""
    model, _ = fresh("adamw8bit", 0)
    params = dict(model.named_parameters())
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1))
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    for k in range(3):
        backward(k, model)
        params, state = step({n: p.grad for n, p in params.items()}, state, params)
        model.zero_grad()
    mu = state[1][0].mu
    return w.fingerprint(params), w.fingerprint({n: mu[n].codes for n in ("0.weight", "2.weight")})


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_looking_takes_no_step(world: World) -> None:
    assert world.run(looked_at) == world.run(plain)


def turned(where: Path) -> dict[str, bool]:
    """Whether an optimizer of the same parameters in another order has, by each way, the state by name."""
    model, optimizer = squares(False)
    train(model, optimizer, range(SAVED_AT))
    wanted = by_name(model, optimizer)
    found = {}
    for way in ("sharded", "flattened", "whole", "from rank 0"):
        saved = copy.deepcopy(get(model, optimizer, way)["optimizer"])
        other, second = squares(True)
        if not WAYS[way].get("full_state_dict"):
            dcp.save(saved, checkpoint_id=where / way)
            saved = get(other, second, way)["optimizer"]
            dcp.load(saved, checkpoint_id=where / way)
        elif way == "from rank 0" and w.rank():
            saved = {}
        set_optimizer_state_dict(other, second, saved, options=StateDictOptions(**WAYS[way]))
        found[way] = by_name(other, second) == wanted
    return found


def squares(turn: bool) -> Any:
    """Parameters of few shapes: nothing but their names tells them apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=w.mesh())
    pairs = list(model.named_parameters())
    return model, fl.optim.AdamW4bit(pairs[::-1] if turn else pairs, backend="eager")


def by_name(model: nn.Module, optimizer: Any) -> Any:
    return {n: w.fingerprint(dict(optimizer.state[p])) for n, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_the_helpers_go_by_name(world: World, place: Path) -> None:
    for found in world.run(turned, place / "optim-turned"):
        assert found == dict.fromkeys(("sharded", "flattened", "whole", "from rank 0"), True)


def norm_layer(seed: int) -> Any:
    """A 1-D leaf in few bits, whose blocks end where a shard ends."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(5001))
    fully_shard(model, mesh=w.mesh())
    return model, RULES["adamw8bit"](model.named_parameters())


def cut(where: Path) -> Any:
    """The bits of a run, and of runs that went on from its checkpoints."""
    found = []
    model, optimizer = norm_layer(0)
    train(model, optimizer, range(SAVED_AT))
    whole = copy.deepcopy(get(model, optimizer, "whole"))  # what is not sharded in it are the live tensors
    for way in ("sharded", "flattened"):
        dcp.save(get(model, optimizer, way), checkpoint_id=where / way)
    train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE))
    for way in ("whole", "sharded", "flattened"):
        other, resumed = norm_layer(1)
        saved = whole if way == "whole" else get(other, resumed, way)
        if way != "whole":
            dcp.load(saved, checkpoint_id=where / way)
        set_model_state_dict(other, saved["model"], options=StateDictOptions(**WAYS[way]))
        set_optimizer_state_dict(other, resumed, saved["optimizer"], options=StateDictOptions(**WAYS[way]))
        train(other, resumed, range(SAVED_AT, SAVED_AT + MORE))
        found.append(bits(other, resumed))
    return bits(model, optimizer), found


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_a_cut_leaf_goes_on_at_the_same_number_of_ranks(world: World, place: Path) -> None:
    for uninterrupted, resumed in world.run(cut, place / "optim-cut"):
        assert resumed == [uninterrupted] * 3


def cut_save(where: Path) -> Any:
    model, optimizer = norm_layer(0)
    train(model, optimizer, range(SAVED_AT))
    dcp.save(get(model, optimizer, "sharded"), checkpoint_id=where)
    return moments(model, optimizer)


def cut_load(where: Path) -> Any:
    model, optimizer = norm_layer(1)
    saved = get(model, optimizer, "sharded")
    dcp.load(saved, checkpoint_id=where)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    return moments(model, optimizer)


def moments(model: nn.Module, optimizer: Any) -> Any:
    """The numbers of both moments of the weight, which stand as quantized tensors in the state."""
    return [optimizer.state[model[0].weight][f"1.0.{k}.values"].dequantize().full_tensor() for k in ("mu", "nu")]


@pytest.mark.parametrize("world", [4], indirect=True, ids="W={}".format)
def test_a_cut_leaf_at_another_number_of_ranks_is_rounded_once(
    world: World, worlds: Callable[[int], World], place: Path
) -> None:
    """Into other blocks: off by half a code of companded8, (1 + y)**2 / 504 of a block's largest number at most."""
    saved = worlds(2).run(cut_save, place / "optim-cut-2")[0]
    for loaded in world.run(cut_load, place / "optim-cut-2"):
        for a, b in zip(saved, loaded, strict=True):
            assert 0 < (a - b).abs().max() <= 0.008 * a.abs().max()


def copied() -> Any:
    """The bits of a run, and of a deep copy of its optimizer, which goes on with parameters of its own."""
    model, optimizer = fresh("adamw8bit", 0)
    train(model, optimizer, range(2))
    second = copy.deepcopy(optimizer)
    params = second.param_groups[0]["params"]
    for mine, theirs in zip(params, model.parameters(), strict=True):
        assert mine is not theirs
        if theirs.requires_grad:
            grad = w.random(tuple(theirs.shape), 7, theirs.dtype)
            mine.grad = w.shard(grad, w.mesh()) if isinstance(mine, DTensor) else grad
            theirs.grad = mine.grad
    second.step()
    optimizer.step()
    states = [{i: w.fingerprint(x) for i, x in o.state_dict()["state"].items()} for o in (optimizer, second)]
    return states, [w.fingerprint(dict(enumerate(ps))) for ps in (model.parameters(), params)]


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_a_deep_copy_goes_on_by_itself(world: World) -> None:
    for states, params in world.run(copied):
        assert states[0] == states[1]
        assert params[0] == params[1]


def refusals(where: Path) -> Any:
    """What is said of a file of another format by dcp and by us, and of a parameter that was sharded later."""
    said: list[Any] = []
    model, optimizer = fresh("adamw8bit", 0)
    train(model, optimizer, range(1))
    saved = get(model, optimizer, "sharded")
    dcp.save(saved, checkpoint_id=where)
    for format in ("dynamic8", "e5m2"):
        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1, format=format))
        other = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
        before = bits(model, other)
        for attempt in (
            lambda other=other: dcp.load(get(model, other, "sharded"), checkpoint_id=where),
            lambda other=other: set_optimizer_state_dict(model, other, saved["optimizer"]),
        ):
            try:
                attempt()
            except (ValueError, CheckpointException) as error:  # the second is no Exception
                said.append(str(error))
        said.append(bits(model, other) == before)
    moved = model[2].weight
    torch.utils.swap_tensors(moved, nn.Parameter(moved.detach().redistribute(w.mesh(), [Replicate()])))
    try:
        optimizer.step()
    except ValueError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_what_is_refused(world: World, place: Path) -> None:
    for said in world.run(refusals, place / "optim-refused"):
        for i, format in enumerate(("dynamic8", "e5m2")):
            by_dcp, by_us, untouched = said[3 * i : 3 * i + 3]
            assert "Size mismatch" in by_dcp
            assert by_us.startswith(
                "Optimizer.load_state_dict: the state of '0.weight': leaf '1.0.mu' was saved with format 'companded8', "
                f"but the state has {format!r}"
            )
            assert untouched
        assert said[6:] == [
            "Optimizer.step: parameter '2.weight' was a DTensor with (Shard(dim=0),) of shape (65, 64) on cpu when the "
            "optimizer was made, and is a DTensor with (Replicate(),) of shape (65, 64) on cpu now; make the optimizer "
            "after the model is moved and sharded"
        ]
