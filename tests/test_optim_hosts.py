"""What torch asks of an optimizer: closures, hooks, gradient scaling, rounding, and a profiler's names."""

import torch
from helpers import same
from optim_models import gradients, model_of, named, numbers, state_of, train
from torch import Tensor

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


def test_closure_hooks_and_no_gradients():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw(1e-4), backend="eager")
    before = numbers(model), state_of(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert optimizer.step() is None  # no gradients: nothing happens, as in torch
    assert same((numbers(model), state_of(optimizer)), before)

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0]
    assert calls == ["before", "after", *["before", "closure", "after"] * 2]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_hooks_of_state_dicts_see_what_is_saved():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.adamw8bit(0.1), backend="eager")
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved["state"][0].update(mine=1) or saved)
    assert optimizer.state_dict()["state"][0].pop("mine") == 1
    assert "mine" not in optimizer.state[model[0].weight]
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["state"][0].pop("mine") and None)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[:-1] == [set(optimizer.state[model[0].weight])] * 3
    assert seen[-1] == "loaded"


def test_grad_scaler():
    model = model_of()
    optimizer = Optimizer(model.parameters(), fl.sgd(0.5), backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = numbers(model)
    scaler.scale(model[2].bias.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(model[2].bias.detach(), before["2.bias"] - 0.5)
    scaler.scale(model[2].bias.sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert same(model[2].bias.detach(), before["2.bias"] - 0.5)


def test_rounding_goes_to_compile():
    model, plain = model_of(0, torch.bfloat16), model_of(0, torch.bfloat16)
    tx = fl.sgd(1e-3, momentum=0.9)
    optimizer = Optimizer(model.named_parameters(), tx, rounding="stochastic", key=7, backend="eager")
    train(model, optimizer, range(2))
    params = named(plain)
    state, step = tx.init(params), fl.compile(tx, rounding="stochastic", key=7, backend="eager")
    for grads in gradients(plain, range(2)):
        params, state = step(grads, state, params)
    assert same(numbers(model), numbers(plain))
