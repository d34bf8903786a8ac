"""The generated C++: the bits of torch, for every operation, shape and special number; else another backend."""

import copy
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import clone, random_like, refuses, run_pure, run_step, same
from tiers import slow, slow_unless
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.cpp.norm import square_bins
from functional_lowbit._core.leafwise import rule, update


class Two(NamedTuple):
    """Two moments."""

    a: fl.Signed
    b: fl.NonNegative


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38, 1e-20, 255.0, 254.5)
SPECIAL += (float("inf"), float("-inf"), float("nan"))

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y + 0.1,
    "sub": lambda x, y: 1 - x - y * 3,
    "mul": lambda x, y: x * y * 0.1,
    "div": lambda x, y: x / y + x / 3 + 3 / y,
    "reciprocal": lambda x, y: x.reciprocal(),
    "neg abs": lambda x, y: -x.abs(),
    "square": lambda x, y: x**2 + y.square(),
    "sqrt": lambda x, y: fl.sqrt(x) + fl.sqrt(y.abs()),
    "floor ceil": lambda x, y: x.floor() + y.ceil() + x.trunc(),
    "round": lambda x, y: x.round() + (y * 127).round(),
    "sign": lambda x, y: x.sign(),
    "copysign": lambda x, y: torch.copysign(x, y),
    "where": lambda x, y: torch.where(x < y, x, 2.0),
    "maximum": lambda x, y: torch.maximum(x, y) + torch.minimum(x, y),
    "clamp": lambda x, y: x.clamp(-1, 2) + y.clamp_min(0.5) + y.clamp_max(3),
    "clamp by tensors": lambda x, y: torch.clamp(x, min=y, max=y + 1),
    "bounds that are tensors": lambda x, y: x.clamp_min(y) + torch.clamp_max(x, y),
    "equal numbers of other types": lambda x, y: (x.view(torch.int32) * 2).view(torch.float32) * 2.0 + y * 2,
    "zeros of both signs": lambda x, y: torch.where(x > 5, x, 0.0) + 1 / torch.where(x > 5, x, -0.0),
    "comparisons": lambda x, y: (
        ((x < y) | (x <= 1) & ~(x > y) ^ (y >= 2)).float() + (x == y).float() + (x != 0).float()
    ),
    "logical": lambda x, y: torch.logical_and(x > 0, torch.logical_not(y > 0)).float(),
    "bits": lambda x, y: (((x.view(torch.int32) >> 3) & 0x7FFFF) ^ (y.view(torch.int32) << 2)).float(),
    "wrapping": lambda x, y: (x.view(torch.int32) * 0x7FEB352D + 5).view(torch.float32),
    "casts": lambda x, y: (x > y).to(torch.uint8).float() + (y.view(torch.int32) >> 25).to(torch.int8).to(torch.int32),
    "bool arithmetic": lambda x, y: (x > 0) * y + (y > 0).to(torch.int32),
    "bfloat16": lambda x, y: x.to(torch.bfloat16).float() + y,
    "float16": lambda x, y: x.to(torch.float16).float() + y,
    "float64": lambda x, y: (x.double() * 3 + y.double()).float(),
    "like": lambda x, y: torch.zeros_like(x) + torch.full_like(y, 3.0) * x + torch.ones_like(x),
    "block maximum": lambda x, y: x / x.abs().amax(dim=-1, keepdim=True),
    "block maximum of what that scales": lambda x, y: (x / x.amax(-1, True)).amin(dim=-1, keepdim=True) + y,
    "any": lambda x, y: torch.where((x > 2).any(dim=-1, keepdim=True), x, y),
    "same twice": lambda x, y: (x * y + 1) / (x * y + 1).abs().amax(-1, keepdim=True),
}


