"""What a training loop asks of an optimizer: closures, hooks, gradient scaling, copies, a profiler's names."""

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import run_step, same
from optim_models import function_of, gradients, model_of, named, numbers, state_of, train
from torch import Tensor, nn

import functional_lowbit as fl

Optimizer = fl.optim.Optimizer


def ready(params: Any, **options: Any) -> Any:
    return fl.optim.AdamW8bit(params, **{"lr": 1e-4, "backend": "eager", **options})


MAKE = {"ready": ready, "tx": lambda params: Optimizer(params, fl.adamw(1e-4), backend="eager")}
EACH = pytest.mark.parametrize("form", MAKE)


def loss_of(model: Any) -> Tensor:
    return model(torch.ones(2, 64)).square().sum()


@EACH
def test_closure_and_hooks_of_the_step(form):
    model = model_of()
    optimizer = MAKE[form](model.parameters())
    before = numbers(model), state_of(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert optimizer.step() is None  # no gradients: nothing happens, as in torch
    assert same((numbers(model), state_of(optimizer)), before)

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0]
    assert calls == ["before", "after", *["before", "closure", "after"] * 2]


@EACH
def test_zero_grad(form):
    """To None, after which nothing is stepped; or to zeros, which are gradients."""
    model = model_of()
    optimizer = MAKE[form](model.parameters())
    loss_of(model).backward()
    optimizer.step()
    before, p = numbers(model), model[0].weight
    held = p.grad
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is held
    assert not held.any()
    optimizer.step()
    assert not same(numbers(model), before)  # momentum and decay
    assert optimizer.state[p]["0.step"] == 2
    optimizer.zero_grad()
    assert all(q.grad is None for q in model.parameters())
    optimizer.step()
    assert optimizer.state[p]["0.step"] == 2


@EACH
def test_hooks_of_state_dicts_see_what_is_saved(form):
    model = model_of()
    optimizer = MAKE[form](model.parameters())
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("to be saved"))
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved["state"][0].update(mine=1) or saved)
    assert optimizer.state_dict()["state"][0].pop("mine") == 1
    assert "mine" not in optimizer.state[model[0].weight]
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["state"][0].pop("mine") and None)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    own = set(optimizer.state[model[0].weight])
    assert seen == ["to be saved", own, "to be saved", own, own, "loaded"]


def test_names_of_the_profiler():
    """torch's, with the class that was made. One event for a step, also where a base class was used before."""
    p = nn.Parameter(torch.zeros(2))
    for optimizer in (Optimizer([p], fl.sgd(0.1), backend="eager"), ready([p]), fl.optim.SGD8bit([p], backend="eager")):
        name = type(optimizer).__name__
        p.grad = torch.ones(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
            optimizer.zero_grad()
        counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("Optimizer.")}
        assert counts == {f"Optimizer.step#{name}.step": 1, f"Optimizer.zero_grad#{name}.zero_grad": 1}


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
FORMS = {
    "tx": lambda params: Optimizer(params, fl.adamw8bit(0.1), backend="eager"),
    "function": lambda params: Optimizer(params, function_of, {"lr": 0.1}, backend="eager"),
    "ready": lambda params: ready(params, format="dynamic4"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_goes_on_by_itself(way, form):
    model = model_of()
    optimizer = FORMS[form](model.named_parameters())
    train(model, optimizer, range(2))
    other, second = COPIES[way]((model, optimizer))
    if form != "tx":
        for o in (optimizer, second):
            o.param_groups[0]["lr"] = 0.2
    train(other, second, range(2, 4))
    assert not same(numbers(other), numbers(model))
    train(model, optimizer, range(2, 4))
    assert same(numbers(other), numbers(model))
    assert same(state_of(second), state_of(optimizer))
    second.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))]})
    assert len(optimizer.param_groups) == 1


def test_around_a_compiled_model():
    """The parameters are the model's own; gradients come through the graph."""
    model, plain = model_of(), model_of()
    runs = []
    for module, run in ((model, torch.compile(model, backend="eager")), (plain, plain)):
        optimizer = ready(run.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(run).backward()
            optimizer.step()
        runs.append(numbers(module))
    assert same(*runs)
    assert not same(runs[0], numbers(model_of()))


# Gradient scaling. The class leaves it to GradScaler, which then waits for the device before each step.


@EACH
def test_grad_scaler_skips_a_step(form):
    """The step and the state, moments and counter; the scale goes down. The next step is as if nothing had been."""
    model, plain = model_of(), model_of()
    optimizer, other = MAKE[form](model.parameters()), MAKE[form](plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for wrong in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (float("inf") if wrong else 1.0)).backward()
        before = numbers(model), state_of(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert same((numbers(model), state_of(optimizer)), before) == wrong
        if not wrong:
            other.zero_grad()
            loss_of(plain).backward()
            other.step()
    assert scaler.get_scale() == 4.0
    # A power of two: unscaling is exact.
    assert same((numbers(model), state_of(optimizer)), (numbers(plain), state_of(other)))


@EACH
def test_gradients_are_unscaled_then_clipped(form):
    model, plain = model_of(), model_of()
    optimizer, other = MAKE[form](model.parameters()), MAKE[form](plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    loss_of(plain).backward()
    assert norm == nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
    other.step()
    assert same(numbers(model), numbers(plain))


def test_rounding_goes_to_compile():
    model, plain = model_of(0, torch.bfloat16), named(model_of(0, torch.bfloat16))
    tx = fl.sgd(1e-3, momentum=0.9)
    optimizer = Optimizer(model.named_parameters(), tx, rounding="stochastic", key=7, backend="eager")
    train(model, optimizer, range(2))
    step = fl.compile(tx, rounding="stochastic", key=7, backend="eager")
    params, _ = run_step(step, plain, gradients(model, range(2)), tx.init(plain))
    assert same(numbers(model), {n: p.detach() for n, p in params.items()})
