"""fl.convert into optimizers and out of them: groups, names, what was put in before the first step."""

from typing import Any

import pytest
import torch
from convert_models import LR, SHAPES, grads_of, make_model, train, tree_of
from helpers import clone, run_pure, same
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import functional_lowbit as fl


def _shell(groups: Any, format: str = "companded8") -> fl.optim.Optimizer:
    def adamw(lr: Any, betas: Any, eps: Any, weight_decay: Any, clip: Any) -> fl.GradientTransformation:
        return fl.chain(fl.clip(clip), fl.adamw8bit(lr, *betas, eps, weight_decay=weight_decay, format=format))

    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 1e-2, "clip": 1.0}
    return fl.optim.Optimizer(groups, adamw, defaults, backend="eager")


def test_into_an_optimizer():
    """Hyperparameters of the groups come along; nothing is written before `load_state_dict`."""
    model = make_model()
    first, second = list(model.named_parameters())[::2], list(model.named_parameters())[1::2]
    theirs = torch.optim.AdamW(
        [{"params": first}, {"params": second, "weight_decay": 0.0, "lr": torch.tensor(0.5), "betas": [0.5, 0.9]}], LR
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)
    train(model, theirs, range(2))
    schedule.step()
    ours = _shell([{"params": second}, {"params": first}], "float32")  # another order
    before = clone(ours.state_dict())
    loaded = fl.convert.from_torch(theirs, ours)
    assert same(ours.state_dict(), before)
    ours.load_state_dict(loaded)
    for p, state in theirs.state.items():
        assert torch.equal(ours.state[p]["1.0.mu"], state["exp_avg"])
        assert torch.equal(ours.state[p]["1.0.nu"], state["exp_avg_sq"])
        assert ours.state[p]["1.0.step"] == 2
    hypers = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in ours.param_groups]
    assert hypers == [
        {"lr": 0.25, "betas": (0.5, 0.9), "eps": 1e-8, "weight_decay": 0.0, "clip": 1.0, "initial_lr": 0.5},
        {"lr": LR / 2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "clip": 1.0, "initial_lr": LR},
    ]
    back = fl.convert.to_torch(ours, theirs)
    assert same(back["state"], theirs.state_dict()["state"])
    alone = torch.optim.AdamW([{"params": second}, {"params": first}], 1.0)
    alone.load_state_dict(fl.convert.to_torch(ours))  # with hyperparameters of its own
    assert [group["lr"] for group in alone.param_groups] == [0.25, LR / 2]
    train(model, alone, range(2, 3))


def test_an_optimizer_goes_on_as_torch_would():
    """8-bit state from float32: each element's step within the format's error of Adam's, some percent of one lr."""
    model = make_model()
    theirs = torch.optim.AdamW(model.named_parameters(), LR, weight_decay=0.1)
    train(model, theirs, range(10))
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    ours = fl.optim.Optimizer(twin.named_parameters(), fl.adamw8bit(LR, weight_decay=0.1), backend="eager")
    ours.load_state_dict(fl.convert.from_torch(theirs.state_dict(), ours))
    train(model, theirs, range(10, 20))
    train(twin, ours, range(10, 20))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        apart = (p - q).detach().abs().max() / LR
        print(f"{tuple(p.shape)}: {float(apart):.3f} lr after ten steps")
        assert apart <= (0.5 if p.numel() >= 4096 else 1e-4)  # ten steps, each within 5% of one


def test_a_shell_of_numbers():
    """Without names on either side: by number."""
    model = make_model()
    theirs = torch.optim.AdamW(model.parameters(), LR)
    train(model, theirs, range(1))
    ours = fl.optim.Optimizer(list(model.parameters()), fl.adamw(LR), backend="eager")
    ours.load_state_dict(fl.convert.from_torch(theirs.state_dict(), ours))
    assert all(torch.equal(ours.state[p]["0.mu"], s["exp_avg"]) for p, s in theirs.state.items())


