"""A step in place that an exception ends in the middle: what is left is marked, and refused."""

from typing import Any

import pytest
import torch
from helpers import clone, random_like, refuses, run_step, same

import functional_lowbit as fl

MESSAGE = (
    "{}: an earlier step in place was interrupted ({}), so that this state and its parameters are partly of the old "
    "step and partly of the new one; load both from a checkpoint, the state into one that init(params) makes, or with "
    "Optimizer.load_state_dict"
)


def _params() -> dict[str, Any]:
    return random_like({"w": torch.empty(64, 128), "b": torch.empty(5)}, 0)


def _fails_at(step: int, error: BaseException) -> fl.GradientTransformation:
    """A user's pair that is interrupted."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if int(state) == step:
            raise error
        return updates, state + 1

    return fl.GradientTransformation(lambda params: torch.zeros((), dtype=torch.int64), update)


def _interrupted(error: BaseException, donate: bool = True) -> Any:
    tx = fl.chain(fl.low_bit(fl.scale_by_adam()), _fails_at(1, error), fl.scale(-0.1))
    params, step = _params(), fl.compile(tx, donate=donate, backend="eager")
    params, state = step(random_like(params, 1), tx.init(params), params)
    given = clone((params, state))
    with pytest.raises(type(error)):
        step(random_like(params, 2), state, params)
    return tx, step, params, state, given


@pytest.mark.parametrize("error", [RuntimeError("a rank is gone"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_half_updated_state_is_refused_everywhere(error):
    tx, step, params, state, given = _interrupted(error)
    assert not same(state, given[1])  # adam's moments have been written
    name = type(error).__name__
    grads = random_like(params, 3)
    for _ in range(2):
        refuses(RuntimeError, MESSAGE.format("compile(tx)", name), lambda: step(grads, state, params))
    refuses(RuntimeError, MESSAGE.format("scale_by_adam.update", name), lambda: tx.update(grads, state, params))
    refuses(RuntimeError, MESSAGE.format("state_dict", name), lambda: fl.state_dict(state))


def test_a_checkpoint_helps():
    tx, _, params, _, (old_params, old_state) = _interrupted(RuntimeError("a rank is gone"))
    saved = clone(fl.state_dict(old_state))
    grads = [random_like(params, 3)]
    working = fl.chain(fl.low_bit(fl.scale_by_adam()), _fails_at(9, RuntimeError()), fl.scale(-0.1))
    wanted = run_step(fl.compile(working, donate=False, backend="eager"), old_params, grads, old_state)
    loaded = fl.load_state_dict(tx.init(params), saved)
    assert same(loaded, old_state)
    assert same(run_step(fl.compile(working, backend="eager"), clone(old_params), grads, loaded), wanted)


def test_copies_are_not_marked():
    _, step, params, state, given = _interrupted(RuntimeError("a rank is gone"), donate=False)
    assert same((params, state), given)
    with pytest.raises(RuntimeError, match="a rank is gone"):  # and not that the state is unusable
        step(random_like(params, 3), state, params)
    fl.state_dict(state)


def test_what_fails_before_anything_is_written_leaves_the_state_usable():
    def prepare(updates: Any, s: Any, params: Any, h: Any) -> Any:
        if float(updates["b"][0]) == 7.0:
            raise RuntimeError("no norm today")
        return {"factor": torch.ones(())}

    tx = fl.chain(fl.leafwise(lambda g, s, p, c: (g * c.factor, s), prepare=prepare, name="rule"), fl.adamw8bit(0.1))
    params, step = _params(), fl.compile(tx, backend="eager")
    state = tx.init(params)
    before = clone((params, state))
    grads = random_like(params, 1)
    bad = {**grads, "b": torch.full((5,), 7.0)}
    with pytest.raises(RuntimeError, match="no norm today"):
        step(bad, state, params)
    with pytest.raises(ValueError, match="has shape"):
        step({**grads, "b": torch.ones(3)}, state, params)
    assert same((params, state), before)
    step(grads, state, params)
    fl.state_dict(state)


def test_a_kernel_that_cannot_be_made_is_found_before_another_one_runs():
    """Two kernels, of which the second has no native form: nothing is written when that shows."""
    tx = fl.leafwise(lambda g, s, p, c: (torch.where(g > 0, g.exp(), g), s), name="rule")
    params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16)}
    before = clone(params)
    step = fl.compile(tx, backend="native")
    with pytest.raises(NotImplementedError):
        step({"a": torch.ones(3), "b": torch.ones(3)}, tx.init(params), params)
    assert same(params, before)


def test_an_optimizer_goes_on_once_it_has_loaded_a_checkpoint():
    def made(fails_at: int) -> Any:
        model = torch.nn.Linear(64, 128)
        with torch.no_grad():
            model.weight.copy_(_params()["w"].T)
            model.bias.zero_()
        tx = fl.chain(fl.low_bit(fl.scale_by_adam()), _fails_at(fails_at, RuntimeError("gone")), fl.scale(-0.1))
        return model, fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")

    def take(model: Any, optimizer: Any, seed: int) -> None:
        for i, p in enumerate(model.parameters()):
            p.grad = random_like(p.detach(), seed + i)
        optimizer.step()

    model, optimizer = made(1)
    take(model, optimizer, 10)
    weights, saved = clone(model.state_dict()), clone(optimizer.state_dict()["state"])
    with pytest.raises(RuntimeError, match="gone"):
        take(model, optimizer, 20)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"an earlier step in place was interrupted \(RuntimeError\)"):
            call()
    other, wanted = made(9)
    for m, o in ((model, optimizer), (other, wanted)):
        m.load_state_dict(weights)
        o.load_state_dict({"state": clone(saved), "param_groups": wanted.state_dict()["param_groups"]})
    assert same(optimizer.state_dict()["state"], wanted.state_dict()["state"])
