"""fl.optim.Optimizer: complete from the start, the plain run's bits, and torch's own helpers leave it whole."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from helpers import Averaged, averaged, clone, delayed, random_like, refuses, run_pure, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer
NUMBERS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def adamw8bit(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> fl.GradientTransformation:
    """torch's names, for the form with defaults."""
    return fl.adamw8bit(lr, *betas, eps, weight_decay=weight_decay)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Stored leaves and small ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 64), nn.Linear(64, 3)).to(dtype)


def named(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


def give_grads(model: nn.Module, seed: int) -> dict[str, Any]:
    """Normal gradients, for parameters that need one."""
    grads = random_like({n: p.detach() for n, p in named(model).items() if p.requires_grad}, seed)
    for n, p in named(model).items():
        p.grad = grads.get(n)
    return {n: grads.get(n) for n in named(model)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        give_grads(model, seed)
        optimizer.step()


def saved_of(optimizer: Any) -> Any:
    return clone(optimizer.state_dict())


# Case 8.


def case_8(look: Any) -> tuple[Any, Any]:
    """Three steps of Linear(5, 5) beside a frozen and a never-used parameter; `look` at each moment."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "frozen": nn.Linear(5, 5), "unused": nn.Linear(5, 5)})
    model["frozen"].requires_grad_(False)
    optimizer = Optimizer(model.named_parameters(), fl.adamw(0.1), backend="eager")
    look(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model["used"](model["frozen"](torch.ones(2, 5))).square().sum().backward()
        look(model, optimizer)
        optimizer.step()
        look(model, optimizer)
    return model, optimizer


LOOKS = {
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "get_optimizer_state_dict": get_optimizer_state_dict,
    "flattened": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
    "on the CPU": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(cpu_offload=True)
    ),
    "whole": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    ),
}


def plain_case_8() -> tuple[Any, Any]:
    """The same by `fl.compile` on the tree."""
    model, _ = case_8_start()
    tx = fl.adamw(0.1)
    params = named(model)
    state = tx.init(params)
    step = fl.compile(tx, backend="eager")
    for _ in range(3):
        loss = model["used"](model["frozen"](torch.ones(2, 5))).square().sum()
        used = ["used.weight", "used.bias"]
        grads = dict(zip(used, torch.autograd.grad(loss, [params[n] for n in used]), strict=True))
        params, state = step({n: grads.get(n) for n in params}, state, params)
    return params, state


def case_8_start() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "frozen": nn.Linear(5, 5), "unused": nn.Linear(5, 5)})
    model["frozen"].requires_grad_(False)
    return model, None


@pytest.mark.parametrize("name", LOOKS)
def test_case_8_looking_changes_nothing(name):
    model, optimizer = case_8(LOOKS[name])
    params, state = plain_case_8()
    assert same(clone(named(model)), clone(params))
    for p_name, p in named(model).items():
        own = optimizer.state[p]
        assert torch.equal(own["0.mu"], state[0].mu[p_name])
        assert torch.equal(own["0.nu"], state[0].nu[p_name])
        assert own["0.step"].item() == 3


def test_case_8_files_are_complete_before_the_first_step():
    model, _ = case_8_start()
    optimizer = Optimizer(model.named_parameters(), fl.adamw(0.1))
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == set(named(model))
    for entries in saved["state"].values():
        assert set(entries) == {"0.mu", "0.nu", "0.step", "1.step", "2.step", "schema"} - _stateless(entries)
        assert entries["0.step"].item() == 0


def _stateless(entries: Any) -> set[str]:
    """Transformations without a state have no entry; which they are is not this test's matter."""
    return {name for name in ("1.step", "2.step") if name not in entries}