def _blocks(n: int, b: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor(SPECIAL)
    pairs = torch.cartesian_prod(special, special)
    x = torch.randn(n, b, generator=generator) * torch.exp2(torch.randint(-20, 20, (n, b), generator=generator).float())
    y = torch.randn(n, b, generator=generator)
    x.view(-1)[: len(pairs)], y.view(-1)[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    return x, y


@slow_unless(lambda name: list(OPERATIONS).index(name) % 6 == 0)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_torch(name, monkeypatch):
    # The largest of a block is for formats; a leaf function that takes it is refused, but reaches the generator.
    monkeypatch.setattr(rule, "check_elementwise", lambda *args: True)
    monkeypatch.setattr(update, "can_watch", lambda: False)
    function = OPERATIONS[name]

    def leaf(g: Tensor, s: Two, p: Tensor, c: Any) -> Any:
        out = function(g, p)
        return out, s._replace(a=out)

    for n, b in ((16, 64), (37, 33)):
        x, y = _blocks(n, b)
        grid = torch.zeros(n, b)
        # A moment in blocks makes the kernel work on blocks of a row, as the function assumes here.
        tx = fl.low_bit(fl.leafwise(leaf, state=Two), {"b": "companded8"}, min_size=0, block_size=b)
        results = []
        for backend in ("eager", "native"):
            params = {"w": y.clone()}
            results.append(fl.compile(tx, backend=backend)({"w": x}, tx.init({"w": grid}), params))
        assert same(results[0], results[1])


SHAPES = {
    "matrix": (300, 300),
    "odd rows": (129, 257),
    "long row": (100_000,),
    "one element": (1,),
    "scalar": (),
    "empty": (0, 5),
    "rows of one": (5000, 1),
    "4-d": (32, 16, 3, 3),
}


@slow_unless(lambda dtypes: dtypes in ("float32", "bfloat16"))
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float16", "float64"])
def test_any_shape_any_dtype_any_strides(dtypes):
    dtype = getattr(torch, dtypes)
    shapes = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    params = random_like(shapes, seed=0, dtype=dtype)
    params["transposed"] = random_like(torch.empty(200, 100), 5, dtype).t()
    params["strided"] = random_like(torch.empty(128, 200), 6, dtype)[:, ::2]
    tx = fl.chain(fl.clip(2.0), fl.adamw8bit(1e-2, weight_decay=0.1))
    grads = [random_like(params, seed=t) for t in range(3)]
    states = tx.init(params), tx.init(params)
    results = [
        run_step(fl.compile(tx, backend=b), clone(params), grads, s)
        for b, s in zip(("native", "eager"), states, strict=True)
    ]
    assert same(results[0], results[1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    tx = fl.adamw8bit(1e-2)
    params = random_like({"a": torch.empty(400, 700), "b": torch.empty(33, 257), "c": torch.empty(9)}, seed=0)
    grads = [random_like(params, seed=t) for t in range(2)]
    expected = run_pure(tx, params, grads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = run_step(fl.compile(tx, backend="native"), clone(params), grads, tx.init(params))
    finally:
        torch.set_num_threads(before)
    assert same(got, expected)


def test_autograd_sees_that_a_parameter_was_written():
    w = torch.nn.Parameter(torch.ones(64, 96))
    tx = fl.adamw8bit(0.1)
    loss = (w * w).sum()
    fl.compile(tx, backend="native")({"w": torch.ones(64, 96)}, tx.init({"w": w}), {"w": w})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _exp(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
    return -0.1 * g * torch.exp(-p), s


def _fused(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
    return torch.add(g, p, alpha=0.3), s  # torch contracts this into one rounding, where the processor can


def _decimals(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
    return torch.round(g * 0.3, decimals=2), s


def _to_int_and_back(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
    return (g * 0.3 - 1).to(torch.int32).float(), s  # -0.0 and 0.0 come back as 0.0


@slow
@pytest.mark.parametrize("leaf", [_exp, _fused, _decimals, _to_int_and_back])
def test_what_the_generator_does_not_know_is_compiled_by_inductor(leaf):
    tx = fl.leafwise(leaf, needs_params=True)
    params = {"w": torch.ones(20)}
    grads = [{"w": torch.arange(20.0)}]
    expected = run_pure(tx, params, grads)
    got = run_step(fl.compile(tx), clone(params), grads, tx.init(params))
    torch.testing.assert_close(got[0], expected[0])


def test_native_by_name_says_what_it_does_not_know():
    tx = fl.leafwise(_exp)
    params = {"w": torch.ones(20)}
    step = fl.compile(tx, backend="native")
    message = "compile: backend 'native' cannot be used: aten.exp.default"
    refuses(NotImplementedError, message, lambda: step(params, tx.init(params), params))


class One(NamedTuple):
    """One moment."""

    mu: fl.Signed


def _not_zero_at_zero(g: Tensor, s: One, p: Tensor, c: Any) -> Any:
    mu = 0.5 * s.mu + g - 3.0
    return -0.1 * mu, s._replace(mu=mu)


@slow_unless(lambda backend, format: backend != "inductor" or format == "root4")
@pytest.mark.parametrize("format", ["companded8", "dynamic8", "root4"])
@pytest.mark.parametrize("backend", ["native", "eager", "inductor"])
def test_padding_is_in_no_block(backend, format):
    tx = fl.low_bit(fl.leafwise(_not_zero_at_zero, state=One), format, min_size=0)
    params = {"w": torch.zeros(5, 257), "v": torch.zeros(64, 256)}
    grads = [fl.tree.map(lambda x, t=t: 3 + 0.1 * x, random_like(params, seed=t)) for t in range(3)]
    wanted = run_pure(tx, params, grads)
    got = run_step(fl.compile(tx, backend=backend), clone(params), grads, tx.init(params))
    assert same([q.dequantize() for q in got[1].mu.values()], [q.dequantize() for q in wanted[1].mu.values()])
    assert same(got[0], wanted[0])


def test_gradients_that_are_not_plain_memory():
    tx = fl.sgd(1.0)
    negative = torch.tensor([[3 + 4j, 1 - 2j]]).conj().imag
    assert negative.is_neg()
    for grad in (negative, torch._efficientzerotensor((1, 2)), torch.ones(1, 1).expand(1, 2)):
        params = [{"w": torch.zeros(1, 2)} for _ in range(2)]
        for p, backend in zip(params, ("native", "eager"), strict=True):
            fl.compile(tx, backend=backend)({"w": grad}, tx.init(p), p)
        assert same(*params)
        fl.global_norm({"w": grad})


def test_the_default_dtype_and_device_change_nothing():
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.low_bit(fl.leafwise(_not_zero_at_zero, state=One), min_size=17))
    params = {"w": torch.ones(5, 20)}
    wanted = run_pure(tx, params, [params])
    torch.set_default_dtype(torch.float64)
    try:
        got = run_step(fl.compile(tx, backend="native", donate=False), params, [params], tx.init(params))
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(got, wanted)
    before = square_bins([params["w"]], 256, 280)
    with torch.device("meta"):
        assert torch.equal(square_bins([params["w"]], 256, 280), before)  # type: ignore[arg-type]


def test_a_step_that_has_run_is_copied():
    tx, params = fl.adamw8bit(0.1), {"w": torch.ones(64, 96)}
    step = fl.compile(tx, backend="native", donate=False)
    first = step(params, tx.init(params), params)
    assert same(copy.deepcopy(step)(params, tx.init(params), params), first)


def test_two_threads_build_their_first_kernels():
    def train(rate: float) -> None:
        tx, params = fl.low_bit(fl.sgd(rate, 0.9, nesterov=rate > 0.15), min_size=0), {"w": torch.ones(40, 30)}
        results[rate] = fl.compile(tx, backend="native")(params, tx.init(params), {"w": torch.ones(40, 30)})[0]["w"]

    results: dict[float, Tensor] = {}
    threads = [threading.Thread(target=train, args=(rate,)) for rate in (0.1, 0.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.1, 0.2]


@slow
def test_without_a_compiler_it_says_so_and_torch_does_it():
    script = """
        import warnings
        import torch
        import functional_lowbit as fl

        tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.1))
        params = {"w": torch.ones(64, 96)}
        try:
            fl.compile(tx, backend="native")({"w": torch.ones(64, 96)}, tx.init(params), params)
        except NotImplementedError as error:
            print(error)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                fl.compile(tx)({"w": torch.ones(64, 96)}, tx.init(params), params)
            except Exception:
                pass  # inductor wants a C++ compiler too
        print(*[w.message for w in seen if "functional_lowbit" in str(w.message)])
        params, state = fl.compile(tx, backend="eager")({"w": torch.ones(64, 96)}, tx.init(params), params)
        print(round(params["w"][0, 0].item(), 4))
    """
    env = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, check=True
    )
    reason = "no C++ compiler no-such-compiler on the PATH"
    assert done.stdout.splitlines() == [
        f"compile: backend 'native' cannot be used: {reason}",
        f"functional_lowbit: torch.compile is used instead of C++: {reason}",
        "0.9",
    ]


def test_sums_of_squares_are_exact_for_every_split():
    x = torch.randn(64, 1000) * torch.exp2(torch.randint(-60, 40, (64, 1)).float())
    whole = square_bins([x], 256, 280)
    assert whole is not None
    parts = [square_bins([x[a:b]], 256, 280) for a, b in ((0, 1), (1, 30), (30, 64))]
    assert torch.equal(whole, sum(parts))  # type: ignore[arg-type]
    # Blocks of 256 squares are summed in float32: a few roundings of 6e-8 each.
    torch.testing.assert_close(fl.global_norm(x).double(), x.double().norm(), rtol=1e-6, atol=0)
