"""The ready classes: other libraries' arguments, and what a group may hold."""

from typing import Any

import pytest
import torch
from helpers import refuses, run_step, same
from optim_models import EACH, gradients, model_of, numbers, ready, train
from torch import nn

import functional_lowbit as fl

HARMLESS: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (False, None),
    "differentiable": (False, None),
    "args": (None,),
    "percentile_clipping": (100,),
    "block_wise": (True,),
    "is_paged": (False,),
    "optim_bits": (32, None),
    "min_8bit_size": (None, 4096),
    "bf16_stochastic_round": (None, False, True),
}


@EACH
def test_values_that_change_nothing(name):
    p = nn.Parameter(torch.zeros(2))
    for key, values in HARMLESS.items():
        for value in values:
            ready(name, [p], **{key: value})
    ready(name, [p], optim_bits=4 if "4" in name else 8)


REFUSED: dict[str, str] = {
    "amsgrad=True": (
        "amsgrad must be False or None, got True; there is no AMSGrad; leave it out, or write it with fl.leafwise"
    ),
    "capturable=True": (
        "capturable must be False or None, got True; numbers are read on the CPU at each step; leave it out"
    ),
    "differentiable=True": (
        "differentiable must be False or None, got True; a step writes in place; differentiate through the update of "
        "the transformation, for instance fl.adamw8bit"
    ),
    "optim_bits=4": (
        "optim_bits must be None or 32 or 8, got 4; the class says how many bits; choose another class, or "
        "format='float32'"
    ),
    "args={}": "args must be None, got {}; give its entries by name, for instance min_size",
    "percentile_clipping=5": (
        "percentile_clipping must be 100, got 5; clip with torch.nn.utils.clip_grad_norm_ before the step"
    ),
    "block_wise=False": (
        "block_wise must be True, got False; scales are always those of blocks; block_size says how large"
    ),
    "is_paged=True": (
        "is_paged must be False or None, got True; moments rest on the CPU with fl.optim.Optimizer(params, "
        "fl.offload(tx)), where tx is for instance fl.adamw8bit(lr)"
    ),
    "fused=1": "fused must be None or False or True, got 1; leave it out",
    "min_size=1, min_8bit_size=2": "min_8bit_size is another name of min_size, but they are 2 and 1; give one",
}


KINDS: dict[str, str] = {
    "betas=0.9": "AdamW8bit: betas must be 2 numbers, got 0.9",
    "betas=(0.9, 0.9, 0.9)": "AdamW8bit: betas must be 2 numbers, got (0.9, 0.9, 0.9)",
    "lr='fast'": "Optimizer: group 0: adamw: lr must be a float, a 0-d tensor or a schedule, got str",
    "lr=torch.ones(1)": "Optimizer: lr of group 0 must be a number, got a tensor of shape (1,)",
    "lr=True": "Optimizer: group 0: adamw: lr must be a float, a 0-d tensor or a schedule, got bool",
    "maximize='no'": "AdamW8bit: maximize must be a bool, got 'no'",
    "bf16_stochastic_round=1": "AdamW8bit: stochastic_rounding must be a bool, got 1",
    "where='weight'": "AdamW8bit: where must be a function where(path, leaf), got 'weight'",
    "format='int8'": (
        "AdamW8bit: format must be one of companded8, dynamic8, e4m3, e5m2, root4, dynamic4, bfloat16, float32; got "
        "'int8'"
    ),
    "format={'mu': None}": "AdamW8bit: format must be a name or a Format, got NoneType",
    "block_size=0": "Optimizer: group 0: low_bit: block_size must be an int of at least 1, got 0",
    "min_size=-1": "Optimizer: group 0: low_bit: min_size must be an int of at least 0, got -1",
    "stochastic_rounding=True, key=1.5": "compile: key must be an int or a 0-d int64 tensor, got float",
}


@pytest.mark.parametrize("options", KINDS)
def test_values_of_another_kind(options):
    given, p = eval(f"dict({options})"), nn.Parameter(torch.zeros(2))
    with pytest.raises((TypeError, ValueError)) as caught:
        ready("AdamW8bit", [p], **given)
    assert str(caught.value) == KINDS[options]


@pytest.mark.parametrize("options", REFUSED)
def test_values_that_are_refused(options):
    """By the constructor and in a group."""
    given, p = eval(f"dict({options})"), nn.Parameter(torch.zeros(2))  # as one types it
    message = REFUSED[options]
    refuses(ValueError, f"AdamW8bit: {message}", lambda: ready("AdamW8bit", [p], **given))
    refuses(ValueError, f"AdamW8bit: group 0: {message}", lambda: ready("AdamW8bit", [{"params": [p], **given}]))


def test_what_a_group_may_hold():
    """Entries of torchtitan, of schedulers, and of torch's own groups are left there; what is for all is refused."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    group = {
        "params": [p],
        "param_names": ["p"],
        "fused": False,
        "foreach": None,
        "lr": 1,
        "initial_lr": 1,
        "lr_scale": 2,
    }
    optimizer = ready("AdamW8bit", [group])
    assert {k: optimizer.param_groups[0][k] for k in group if k != "params"} == {
        k: v for k, v in group.items() if k != "params"
    }
    foreign = torch.optim.AdamW([p], amsgrad=False).param_groups
    assert ready("AdamW8bit", [dict(g) for g in foreign]).param_groups[0]["betas"] == (0.9, 0.999)
    for key, value, name in (
        ("stochastic_rounding", True, "stochastic_rounding"),
        ("bf16_stochastic_round", True, "stochastic_rounding"),
        ("key", 7, "key"),
        ("backend", "native", "backend"),
    ):
        refuses(
            ValueError,
            f"AdamW8bit: group 1 has {name} = {value!r}, which is the same for all groups; give it to the constructor",
            lambda key=key, value=value: ready("AdamW8bit", [{"params": [p]}, {"params": [q], key: value}]),
        )
    same_for_all = {"stochastic_rounding": False, "key": 0, "backend": "eager"}
    assert not set(same_for_all) & set(ready("AdamW8bit", [{"params": [p], **same_for_all}]).param_groups[0])
    options = ", ".join(fl.optim._options.DEFAULTS)
    refuses(
        TypeError,
        f"AdamW8bit: there is no argument 'learning_rate'; there are {options}",
        lambda: ready("AdamW8bit", [p], learning_rate=1.0),
    )


def test_stochastic_rounding_by_either_name():
    """The noise of `fl.compile` with this key, 0 if none is given."""
    runs = []
    for options in (
        {"stochastic_rounding": True},
        {"bf16_stochastic_round": True, "key": 0},
        {"stochastic_rounding": True, "key": 7},
        {},
    ):
        model = model_of(0, torch.bfloat16)
        train(model, ready("AdamW8bit", model.named_parameters(), lr=1e-4, **options), range(2))
        runs.append(numbers(model))
    plain, tx = numbers(model_of(0, torch.bfloat16)), fl.adamw8bit(1e-4, weight_decay=1e-2)
    step = fl.compile(tx, rounding="stochastic", key=0, backend="eager")
    params, _ = run_step(step, plain, gradients(model_of(0, torch.bfloat16), range(2)), tx.init(plain))
    assert same(runs[0], runs[1])
    assert same(runs[0], params)
    assert not same(runs[0], runs[2])
    assert not same(runs[0], runs[3])
