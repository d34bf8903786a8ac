"""What fl.convert refuses: a state of another model, optimizer or library, or a damaged one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import averaged, refuses
from torch import nn

import functional_lowbit as fl
from functional_lowbit._core.contract import interrupted

PARAMS = {"w": torch.ones(2, 3), "b": torch.ones(3)}
ADAM = fl.adam(0.1).init(PARAMS)
ANOTHER = "it is the state of another model, or of other groups"


def _adam(shape: tuple[int, ...] = (2, 3), step: float = 2.0) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}


def _saved(w: Any = None, b: Any = None, names: Any = None, **group: Any) -> dict[str, Any]:
    """Of torch's Adam for PARAMS, with other entries where given."""
    state = {0: _adam() if w is None else w, 1: _adam((3,)) if b is None else b}
    more = {} if names is None else {"param_names": names}
    return {"state": state, "param_groups": [{**group, "params": [0, 1], **more}]}


def _torch(saved: Any, target: Any = ADAM, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fl.convert.from_torch(saved, target, *args, **options)


def _without(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in entries.items() if k != name}


NOT_SAVED = {
    "must be an optimizer or what its state_dict() returned, got list": [1],
    "has no entry 'state'; pass what optimizer.state_dict() returned": {"a": 1},
    "has no entry 'state'; pass saved['optimizer']": {"model": {}, "optimizer": _saved()},
    "has no entry 'param_groups'; pass what optimizer.state_dict() returned": {"state": {}},
}
DAMAGED = {
    "saved['state'] must be a dict, got list": {"state": [], "param_groups": []},
    "saved['param_groups'] must be a list, got int": {"state": {}, "param_groups": 3},
    "saved['param_groups'][0] must be a dict with a list 'params'; it must come from optimizer.state_dict()": {
        "state": {},
        "param_groups": [{"lr": 0.1}],
    },
    "saved['param_groups'][0] has 1 names for 2 parameters; the file is damaged": _saved(names=["w"]),
    "saved['state'][0] must be a dict, got int": _saved(w=3),
    "saved['state'] has 7, which is in no group; the file is damaged": {
        "state": {7: _adam()},
        "param_groups": [{"params": [0]}],
    },
    "'exp_avg' of parameter 0 must be a tensor of floats, got str": _saved({**_adam(), "exp_avg": "x"}),
    "'exp_avg' of parameter 'w' must be a tensor of floats, got torch.int64": _saved(
        {**_adam(), "exp_avg": torch.ones(2, 3, dtype=torch.int64)}, names=["w", "b"]
    ),
    "'step' of parameter 0 must be a number of at least 0, got 'x'": _saved({**_adam(), "step": "x"}),
    "'step' of parameter 0 must be a number of at least 0, got -1": _saved({**_adam(), "step": -1}),
    "'step' of parameter 0 must be below 2**63, got inf": _saved({**_adam(), "step": float("inf")}),
    "saved['param_groups'][0]['param_names'] must be a list of strings; the file is damaged": _saved(names=3),
    "saved['param_groups'][0]['params'] must be a list of numbers or names; the file is damaged": {
        "state": {},
        "param_groups": [{"params": [{}]}],
    },
    "'step' of parameter 0 must be a whole number, got 1.5": _saved({**_adam(), "step": 1.5}),
}


@pytest.mark.parametrize("words", [*NOT_SAVED, *DAMAGED])
def test_what_is_no_saved_optimizer(words: str):
    saved = {**NOT_SAVED, **DAMAGED}[words]
    text = f"from_torch: saved {words}" if words in NOT_SAVED else f"from_torch: {words}"
    if words == "saved['state'][0] must be a dict, got int":
        text += "; it must come from optimizer.state_dict()"
    refuses(TypeError if "got list" in words and words in NOT_SAVED else ValueError, text, _torch(saved))


def test_another_model():
    refuses(
        ValueError,
        f"from_torch: saved has 2 parameters, the target 1; {ANOTHER}",
        _torch(_saved(), fl.adam(0.1).init({"w": PARAMS["w"]})),
    )
    refuses(
        ValueError,
        f"from_torch: saved has parameter 'c', which the target has not; {ANOTHER}",
        _torch(_saved(names=["w", "c"])),
    )
    refuses(
        ValueError,
        "from_torch: saved has parameter 'module.w', which the target has not; the other side has 'w': rename one of "
        "them",
        _torch(_saved(names=["module.w", "module.b"])),
    )
    one = {"state": {0: _adam()}, "param_groups": [{"params": [0], "param_names": ["w"]}]}
    refuses(ValueError, f"from_torch: the target has parameter 'b', which saved has not; {ANOTHER}", _torch(one))
    refuses(
        ValueError,
        "from_torch: two parameters of saved have the name 'w'; rename one",
        _torch(_saved(names=["w", "w"])),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 has shape (3, 2), but the target's 'w' has (2, 3); it is the state of "
        "another model",
        _torch(_saved(_adam((3, 2)))),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 has shape (3,), but the target's 'w' has (2, 3); it is the state of "
        "another model",
        _torch(_saved(_adam((3,)), _adam())),  # another order
    )


def test_another_kind_of_optimizer():
    momentum = {"momentum_buffer": torch.ones(2, 3)}
    kind = "it is the state of another kind of optimizer"
    refuses(
        ValueError,
        "from_torch: parameter 0 has 'momentum_buffer', which is trace here, but the target's moments of it are mu, "
        f"nu; {kind}",
        _torch(_saved(momentum)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has 'exp_avg', which is mu here, but the target's moments of it are trace; {kind}",
        _torch(_saved(), fl.sgd(0.1, 0.9).init(PARAMS)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has 'exp_avg_sq', which is nu here, but the target's moments of it are mu; {kind}",
        _torch(_saved(), fl.lion(0.1).init(PARAMS)),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has exp_avg, and nothing for 0.nu.w of the target; {kind}",
        _torch(_saved(_without(_adam(), "exp_avg_sq"))),
    )
    refuses(
        ValueError,
        "from_torch: 'exp_avg' of parameter 0 may be 0.mu.w or 1.mu.w of the target; convert into a transformation "
        "that has one of them",
        _torch(_saved(), fl.chain(fl.scale_by_adam(), fl.scale_by_lion()).init(PARAMS)),
    )
    masked = fl.masked(fl.adam(0.1), {"w": True, "b": False}).init(PARAMS)
    refuses(
        ValueError,
        f"from_torch: parameter 1 has 'exp_avg', which is mu here, but the target's moments of it are none; {kind}",
        _torch(_saved(), masked, PARAMS),
    )


def test_entries_that_are_not_understood():
    known = "known are exp_avg, exp_avg_sq, momentum_buffer, square_avg and step"
    rest = "pass fields= to say which field of the state another one is"
    refuses(
        ValueError,
        "from_torch: parameter 0 has an entry 'max_exp_avg_sq' (amsgrad, which no transformation here keeps); "
        f"{known}; {rest}",
        _torch(_saved({**_adam(), "max_exp_avg_sq": torch.ones(2, 3)})),
    )
    refuses(
        ValueError,
        f"from_torch: parameter 0 has an entry 'prev'; {known}; {rest}",
        _torch(_saved({"prev": torch.ones(2, 3)})),
    )


def test_a_target_without_memory():
    """What saved has nothing for would be without memory in the result."""
    meta = {name: p.to("meta") for name, p in PARAMS.items()}
    refuses(
        ValueError,
        "from_torch: 0.mu.b of the target is on the meta device, and saved has nothing for it; make the target of "
        "parameters that have memory",
        _torch(_saved(b={}), fl.adam(0.1).init(meta)),
    )


def test_dampening():
    """Ours has none, but for an optimizer whose groups have one; its first step has none, so it must know the step."""
    momentum = {"momentum_buffer": torch.ones(2, 3)}
    saved = _saved(momentum, {"momentum_buffer": torch.ones(3)}, dampening=0.5, lr=0.1)
    refuses(
        ValueError,
        "from_torch: group 0 has a dampening of 0.5, which the target has not; its momentum is another sum",
        _torch(saved, fl.sgd(0.1, 0.9).init(PARAMS)),
    )
    ours = fl.optim.Optimizer(
        list(PARAMS.values()), lambda lr, dampening: fl.sgd(lr, 0.9), {"lr": 0.3, "dampening": 0.0}, backend="eager"
    )
    refuses(
        ValueError,
        "from_torch: group 0 has a dampening of 0.5, which the first step has not, and saved has no number of steps; "
        "pass step=",
        _torch(saved, ours),
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
        _torch(_saved(b=_adam((3,), 5.0))),
    )
    refuses(
        ValueError,
        "from_torch: parameter 1 has no 'step', which Adam's moments need; pass step= to set all counters",
        _torch(_saved(b=_without(_adam((3,)), "step"))),
    )
    for step in (-1, True, 1.0, 2**63, torch.tensor(3)):
        refuses(
            ValueError,
            f"from_torch: step must be an int of at least 0 and below 2**63, got {step!r}",
            _torch(_saved(), step=step),
        )


def test_nothing_to_convert():
    text = "from_torch: saved has no state of any parameter; the optimizer has made no step, or keeps no moments"
    fresh = torch.optim.Adam([nn.Parameter(p) for p in PARAMS.values()])
    refuses(ValueError, text, _torch(fresh))
    refuses(ValueError, text, _torch(fresh.state_dict(), fl.optim.Optimizer(PARAMS.items(), fl.adam(0.1))))


@pytest.mark.parametrize(
    ("target", "kind"),
    [(fl.adam(0.1), "GradientTransformation"), (nn.Linear(2, 2), "Linear"), (None, "NoneType"), (fl.adam, "function")],
)
def test_a_target_that_is_no_state(target: Any, kind: str):
    """Also where there is nothing to convert, so that it is not handed back as a state."""
    text = f"from_torch: target must be a state, as tx.init(params) returns it, or an fl.optim optimizer, got {kind}"
    refuses(TypeError, text, _torch(_saved(), target))
    refuses(TypeError, text, _torch(torch.optim.SGD([nn.Parameter(torch.ones(2))]), target, PARAMS))


def test_another_library():
    of_bnb = _saved({"state1": torch.ones(2, 3)})
    for saved, library, function in (
        (of_bnb, "bitsandbytes", "from_bitsandbytes"),
        (_saved(master_bytewidth=0), "flashoptim", "from_flashoptim"),
        (fl.state_dict(ADAM), "functional_lowbit", "from_saved"),
    ):
        text = f"from_torch: saved is from {library}; use fl.convert.{function}"
        refuses(ValueError, text, _torch(saved))
    refuses(
        ValueError,
        "from_bitsandbytes: saved is from torch; use fl.convert.from_torch",
        lambda: fl.convert.from_bitsandbytes(_saved(), ADAM),
    )


def test_params():
    masked = fl.masked(fl.adam(0.1), {"w": True, "b": False}).init(PARAMS)
    refuses(
        ValueError,
        "from_torch: params is needed, since masks have taken parameters out of the target's moments, and saved has no "
        "names; pass the tree that the state was made for",
        _torch(_saved(), masked),
    )
    refuses(
        ValueError,
        "from_torch: the target has a moment of 'b', which params has not; pass the tree that the state was made for",
        _torch(_saved(), ADAM, {"w": PARAMS["w"]}),
    )
    refuses(
        ValueError,
        "from_torch: params must be None for an optimizer, which knows its own",
        _torch(_saved(), fl.optim.Optimizer(PARAMS.items(), fl.adam(0.1)), PARAMS),
    )


def test_hyperparameters_that_differ():
    groups = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    ours = fl.optim.Optimizer(list(PARAMS.values()), lambda lr: fl.adam(lr), {"lr": 0.3})
    refuses(
        ValueError,
        "from_torch: group 0 of the target has parameters of saved groups whose lr is 0.1 and 0.2; give the target the "
        "groups of the saved optimizer",
        _torch({**_saved(), "param_groups": groups}, ours),
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
            _torch(theirs, ours),
        )
        same = fl.optim.SGD8bit(modules, 0.1, momentum=0.9, **{name: True}, backend="eager")
        same.load_state_dict(fl.convert.from_torch(theirs, same))


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


def test_bitsandbytes():
    def convert(entries: dict[str, Any], target: Any = ADAM, **group: Any) -> Callable[[], Any]:
        return lambda: fl.convert.from_bitsandbytes(_saved(entries, {}, **group), target)

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
        _torch(_saved(), state)()