def test_torchs_helpers_load_what_goes_back():
    """Names as keys, if the groups have names; set_optimizer_state_dict goes by them."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    train(model, optimizer, range(2))
    wanted = get_optimizer_state_dict(model, optimizer)
    state = fl.convert.from_torch(wanted, fl.adamw(LR).init(tree_of(model)))
    back = fl.convert.to_torch(state, wanted["param_groups"])
    assert same(back, wanted)
    fresh = torch.optim.AdamW(model.parameters(), 1.0)
    set_optimizer_state_dict(model, fresh, back)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_bfloat16_parameters():
    """torch keeps moments in bfloat16 there; ours are float32. What goes back is float32, which torch rounds."""
    model = make_model(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    train(model, optimizer, range(2))
    state = fl.convert.from_torch(optimizer, fl.adamw(LR).init(tree_of(model)))
    assert all(x.dtype == torch.float32 for x in state[0].mu.values())
    back = fl.convert.to_torch(state, optimizer)
    assert back["state"][0]["exp_avg"].dtype == torch.float32
    fresh = torch.optim.AdamW(make_model(torch.bfloat16).parameters(), LR)
    fresh.load_state_dict(back)
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("with_names", [True, False])
def test_without_a_model(with_names: bool):
    """From file to file: what parameters look like is told by their state."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters() if with_names else model.parameters(), LR)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    params = fl.convert.params_of(saved)
    assert {n: tuple(p.shape) for n, p in params.items()} == (
        SHAPES if with_names else {str(i): s for i, s in enumerate(SHAPES.values())}
    )
    assert all(p.is_meta for p in params.values())
    state = fl.convert.from_saved(saved, fl.adamw8bit(LR).init(params), params)
    real = dict(zip(params, tree_of(model).values(), strict=True))
    assert same(state, fl.convert.from_torch(saved, fl.adamw8bit(LR).init(real), real))
    ours = fl.state_dict(state)
    assert fl.convert.library_of(ours) == "functional_lowbit"
    assert {n: p.shape for n, p in fl.convert.params_of(ours).items()} == {n: p.shape for n, p in params.items()}
    back = fl.convert.to_torch(ours, saved["param_groups"])
    assert back["state"].keys() == saved["state"].keys()
    assert torch.equal(back["state"][1]["exp_avg"], saved["state"][1]["exp_avg"])
    assert back["state"][0]["step"] == 2


@pytest.mark.parametrize("format", fl.formats.names())
def test_from_one_transformation_of_ours_into_another(format: str):
    """Same format: same codes, whatever is around it; also out of an optimizer, and into one."""
    model = make_model()
    params = tree_of(model)
    tx = fl.adamw8bit(LR, format=format)
    state = run_pure(tx, params, [grads_of(model, k) for k in range(2)])[1]
    other = fl.apply_if_finite(fl.chain(fl.clip(1.0), fl.masked(tx, dict.fromkeys(params, True))))
    found = fl.convert.from_saved(fl.state_dict(state), other.init(params), params).inner_state[1].inner_state
    assert same(found, state)
    shell = _shell(model.named_parameters(), format)
    loaded = fl.convert.from_saved(fl.state_dict(state), shell)
    shell.load_state_dict(loaded)
    for source in (shell, loaded, shell.state_dict()):
        assert fl.convert.library_of(source) == "functional_lowbit"
        assert same(fl.convert.from_saved(source, tx.init(params), params), state)


def test_library_of():
    model = make_model()
    assert fl.convert.library_of(torch.optim.SGD(model.parameters()).state_dict()) == "torch"
    for entries, library in (
        ({"state1": torch.ones(1)}, "bitsandbytes"),
        ({"__bnb_optimizer_quant_state__": {"state1": torch.ones(1)}}, "bitsandbytes"),
        ({"exp_avg::quantized": torch.ones(1)}, "flashoptim"),
        ({"error_bits": torch.ones(1)}, "flashoptim"),
        ({"exp_avg": torch.ones(1)}, "torch"),
    ):
        assert fl.convert.library_of({"state": {0: entries}, "param_groups": [{"params": [0]}]}) == library
    groups = [{"params": [0], "master_bytewidth": 0}]
    assert fl.convert.library_of({"state": {}, "param_groups": groups}) == "flashoptim"
    assert fl.convert.library_of(_shell(model.parameters())) == "functional_lowbit"


@pytest.mark.parametrize("back", [False, True])
def test_parameters_that_were_put_in_before_the_first_step(back: bool):
    """As Accelerate does: the optimizer is made for them first."""
    model = make_model()
    theirs = torch.optim.AdamW(model.parameters(), LR)
    train(model, theirs, range(2))
    ours = _shell(make_model().parameters(), "float32")
    ours.param_groups[0]["params"] = list(model.parameters())
    if back:
        assert {float(x["step"]) for x in fl.convert.to_torch(ours)["state"].values()} == {0.0}
    else:
        ours.load_state_dict(fl.convert.from_torch(theirs, ours))
        assert torch.equal(ours.state[model[0].weight]["1.0.mu"], theirs.state[model[0].weight]["exp_avg"])
