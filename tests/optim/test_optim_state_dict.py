"""fl.optim.Optimizer under fully_shard, saved and loaded by torch's own helpers at any number of ranks.

Gradients are given, the same whole tensors everywhere, so that every world size has one result to the last bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world as w
from optim_on_ranks import MORE, RULES, SAVED_AT, WAYS, bits, fresh, get, through_dcp, train
from tiers import slow, slow_unless
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from world import World


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


@slow
@pytest.mark.parametrize("rule", RULES)
def test_one_result_at_every_number_of_ranks(checkpoints: Callable[[str, int], Any], rule: str) -> None:
    alone = checkpoints(rule, 0)[1][0]
    for ranks in (1, 2, 4):
        assert checkpoints(rule, ranks)[1] == [alone] * ranks


OTHER = {1: (4,), 2: (0, 1), 4: (2,)}  # where a world's checkpoints come from


@slow_unless(lambda world, rule: (world, rule) == (2, "adamw8bit"))
@pytest.mark.parametrize("world", OTHER, indirect=True, ids="W={}".format)
@pytest.mark.parametrize("rule", RULES)
def test_goes_on_at_another_number_of_ranks(world: World, checkpoints: Callable[[str, int], Any], rule: str) -> None:
    for ranks in OTHER[world.size]:
        where, uninterrupted = checkpoints(rule, ranks)
        for found in world.run(load, rule, where):
            assert found == dict.fromkeys(WAYS, uninterrupted[0])


@slow
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
