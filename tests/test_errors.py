"""Wrong arguments are refused when a transformation is made or a state begun, and in these words."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import refuses
from torch import Tensor

import functional_lowbit as fl

NUMBER = "must be a float, a 0-d tensor or a schedule, got"
FLOATS = "must be float16, bfloat16, float32 or float64, got"


class Scheduled(NamedTuple):
    """A state without a counter."""

    total: fl.Signed


ARGUMENTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fl.adam("0.1"), TypeError, f"scale_by_learning_rate: learning_rate {NUMBER} str"),
    (lambda: fl.adam(True), TypeError, f"scale_by_learning_rate: learning_rate {NUMBER} bool"),
    (lambda: fl.adam(math.nan), ValueError, "scale_by_learning_rate: learning_rate must be finite, got nan"),
    (lambda: fl.adam(0.1, b1=1.0), ValueError, "scale_by_adam: b1 must be in [0, 1), got 1.0"),
    (lambda: fl.adam8bit(0.1, b2=-0.5), ValueError, "scale_by_adam: b2 must be in [0, 1), got -0.5"),
    (lambda: fl.adamw(0.1, eps=-1e-8), ValueError, "scale_by_adam: eps must be at least 0, got -1e-08"),
    (lambda: fl.adamw(0.1, eps_root=math.inf), ValueError, "scale_by_adam: eps_root must be finite, got inf"),
    (
        lambda: fl.adamw(0.1, weight_decay=-1.0),
        ValueError,
        "add_decayed_weights: weight_decay must be at least 0, got -1.0",
    ),
    (
        lambda: fl.adam(torch.ones(2)),
        ValueError,
        f"scale_by_learning_rate: learning_rate {NUMBER} a tensor of shape (2,)",
    ),
    (lambda: fl.lion(0.1, b1=2), ValueError, "scale_by_lion: b1 must be in [0, 1), got 2"),
    (lambda: fl.lion8bit(0.1, b2=None), TypeError, f"scale_by_lion: b2 {NUMBER} NoneType"),
    (lambda: fl.trace(-0.1), ValueError, "trace: decay must be at least 0, got -0.1"),
    (lambda: fl.clip(-1.0), ValueError, "clip: max_delta must be at least 0, got -1.0"),
    (
        lambda: fl.clip_by_global_norm(-1.0),
        ValueError,
        "clip_by_global_norm: max_norm must be at least 0, got -1.0",
    ),
    (lambda: fl.scale(math.inf), ValueError, "scale: step_size must be finite, got inf"),
    (
        lambda: fl.scale_by_schedule(0.1),
        TypeError,
        "scale_by_schedule: step_size_fn must be a function of the step, got float",
    ),
    (lambda: fl.chain(fl.clip(1.0), 3), TypeError, "chain: argument 1 must be a GradientTransformation, got int"),
    (
        lambda: fl.apply_if_finite(fl.adam(0.1), -1),
        ValueError,
        "apply_if_finite: max_consecutive_errors must be an int of at least 0, got -1",
    ),
    (
        lambda: fl.compile(fl.adam),
        TypeError,
        "compile: tx must be a GradientTransformation, got function; call it: adam(...)",
    ),
    (lambda: fl.low_bit(3), TypeError, "low_bit: tx must be a GradientTransformation, got int"),
    (
        lambda: fl.apply_if_finite(fl.adam),
        TypeError,
        "apply_if_finite: inner must be a GradientTransformation, got function; call it: adam(...)",
    ),
    (lambda: fl.masked(None, True), TypeError, "masked: inner must be a GradientTransformation, got NoneType"),
    (
        lambda: fl.master_weights(int),
        TypeError,
        "master_weights: tx must be a GradientTransformation, got type; call it: int(...)",
    ),
    (
        lambda: fl.schedules.join_schedules([lambda step: 0.1] * 3, [4, 4]),
        ValueError,
        "join_schedules: boundaries must rise, got [4, 4]",
    ),
    (
        lambda: fl.compile(fl.adam(0.1), rounding="up"),
        ValueError,
        "compile: rounding must be 'nearest' or 'stochastic', got 'up'",
    ),
    (
        lambda: fl.apply_updates(torch.ones(1), torch.ones(1), rounding="up"),
        ValueError,
        "apply_updates: rounding must be 'nearest' or 'stochastic', got 'up'",
    ),
    (
        lambda: fl.low_bit(fl.adam(0.1), "int3"),
        ValueError,
        f"formats.get: format must be one of {', '.join(fl.formats.names())}; got 'int3'",
    ),
    (lambda: fl.low_bit(fl.adam(0.1), 8), TypeError, "formats.get: format must be a name or a Format, got int"),
    (
        lambda: fl.low_bit(fl.adam(0.1), block_size=0),
        ValueError,
        "low_bit: block_size must be an int of at least 1, got 0",
    ),
    (
        lambda: fl.quantize(torch.ones(2), "companded8", block_size=2.5),
        ValueError,
        "quantize: block_size must be an int of at least 1, got 2.5",
    ),
    (
        lambda: fl.low_bit(fl.adam(0.1), min_size=-1),
        ValueError,
        "low_bit: min_size must be an int of at least 0, got -1",
    ),
    (
        lambda: fl.quantize(torch.ones(2, dtype=torch.int64), "companded8"),
        TypeError,
        "quantize: x must be a floating-point tensor, got torch.int64",
    ),
    (
        lambda: fl.quantize([1.0], "companded8"),
        TypeError,
        "quantize: x must be a floating-point tensor, got list",
    ),
    (
        lambda: fl.leafwise(lambda g, s, p, c: (g, s), state=dict),
        TypeError,
        "leafwise: state must be a NamedTuple class, got <class 'dict'>",
    ),
    (
        lambda: fl.leafwise(_leaf, state=Scheduled, hyperparams={"rate": lambda step: 0.1}),
        ValueError,
        "leafwise: leaf has a schedule for rate, so its state class Scheduled needs a field `step: Tensor`",
    ),
    (
        lambda: fl.schedules.linear_schedule(0.0, 1.0, 0),
        ValueError,
        "linear_schedule: transition_steps must be an int of at least 1, got 0",
    ),
    (
        lambda: fl.schedules.linear_schedule(0.0, 1.0, 5, -1),
        ValueError,
        "linear_schedule: transition_begin must be an int of at least 0, got -1",
    ),
    (
        lambda: fl.schedules.cosine_decay_schedule(0.0, 2.5),
        ValueError,
        "cosine_decay_schedule: decay_steps must be an int of at least 1, got 2.5",
    ),
    (
        lambda: fl.schedules.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10),
        ValueError,
        "warmup_cosine_decay_schedule: decay_steps must be an int of at least 11, got 10",
    ),
    (
        lambda: fl.schedules.constant_schedule(math.nan),
        ValueError,
        "constant_schedule: value must be finite, got nan",
    ),
    (
        lambda: fl.schedules.join_schedules([lambda step: 0.1], [3]),
        ValueError,
        "join_schedules: schedules must be one more than boundaries, got 1 and 1",
    ),
]


def _leaf(g: Tensor, s: Any, p: Any, c: Any) -> Any:
    return g, s


@pytest.mark.parametrize(("call", "kind", "message"), ARGUMENTS, ids=[message[:60] for _, _, message in ARGUMENTS])
def test_a_wrong_argument(call, kind, message):
    refuses(kind, message, call)


def _params() -> dict[str, Any]:
    return {"enc": {"w": torch.ones(64, 64)}, "b": torch.ones(3)}


INIT: list[tuple[Callable[[], Any], Any, type[Exception], str]] = [
    (
        lambda: fl.adam(0.1),
        {"a": [torch.ones(2, dtype=torch.int32)]},
        TypeError,
        f"scale_by_adam.init: params['a.0'] {FLOATS} torch.int32; leave it out of the tree or mask it with fl.masked",
    ),
    (
        lambda: fl.adamw8bit(0.1),
        torch.ones(2, dtype=torch.complex64),
        TypeError,
        f"scale_by_adam.init: params {FLOATS} torch.complex64; leave it out of the tree or mask it with fl.masked",
    ),
    (lambda: fl.lion(0.1), {"a": 1.0}, TypeError, "scale_by_lion.init: params['a'] must be a tensor, got float"),
    (
        lambda: fl.lion(0.1),
        torch.nn.Linear(2, 2),
        TypeError,
        "scale_by_lion.init: params must be a tensor, got Linear; pass dict(model.named_parameters())",
    ),
    (
        lambda: fl.lion(0.1),
        torch.nn.Linear(2, 2).parameters(),
        TypeError,
        "scale_by_lion.init: params must be a tensor, got generator; pass dict(model.named_parameters())",
    ),
    (
        lambda: fl.lion(0.1),
        {"a": torch.eye(2).to_sparse()},
        TypeError,
        "scale_by_lion.init: params['a'] is sparse (torch.sparse_coo); only dense parameters are supported",
    ),
    (
        lambda: fl.low_bit(fl.adam(0.1), {"momentum": "companded8"}),
        _params(),
        ValueError,
        "low_bit: format names the field 'momentum', but the state's moments are mu, nu",
    ),
    (
        lambda: fl.adam8bit(0.1, where=lambda path, leaf: "decoder" in path),
        _params(),
        ValueError,
        "low_bit: where matched no leaf; it is called as where(path, leaf), path like 'a.0.weight'",
    ),
    (
        lambda: fl.adam8bit(0.1, where=lambda path, leaf: None),
        _params(),
        TypeError,
        "low_bit: where('b', leaf) must return a bool or a format, got NoneType",
    ),
    (
        lambda: fl.masked(fl.adam(0.1), {"enc": True}),
        _params(),
        ValueError,
        "masked: mask must begin like params, but in params 'b' is unexpected",
    ),
    (
        lambda: fl.masked(fl.adam(0.1), {"enc": {"w": 1}, "b": True}),
        _params(),
        TypeError,
        "masked: mask at 'enc.w' must be a bool, got int",
    ),
]


@pytest.mark.parametrize(("make", "params", "kind", "message"), INIT, ids=[message[:60] for *_, message in INIT])
def test_wrong_params_for_init(make, params, kind, message):
    refuses(kind, message, lambda: make().init(params))
