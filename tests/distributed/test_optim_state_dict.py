"""fl.optim.Optimizer under fully_shard, saved and loaded by torch's own helpers at any number of ranks.

Gradients are given, the same whole tensors everywhere, so that every world size has one result to the last bit.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world as w
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from world import World

import functional_lowbit as fl

SAVED_AT, MORE = 3, 2  # steps before and after the checkpoint

RULES: dict[str, Callable[[Any], Any]] = {
    "adamw8bit": lambda params: fl.optim.Optimizer(
        params, fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-2, weight_decay=0.1)), backend="eager"
    ),
    "AdamW4bit": lambda params: fl.optim.AdamW4bit(own_formats(list(params)), lr=1e-2, backend="eager"),
}


def own_formats(pairs: list[Any]) -> list[Any]:
    """A group in the class's own format, and one in another."""
    return [
        {"params": [(n, p) for n, p in pairs if n != "2.weight"], "betas": (0.9, 0.99)},
        {"params": [(n, p) for n, p in pairs if n == "2.weight"], "format": "dynamic4", "weight_decay": 0.0},
    ]


WAYS: dict[str, dict[str, bool]] = {  # options of the helpers
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "on the CPU": {"cpu_offload": True},
    "whole": {"full_state_dict": True},
    "whole, on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "whole, flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def fresh(rule: str, seed: int, shape: tuple[int, ...] = ()) -> tuple[nn.Module, Any]:
    """129, 65 and 3 rows: uneven at 2 ranks, and the last rank of 4 holds nothing of the last layer.

    One weight is no DTensor, one parameter is frozen. `shape` is that of the mesh, in two dimensions for HSDP.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(129, 64), nn.LayerNorm(64), nn.Linear(64, 65), nn.Linear(65, 3))
    model.to(torch.bfloat16 if rule == "AdamW4bit" else torch.float32)
    model[1].bias.requires_grad_(False)
    if dist.is_initialized():
        fully_shard(model[0], mesh=w.mesh(*shape))
        fully_shard(model[2], mesh=w.mesh(*shape))
        fully_shard(model, mesh=w.mesh(*shape), ignored_params={model[1].weight})
    return model, RULES[rule](model.named_parameters())


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for k in steps:
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
            grad = w.random(tuple(p.shape), 100 * k + i, p.dtype)
            p.grad = w.shard(grad, p.device_mesh, *p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
        optimizer.zero_grad()


def bits(model: nn.Module, optimizer: Any) -> Any:
    """Of parameters and state. The schema of one mesh is that of another."""
    state = optimizer.state_dict()["state"]
    return w.fingerprint(dict(model.named_parameters())), {i: w.fingerprint(x) for i, x in state.items()}


def get(model: nn.Module, optimizer: Any, way: str) -> dict[str, Any]:
    options = StateDictOptions(**WAYS[way])
    whole = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
    return {
        "model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def through_dcp(action: Callable[..., Any], saved: Any, where: Path) -> None:
    with warnings.catch_warnings():
        # What torch 2.13 says to a process without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        action(saved, checkpoint_id=where, no_dist=not dist.is_initialized())


def save(rule: str, where: Path) -> Any:
    model, optimizer = fresh(rule, 0)
    get(model, optimizer, "sharded")  # case 8: no hidden step
    train(model, optimizer, range(SAVED_AT))
    before = bits(model, optimizer)
    for way in WAYS:
        saved = get(model, optimizer, way)
        if not WAYS[way].get("full_state_dict"):
            through_dcp(dcp.save, saved, where / way)
        elif not dist.is_initialized() or w.rank() == 0:
            torch.save(saved, where / f"{way}.pt")
    assert bits(model, optimizer) == before  # saving changes nothing
    train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE))
    return bits(model, optimizer)


def load(rule: str, where: Path, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """For each way, the bits of a run that went on from it. Fresh numbers first, which are others."""
    found = {}
    for way, names in WAYS.items():
        if names.get("broadcast_from_rank0") and not dist.is_initialized():
            continue
        options = StateDictOptions(**names)
        model, optimizer = fresh(rule, 77, shape)
        train(model, optimizer, range(50, 51))
        if not names.get("full_state_dict"):
            saved = get(model, optimizer, way)
            through_dcp(dcp.load, saved, where / way)
        elif not names.get("broadcast_from_rank0") or w.rank() == 0:
            saved = torch.load(where / f"{way}.pt", weights_only=True)
        else:
            saved = {"model": {}, "optimizer": {}}
        # torch 2.13 flattens what it compares a flattened whole with once too often, and fails on its own optimizers
        # too (KeyError: 'param_groups.0.params.0'). It knows a flattened dict without being told.
        flatten = options.flatten_optimizer_state_dict and not options.full_state_dict
        options = StateDictOptions(**{**names, "flatten_optimizer_state_dict": flatten})
        model_options = StateDictOptions(
            full_state_dict=options.full_state_dict, broadcast_from_rank0=options.broadcast_from_rank0
        )
        set_model_state_dict(model, saved["model"], options=model_options)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE))
        found[way] = bits(model, optimizer)
    return found


@pytest.fixture(scope="session")
def checkpoints(place: Path) -> Callable[[str, int], Any]:
    """`checkpoints(rule, ranks)`: where a run was saved, and the bits that it had when it went on. 0: without ranks."""
    known: dict[Any, Any] = {}

    def make(rule: str, ranks: int) -> Any:
        if (rule, ranks) not in known:
            world = World(ranks, place)
            for each in RULES:  # one start for all
                where = place / f"optim-{each}-{ranks}"
                where.mkdir()
                known[each, ranks] = where, world.run(save, each, where)
            world.close()
        return known[rule, ranks]

    return make


@pytest.mark.parametrize("rule", RULES)
def test_one_result_at_every_number_of_ranks(checkpoints: Callable[[str, int], Any], rule: str) -> None:
    alone = checkpoints(rule, 0)[1][0]
    for ranks in (1, 2, 4):
        assert checkpoints(rule, ranks)[1] == [alone] * ranks


OTHER = {1: (4,), 2: (0, 1), 4: (2,)}  # where a world's checkpoints come from


@pytest.mark.parametrize("world", OTHER, indirect=True, ids="W={}".format)
@pytest.mark.parametrize("rule", RULES)
def test_goes_on_at_another_number_of_ranks(world: World, checkpoints: Callable[[str, int], Any], rule: str) -> None:
    for ranks in OTHER[world.size]:
        where, uninterrupted = checkpoints(rule, ranks)
        for found in world.run(load, rule, where):
            assert found == dict.fromkeys(WAYS, uninterrupted[0])


@pytest.mark.parametrize("world", [4], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_goes_on_in_hsdp(world: World, checkpoints: Callable[[str, int], Any], shape: tuple[int, int]) -> None:
    where, uninterrupted = checkpoints("adamw8bit", 2)
    for found in world.run(load, "adamw8bit", where, shape):
        assert found == dict.fromkeys(WAYS, uninterrupted[0])


@pytest.mark.parametrize("rule", RULES)
def test_goes_on_without_ranks(alone: Callable[..., Any], checkpoints: Callable[[str, int], Any], rule: str) -> None:
    where, uninterrupted = checkpoints(rule, 2)
    ways = [way for way in WAYS if way != "from rank 0"]  # which needs ranks
    assert alone(load, rule, where) == dict.fromkeys(ways, uninterrupted[0])


# At one number of ranks.


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
def test_a_cut_leaf_at_another_number_of_ranks_is_rounded_once(world: World, place: Path) -> None:
    """Into other blocks: off by half a code of companded8, (1 + y)**2 / 504 of a block's largest number at most."""
    source = World(2, place)
    saved = source.run(cut_save, place / "optim-cut-2")[0]
    source.close()
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
