"""What fl.convert refuses on the way back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from convert_saved import ADAM, ANOTHER, PARAMS, from_torch, saved_of
from helpers import averaged, refuses
from torch import nn

import functional_lowbit as fl
from functional_lowbit._core.contract import interrupted


def test_switches_that_differ_on_the_way_back():
    modules = [nn.Parameter(p.clone()) for p in PARAMS.values()]
    ours = fl.optim.SGD8bit(modules, 0.1, momentum=0.9, maximize=True, backend="eager")
    theirs = torch.optim.SGD(modules, 0.1, momentum=0.9)
    for source in (ours, ours.state_dict()):
        refuses(
            ValueError,
            "to_torch: parameter '0' of source has maximize=True, target maximize=False, which cannot change; make the "
            "target with the other",
            lambda source=source: fl.convert.to_torch(source, theirs),
        )
        fl.convert.to_torch(source, torch.optim.SGD(modules, 0.1, momentum=0.9, maximize=True))
        fl.convert.to_torch(source)


def _to_torch(source: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fl.convert.to_torch(source, *args, **options)


def test_to_torch():
    modules = [nn.Parameter(p) for p in PARAMS.values()]
    adam, sgd = torch.optim.Adam(modules), torch.optim.SGD(modules, momentum=0.9)
    trace = fl.sgd(0.1, 0.9).init(PARAMS)
    needed = (
        "to_torch: target is needed, since source has not all hyperparameters; pass the torch.optim optimizer, or its "
        "groups"
    )
    refuses(ValueError, needed, _to_torch(ADAM))
    refuses(ValueError, needed, _to_torch(fl.optim.Optimizer(PARAMS.items(), lambda lr: fl.adam(lr), {"lr": 0.3})))
    refuses(
        TypeError,
        "to_torch: target must be a torch.optim.Optimizer or a list of its groups, got dict",
        _to_torch(ADAM, PARAMS),
    )
    refuses(
        ValueError,
        "to_torch: source has momentum_buffer of parameter 0, but the optimizer of group 0 of target keeps exp_avg, "
        "exp_avg_sq; it is of another kind",
        _to_torch(trace, adam),
    )
    refuses(
        ValueError,
        "to_torch: source has exp_avg, exp_avg_sq of parameter 0, but the optimizer of group 0 of target keeps "
        "momentum_buffer; it is of another kind",
        _to_torch(ADAM, sgd),
    )
    for options, name, value in (({"momentum": 0.9, "dampening": 0.5}, "dampening", 0.5), ({}, "momentum", 0)):
        refuses(
            ValueError,
            f"to_torch: {name} of group 0 of target is {value}, with which torch.optim.SGD keeps no such momentum; "
            "change it",
            _to_torch(trace, torch.optim.SGD(modules, **options)),
        )
    refuses(
        ValueError,
        "to_torch: group 0 of target has amsgrad, whose max_exp_avg_sq the source has not; switch it off",
        _to_torch(ADAM, torch.optim.Adam(modules, amsgrad=True)),
    )
    refuses(
        ValueError,
        "to_torch: source has two moments of parameter 'w' that 'exp_avg' may be, the second at 1.mu.w; torch keeps "
        "one",
        _to_torch(fl.chain(fl.scale_by_adam(), fl.scale_by_lion()).init(PARAMS), adam),
    )
    refuses(
        ValueError,
        "to_torch: 'exp_avg' of parameter 0 has shape (2, 3), but target's parameter has (3, 2); it is the state of "
        "another model",
        _to_torch(ADAM, torch.optim.Adam([nn.Parameter(torch.ones(3, 2)), modules[1]])),
    )
    refuses(
        ValueError,
        f"to_torch: target has 1 parameters, source 2; {ANOTHER}",
        _to_torch(ADAM, torch.optim.Adam(modules[:1])),
    )
    refuses(
        ValueError,
        f"to_torch: target has parameter 'c', which source has not; {ANOTHER}",
        _to_torch(ADAM, [{"params": ["w", "c"]}]),
    )
    refuses(
        ValueError,
        f"to_torch: source has parameter 'b', which target has not; {ANOTHER}",
        _to_torch(ADAM, [{"params": ["w"]}]),
    )


def test_two_leaves_of_one_field_in_a_file_of_ours():
    saved = fl.state_dict(fl.chain(fl.scale_by_adam(), fl.scale_by_lion()).init(PARAMS))
    refuses(
        ValueError,
        "from_saved: parameter 'b' has two leaves 'mu' in saved; load it with fl.load_state_dict",
        lambda: fl.convert.from_saved(saved, ADAM),
    )
    assert fl.convert.library_of(fl.state_dict(averaged().init(PARAMS))) == "functional_lowbit"


def test_an_interrupted_state_is_refused():
    state = fl.adam(0.1).init(PARAMS)
    interrupted.mark(state, KeyboardInterrupt())
    refuses(
        RuntimeError,
        "to_torch: an earlier step in place was interrupted (KeyboardInterrupt), so that this state and its parameters "
        "are partly of the old step and partly of the new one; load both from a checkpoint, the state into one that "
        "init(params) makes, or with Optimizer.load_state_dict",
        _to_torch(state, [{"params": ["w", "b"]}]),
    )
    with pytest.raises(RuntimeError, match=r"^from_torch: an earlier step in place was interrupted"):
        from_torch(saved_of(), state)()


@pytest.mark.parametrize(
    "source", [None, 3, {"optimizer": {}}, nn.Linear(2, 2), torch.optim.AdamW([nn.Parameter(PARAMS["w"])])]
)
def test_a_source_without_moments_is_refused(source):
    """Loading what was made of it would silently begin anew."""
    optimizer = torch.optim.AdamW([(name, nn.Parameter(x.clone())) for name, x in PARAMS.items()])
    refuses(
        ValueError,
        "to_torch: source has no moments; pass a state with some, an fl.optim optimizer, or what was saved of either",
        lambda: fl.convert.to_torch(source, optimizer, PARAMS),
    )


def test_torchs_sgd_without_momentum_keeps_nothing():
    groups = torch.optim.SGD([nn.Parameter(PARAMS["w"])]).state_dict()["param_groups"]
    assert fl.convert.to_torch(fl.sgd(0.1).init({"0": PARAMS["w"]}), groups, {"0": PARAMS["w"]})["state"] == {}


def test_a_state_may_have_a_field_of_groups():
    """It is no optimizer for that: momentum with a dampening goes on in none of our states."""

    class S(NamedTuple):
        param_groups: Any
        trace: fl.Signed

    state = S([], {"w": torch.zeros(2, 2)})
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.zeros(2, 2)))], lr=0.1, momentum=0.9, dampening=0.5)
    next(iter(optimizer.param_groups[0]["params"])).grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(ValueError, match=r"has a dampening of 0\.5, which the target has not"):
        fl.convert.from_torch(optimizer, state, {"w": torch.zeros(2, 2)}, step=3)


def test_a_flattened_group_without_an_entry_is_damaged():
    with pytest.raises(
        ValueError, match=r"^library_of: saved\['state'\] has 'a', which is in no group; the file is damaged"
    ):
        fl.convert.library_of({"state.a.b": 1, "param_groups.x": 2})
