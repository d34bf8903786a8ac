"""What fl.convert refuses: a state of another model, optimizer or library, or a damaged one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_saved import ADAM, ANOTHER, PARAMS, adam_of, from_torch, saved_of
from helpers import refuses
from torch import nn

import functional_lowbit as fl


def _without(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in entries.items() if k != name}


NOT_SAVED = {
    "must be an optimizer or what its state_dict() returned, got list": [1],
    "has no entry 'state'; pass what optimizer.state_dict() returned": {"a": 1},
    "has no entry 'state'; pass saved['optimizer']": {"model": {}, "optimizer": saved_of()},
    "has no entry 'param_groups'; pass what optimizer.state_dict() returned": {"state": {}},
}


DAMAGED = {
    "saved['state'] must be a dict, got list": {"state": [], "param_groups": []},
    "saved['param_groups'] must be a list, got int": {"state": {}, "param_groups": 3},
    "saved['param_groups'][0] must be a dict with a list 'params'; it must come from optimizer.state_dict()": {
        "state": {},
        "param_groups": [{"lr": 0.1}],
    },
    "saved['param_groups'][0] has 1 names for 2 parameters; the file is damaged": saved_of(names=["w"]),
    "saved['state'][0] must be a dict, got int": saved_of(w=3),
    "saved['state'] has 7, which is in no group; the file is damaged": {
        "state": {7: adam_of()},
        "param_groups": [{"params": [0]}],
    },
    "'exp_avg' of parameter 0 must be a tensor of floats, got str": saved_of({**adam_of(), "exp_avg": "x"}),
    "'exp_avg' of parameter 'w' must be a tensor of floats, got torch.int64": saved_of(
        {**adam_of(), "exp_avg": torch.ones(2, 3, dtype=torch.int64)}, names=["w", "b"]
    ),
    "'step' of parameter 0 must be a number of at least 0, got 'x'": saved_of({**adam_of(), "step": "x"}),
    "'step' of parameter 0 must be a number of at least 0, got -1": saved_of({**adam_of(), "step": -1}),
    "'step' of parameter 0 must be below 2**63, got inf": saved_of({**adam_of(), "step": float("inf")}),
    "saved['param_groups'][0]['param_names'] must be a list of strings; the file is damaged": saved_of(names=3),
    "saved['param_groups'][0]['params'] must be a list of numbers or names; the file is damaged": {
        "state": {},
        "param_groups": [{"params": [{}]}],
    },
    "'step' of parameter 0 must be a whole number, got 1.5": saved_of({**adam_of(), "step": 1.5}),
}


@pytest.mark.parametrize("words", [*NOT_SAVED, *DAMAGED])
def test_what_is_no_saved_optimizer(words: str):
    saved = {**NOT_SAVED, **DAMAGED}[words]
    text = f"from_torch: saved {words}" if words in NOT_SAVED else f"from_torch: {words}"
    if words == "saved['state'][0] must be a dict, got int":
        text += "; it must come from optimizer.state_dict()"
    refuses(TypeError if "got list" in words and words in NOT_SAVED else ValueError, text, from_torch(saved))


def test_another_model():
    refuses(
        ValueError,
        f"from_torch: saved has 2 parameters, the target 1; {ANOTHER}",
        from_torch(saved_of(), fl.adam(0.1).init({"w": PARAMS["w"]})),
    )
    refuses(
        ValueError,
        f"from_torch: saved has parameter 'c', which the target has not; {ANOTHER}",
        from_torch(saved_of(names=["w", "c"])),
    )
    refuses(
        ValueError,
        "from_torch: saved has parameter 'module.w', which the target has not; the other side has 'w': rename one of "
        "them",
        from_torch(saved_of(names=["module.w", "module.b"])),
    )
    one = {"state": {0: adam_of()}, "param_groups": [{"params": [0], "param_names": ["w"]}]}
    refuses(ValueError, f"from_torch: the target has parameter 'b', which saved has not; {ANOTHER}", from_torch(one))
    refuses(
        ValueError,
        "from_torch: two parameters of saved have the name 'w'; rename one",
        from_torch(saved_of(names=["w", "w"])),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 has shape (3, 2), but the target's 'w' has (2, 3); it is the state of "
        "another model",
        from_torch(saved_of(adam_of((3, 2)))),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 has shape (3,), but the target's 'w' has (2, 3); it is the state of "
        "another model",
        from_torch(saved_of(adam_of((3,)), adam_of())),  # another order
    )


def test_another_kind_of_optimizer():
    momentum = {"momentum_buffer": torch.ones(2, 3)}
    kind = "it is the state of another kind of optimizer"
    refuses(
        ValueError,
        "from_torch: parameter 0 has 'momentum_buffer', which is trace here, but the target's moments of it are mu, "
        f"nu; {kind}",
        from_torch(saved_of(momentum)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has 'exp_avg', which is mu here, but the target's moments of it are trace; {kind}",
        from_torch(saved_of(), fl.sgd(0.1, 0.9).init(PARAMS)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has 'exp_avg_sq', which is nu here, but the target's moments of it are mu; {kind}",
        from_torch(saved_of(), fl.lion(0.1).init(PARAMS)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has exp_avg, and nothing for 0.nu.w of the target; {kind}",
        from_torch(saved_of(_without(adam_of(), "exp_avg_sq"))),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 may be 0.mu.w or 1.mu.w of the target; convert into a transformation "
        "that has one of them",
        from_torch(saved_of(), fl.chain(fl.scale_by_adam(), fl.scale_by_lion()).init(PARAMS)),
    )
    masked = fl.masked(fl.adam(0.1), {"w": True, "b": False}).init(PARAMS)
    refuses(
        ValueError,
        f"from_torch: parameter 1 has 'exp_avg', which is mu here, but the target's moments of it are none; {kind}",
        from_torch(saved_of(), masked, PARAMS),
    )


def test_entries_that_are_not_understood():
    known = "known are exp_avg, exp_avg_sq, momentum_buffer, square_avg and step"
    rest = "pass fields= to say which field of the state another one is"
    refuses(
        ValueError,
        "from_torch: parameter 0 has an entry 'max_exp_avg_sq' (amsgrad, which no transformation here keeps); "
        f"{known}; {rest}",
        from_torch(saved_of({**adam_of(), "max_exp_avg_sq": torch.ones(2, 3)})),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has an entry 'prev'; {known}; {rest}",
        from_torch(saved_of({"prev": torch.ones(2, 3)})),
    )


def test_a_target_without_memory():
    """What saved has nothing for would be without memory in the result."""
    meta = {name: p.to("meta") for name, p in PARAMS.items()}
    refuses(
        ValueError,
        "from_torch: 0.mu.b of the target is on the meta device, and saved has nothing for it; make the target of "
        "parameters that have memory",
        from_torch(saved_of(b={}), fl.adam(0.1).init(meta)),
    )


def test_dampening():
    """Ours has none, but for an optimizer whose groups have one; its first step has none, so it must know the step."""
    momentum = {"momentum_buffer": torch.ones(2, 3)}
    saved = saved_of(momentum, {"momentum_buffer": torch.ones(3)}, dampening=0.5, lr=0.1)
    refuses(
        ValueError,
        "from_torch: group 0 has a dampening of 0.5, which the target has not; its momentum is another sum",
        from_torch(saved, fl.sgd(0.1, 0.9).init(PARAMS)),
    )
    ours = fl.optim.Optimizer(
        list(PARAMS.values()), lambda lr, dampening: fl.sgd(lr, 0.9), {"lr": 0.3, "dampening": 0.0}, backend="eager"
    )
    refuses(
        ValueError,
        "from_torch: group 0 has a dampening of 0.5, which the first step has not, and saved has no number of steps; "
        "pass step=",
        from_torch(saved, ours),
    )
    ours.load_state_dict(fl.convert.from_torch(saved, ours, step=3))
    assert ours.param_groups[0]["dampening"] == 0.5
    theirs = torch.optim.SGD([nn.Parameter(p) for p in PARAMS.values()], momentum=0.9, dampening=0.5)
    assert fl.convert.to_torch(ours, theirs)["state"].keys() == {0, 1}


def test_steps():
    refuses(
        ValueError,
        "from_torch: parameter 0 has made 2 steps, parameter 1 5, but 0.step of the target counts those of both; give "
        "them transformations of their own (partition), or pass step= to set all counters",
        from_torch(saved_of(b=adam_of((3,), 5.0))),
    )
    refuses(
        ValueError,
        "from_torch: parameter 1 has no 'step', which Adam's moments need; pass step= to set all counters",
        from_torch(saved_of(b=_without(adam_of((3,)), "step"))),
    )
    for step in (-1, True, 1.0, 2**63, torch.tensor(3)):
        refuses(
            ValueError,
            f"from_torch: step must be an int of at least 0 and below 2**63, got {step!r}",
            from_torch(saved_of(), step=step),
        )


def test_nothing_to_convert():
    text = "from_torch: saved has no state of any parameter; the optimizer has made no step, or keeps no moments"
    fresh = torch.optim.Adam([nn.Parameter(p) for p in PARAMS.values()])
    refuses(ValueError, text, from_torch(fresh))
    refuses(ValueError, text, from_torch(fresh.state_dict(), fl.optim.Optimizer(PARAMS.items(), fl.adam(0.1))))


@pytest.mark.parametrize(
    ("target", "kind"),
    [(fl.adam(0.1), "GradientTransformation"), (nn.Linear(2, 2), "Linear"), (None, "NoneType"), (fl.adam, "function")],
)
def test_a_target_that_is_no_state(target: Any, kind: str):
    """Also where there is nothing to convert, so that it is not handed back as a state."""
    text = f"from_torch: target must be a state, as tx.init(params) returns it, or an fl.optim optimizer, got {kind}"
    refuses(TypeError, text, from_torch(saved_of(), target))
    refuses(TypeError, text, from_torch(torch.optim.SGD([nn.Parameter(torch.ones(2))]), target, PARAMS))


def test_another_library():
    of_bnb = saved_of({"state1": torch.ones(2, 3)})
    for saved, library, function in (
        (of_bnb, "bitsandbytes", "from_bitsandbytes"),
        (saved_of(master_bytewidth=0), "flashoptim", "from_flashoptim"),
        (fl.state_dict(ADAM), "functional_lowbit", "from_saved"),
    ):
        text = f"from_torch: saved is from {library}; use fl.convert.{function}"
        refuses(ValueError, text, from_torch(saved))
    refuses(
        ValueError,
        "from_bitsandbytes: saved is from torch; use fl.convert.from_torch",
        lambda: fl.convert.from_bitsandbytes(saved_of(), ADAM),
    )


def test_params():
    masked = fl.masked(fl.adam(0.1), {"w": True, "b": False}).init(PARAMS)
    refuses(
        ValueError,
        "from_torch: params is needed, since masks have taken parameters out of the target's moments, and saved has no "
        "names; pass the tree that the state was made for",
        from_torch(saved_of(), masked),
    )
    refuses(
        ValueError,
        "from_torch: the target has a moment of 'b', which params has not; pass the tree that the state was made for",
        from_torch(saved_of(), ADAM, {"w": PARAMS["w"]}),
    )
    refuses(
        ValueError,
        "from_torch: params must be None for an optimizer, which knows its own",
        from_torch(saved_of(), fl.optim.Optimizer(PARAMS.items(), fl.adam(0.1)), PARAMS),
    )


def test_hyperparameters_that_differ():
    groups = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    ours = fl.optim.Optimizer(list(PARAMS.values()), lambda lr: fl.adam(lr), {"lr": 0.3})
    refuses(
        ValueError,
        "from_torch: group 0 of the target has parameters of saved groups whose lr is 0.1 and 0.2; give the target the "
        "groups of the saved optimizer",
        from_torch({**saved_of(), "param_groups": groups}, ours),
    )


def test_switches_that_differ():
    """A momentum of negated gradients would go the other way."""
    modules = [nn.Parameter(p) for p in PARAMS.values()]
    for name in ("maximize", "nesterov"):
        theirs = torch.optim.SGD(modules, 0.1, momentum=0.9, **{name: True})
        for p in modules:
            p.grad = torch.ones_like(p)
        theirs.step()
        ours = fl.optim.SGD8bit(modules, 0.1, momentum=0.9, backend="eager")
        refuses(
            ValueError,
            f"from_torch: group 0 has {name}=True, group 0 of the target {name}=False, which cannot change; make the "
            "target with the other",
            from_torch(theirs, ours),
        )
        same = fl.optim.SGD8bit(modules, 0.1, momentum=0.9, **{name: True}, backend="eager")
        same.load_state_dict(fl.convert.from_torch(theirs, same))


def test_bitsandbytes():
    def convert(entries: dict[str, Any], target: Any = ADAM, **group: Any) -> Callable[[], Any]:
        return lambda: fl.convert.from_bitsandbytes(saved_of(entries, {}, **group), target)

    codes, qmap = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(256)
    refuses(
        ValueError,
        "from_bitsandbytes: parameter 0 has an entry '__bnb_optimizer_quant_state__'; known are state1, state2, step, "
        "absmax1, absmax2, qmap1, qmap2, gnorm_vec, unorm_vec, of blockwise bitsandbytes",
        convert({"__bnb_optimizer_quant_state__": 3}),
    )
    refuses(
        ValueError,
        "from_bitsandbytes: parameter 0 has an entry 'max1'; known are state1, state2, step, absmax1, absmax2, qmap1, "
        "qmap2, gnorm_vec, unorm_vec, of blockwise bitsandbytes",
        convert({"state1": codes, "max1": torch.ones(1)}),
    )
    for entries, missing in (({"qmap1": qmap}, "absmax1"), ({"absmax1": torch.ones(1)}, "qmap1")):
        refuses(
            ValueError,
            f"from_bitsandbytes: 'state1' of parameter 0 is in 8 bits, but has no {missing!r}; the file is damaged, or "
            "not blockwise",
            convert({"state1": codes, **entries}),
        )
    refuses(
        ValueError,
        "from_bitsandbytes: 'state1' of parameter 0 has 2 scales and a map of 256, but 6 elements need 1 and 256; the "
        "file is damaged, or of AdEMAMix",
        convert({"state1": codes, "absmax1": torch.ones(2), "qmap1": qmap}),
    )
    refuses(
        ValueError,
        "from_bitsandbytes: parameter 0 has state1 alone, and the eps of its group is 1e-08: it is neither Lion's nor "
        "SGD's; pass fields={'state1': ...} to say which field of the state it is",
        convert({"state1": torch.ones(2, 3)}, eps=1e-8),
    )
    refuses(
        ValueError,
        "from_bitsandbytes: parameter 0 has 'state1', which is trace here, but the target's moments of it are mu; it "
        "is the state of another kind of optimizer",
        convert({"state1": torch.ones(2, 3)}, fl.lion(0.1).init(PARAMS), betas=(0.9, 0), eps=0.0),
    )
