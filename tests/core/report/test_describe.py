"""describe: every leaf of a state, its bytes, and why it rests like that."""

import pytest
import torch
from helpers import leaves, refuses

import functional_lowbit as fl


def _params():
    return {"w": torch.zeros(128, 512), "thin": torch.zeros(5000, 1), "b": torch.zeros(512)}


def test_a_table():
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.lion8bit(0.1))
    assert str(fl.describe(tx.init(_params()))) == "\n".join(
        [
            "path         format      shape        bytes  why",
            "1.0.step     int64       ()               8  shared by all leaves",
            "1.0.mu.b     float32     (512,)       2,048  fewer than 4,096 elements",
            "1.0.mu.thin  float32     (5000, 1)   20,000  rows too short to gain by it",
            "1.0.mu.w     companded8  (128, 512)  66,560  at least 4,096 elements",
            "total                                88,616",
        ]
    )


@pytest.mark.parametrize("format", fl.formats.names())
@pytest.mark.parametrize("make", [fl.adam8bit, fl.sgd8bit, fl.lion8bit])
def test_bytes_are_those_of_the_tensors(make, format):
    state = make(0.1, format=format).init(_params())
    assert fl.describe(state).total_bytes == sum(x.nbytes for x in leaves(state))


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((4096,), 2.05),
        ((70001,), 2.05),
        ((64, 256), 2.05),
        ((129, 192), 2.05),
        ((100, 384), 2.05),
        ((16, 3, 64, 5), 2.05),  # rows of 960 are 5 blocks of 192
        ((64, 640), 2.05),  # 4 blocks of 160
        # A block never crosses a row, so short rows and primes pay more for their scales and padding.
        ((1024, 257), 2.0702),  # 2 blocks of 129: (258 + 8) / 257 for each moment
        ((64, 64), 2.125),  # a scale for 64 elements
        ((512, 16), 2.5),
    ],
)
def test_bytes_per_parameter(shape, most):
    moments = fl.describe(fl.adam8bit(0.1).init([torch.zeros(shape)])).total_bytes - 8  # without the counter
    assert moments / torch.Size(shape).numel() <= most


def test_reasons():
    def where(path, leaf):
        return "bfloat16" if path == "b" else path == "w"

    rows = {row.path: row for row in fl.describe(fl.sgd8bit(0.1, where=where).init(_params())).rows}
    assert [rows[f"0.trace.{k}"].format for k in ("b", "thin", "w")] == ["bfloat16", "float32", "companded8"]
    assert [rows[f"0.trace.{k}"].why for k in ("b", "thin", "w")] == [
        "chosen by where",
        "not stored in few bits",
        "chosen by where",
    ]
    assert {row.why for row in fl.describe(fl.adam(0.1).init(_params())).rows} == {
        "not stored in few bits",
        "shared by all leaves",
    }


def test_a_state_of_nothing():
    assert fl.describe(fl.identity().init({})).rows == ()
    assert fl.describe(()).total_bytes == 0
    assert str(fl.describe(())).splitlines() == ["path   format  shape  bytes  why", "total                     0"]


def test_masked_leaves_take_no_room():
    tx = fl.masked(fl.adam(0.1), {"w": True, "thin": False, "b": False})
    paths = [row.path for row in fl.describe(tx.init(_params())).rows]
    assert paths == [f"inner_state.0.{field}" for field in ("step", "mu.w", "nu.w")]


def test_formats_by_field():
    state = fl.low_bit(fl.adam(0.1), {"mu": "dynamic8", "nu": "bfloat16"}, block_size=128).init(_params())
    assert [(row.path, row.format) for row in fl.describe(state).rows if row.path.endswith(".w")] == [
        ("0.mu.w", "dynamic8"),
        ("0.nu.w", "bfloat16"),
    ]
    only = fl.low_bit(fl.adam(0.1), {"nu": "bfloat16"}).init(_params())
    assert [row.format for row in fl.describe(only).rows if row.path.endswith(".w")] == ["float32", "bfloat16"]


def test_bytes_of_training():
    params = {"w": torch.zeros(128, 512, dtype=torch.bfloat16), "b": torch.zeros(512)}
    tx = fl.master_weights(fl.adamw8bit(0.1), bits=8)
    report = fl.describe(tx.init(params), params)
    assert report.parameters == 128 * 512 + 512
    assert report.weight_bytes == report.gradient_bytes == 2 * 128 * 512 + 4 * 512
    assert report.training_bytes == 2 * report.weight_bytes + report.total_bytes
    assert report.bytes_per_parameter == report.training_bytes / report.parameters
    # Of w: 2 and 2 for weight and gradient, 1 for the error, 2 + 8 / 256 for the moments.
    assert report.bytes_per_parameter == pytest.approx((7.03125 * 128 * 512 + 16 * 512 + 8) / report.parameters)
    assert [line.split(maxsplit=2) for line in str(report).splitlines()[-5:]] == [
        ["total", "202,760"],
        ["weights", "133,120", "2.02 for each parameter"],
        ["gradients", "133,120", "2.02 for each parameter"],
        ["state", "202,760", "3.07 for each parameter"],
        ["training", "469,000", "7.10 for each parameter"],
    ]
    assert fl.describe((), {}).bytes_per_parameter == 0.0
    refuses(
        ValueError,
        "describe: the training bytes need the parameters; call describe(state, params)",
        lambda: fl.describe(tx.init(params)).bytes_per_parameter,
    )
