"""Leaf functions that reduce, or need whole leaves: what they may do, what they are given, and what is refused."""

import math
import pickle
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import random_like, refuses, run_pure, run_step, same
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit._core.leafwise.exact_sum import exact_sum

# What is declared elementwise ----------------------------------------------------------------------------------------

MIXING = {
    "aten.mean": lambda g, s, p, c: (g - g.mean(), s),
    "aten.sum": lambda g, s, p, c: (g / g.sum(), s),
    "aten.linalg_vector_norm": lambda g, s, p, c: (g / g.norm(), s),
    "aten.amax": lambda g, s, p, c: (g / g.abs().amax(), s),
    "aten.max": lambda g, s, p, c: (g / g.abs().max(), s),
    "aten.sort": lambda g, s, p, c: (g.sort()[0], s),
    "aten.cumsum": lambda g, s, p, c: (g.cumsum(-1), s),
    "aten.roll": lambda g, s, p, c: (g.roll(1), s),
    "aten.flip": lambda g, s, p, c: (g.flip(-1), s),
    "aten.transpose.int": lambda g, s, p, c: (g @ g.transpose(0, 1) @ g, s),
    "aten.select.int": lambda g, s, p, c: (g - g[0], s),
    "aten.any": lambda g, s, p, c: (g if g.isnan().any() else -g, s),
    "aten.var.correction": lambda g, s, p, c: (g / g.var(), s),
    "aten._softmax": lambda g, s, p, c: (g.softmax(-1), s),
    "aten.rand_like": lambda g, s, p, c: (g * torch.rand_like(g), s),
}


MIXES = (
    "which combines elements or moves them, where a rank holds only a part of them; use fl.reduce.sum, mean, norm or "
    "max and declare the function with leafwise(..., reduces=True), or have it given whole leaves with "
    "elementwise=False"
)


RANDOM = (
    "which is random, so that ranks with copies of a leaf would part; make the noise from a key with fl.rounding, or "
    "hand it in with the gradients"
)


WAY_OUT = defaultdict(lambda: MIXES, {"aten.rand_like": RANDOM, "aten.bernoulli.p": RANDOM})


@pytest.mark.parametrize("op", MIXING)
def test_a_function_that_mixes_elements_is_not_elementwise(op):
    tx = fl.leafwise(MIXING[op], name="mine")
    params = {"w": torch.ones(4)}
    message = f"mine: the leaf function <lambda> is elementwise by its declaration, but calls {op}, {WAY_OUT[op]}"
    state = tx.init(params)
    for _ in range(2):  # also when it was seen before
        refuses(ValueError, message, lambda: tx.update(params, state, params))
    for wrapped in (tx, fl.chain(fl.clip(1.0), tx), fl.low_bit(tx), fl.masked(tx, {"w": True})):
        refuses(ValueError, message, lambda wrapped=wrapped: fl.compile(wrapped))


def test_fl_reduce_is_for_functions_that_declare_it():
    tx = fl.leafwise(lambda g, s, p, c: (g - fl.reduce.mean(g), s))
    with pytest.raises(ValueError, match="is elementwise by its declaration, but calls aten"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)))


PLACEWISE = {
    "roots": lambda g, s, p, c: (fl.sqrt(g.abs()) + p.sqrt() + g.pow(3), s),
    "selections": lambda g, s, p, c: (torch.where(g > 0, torch.minimum(g, p), torch.zeros_like(g)).clamp(-1, 1), s),
    "bits": lambda g, s, p, c: ((g.view(torch.int32) & -65536).view(torch.float32), s),
    "copies": lambda g, s, p, c: (g.clone().mul_(2).double().float() + g.new_zeros(()), s),
    "special functions": lambda g, s, p, c: (
        F.logsigmoid(g // 2) + g.exp().log1p().tanh().erf() + torch.lerp(g, p, 0.5),
        s,
    ),
    "constants": lambda g, s, p, c: (g * torch.tensor(2.0) + torch.full((), 1.0).expand_as(g), s),
    "numbers of c": lambda g, s, p, c: (g * float(c.lr) + c.lr.expand(g.shape), s),
    "other shapes": lambda g, s, p, c: ((g.flatten() * 2).view(g.shape).unsqueeze(0).squeeze(0), s),
}


@pytest.mark.parametrize("name", PLACEWISE)
def test_what_keeps_each_element_at_its_place_is_elementwise(name):
    tx = fl.leafwise(PLACEWISE[name], hyperparams={"lr": 0.5})
    params = {"w": torch.rand(3, 5) + 0.5}
    update, _ = tx.update(params, tx.init(params), params)
    assert update["w"].isfinite().all()
    fl.compile(tx, backend="eager", donate=False)(params, tx.init(params), params)


def test_what_else_is_wrong_is_said_by_the_real_call():
    tx = fl.leafwise(lambda g, s, p, c: (g * c.learning_rate, s), hyperparams={"lr": 1.0})
    with pytest.raises(AttributeError, match="learning_rate"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)))
    tx = fl.leafwise(lambda g, s, p, c: (g / int("x"), s))
    with pytest.raises(ValueError, match="invalid literal for int"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)))


class Counted:
    """A leaf function that counts its calls."""

    calls = 0

    def __call__(self, g: Tensor, s: Any, p: Any, c: Any) -> Any:
        self.calls += 1
        return 2 * g, s


def test_a_function_is_tried_once():
    function = Counted()
    x = torch.ones(2)
    for _ in range(3):
        tx = fl.leafwise(function)
        tx.update(x, tx.init(x))
        tx.update(x, tx.init(x))
    assert function.calls == 2 + 6  # on two shapes


def test_the_trial_leaves_no_trace_whatever_surrounds_it():
    def fresh() -> fl.GradientTransformation:
        return fl.leafwise(lambda g, s, p, c: (g * c.factor + torch.ones(()), s), hyperparams={"factor": 2.0})

    x = torch.tensor([1.0, 2.0])
    tx = fresh()
    assert torch.equal(torch.func.grad(lambda x: fresh().update(x, tx.init(x))[0].sum())(x), torch.full((2,), 2.0))
    assert torch.equal(torch.func.vmap(lambda x: fresh().update(x, tx.init(x))[0])(x[:, None]), 2 * x[:, None] + 1)
    with torch.inference_mode():
        fresh().update(x, tx.init(x))
    with torch.device("meta"):
        assert fresh().update(torch.empty(2), tx.init(torch.empty(2)))[0].is_meta
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert fresh().update(x, tx.init(x))[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch._subclasses.FakeTensorMode():
        fresh().update(torch.empty(2), tx.init(torch.empty(2)))


# What reduces ---------------------------------------------------------------------------------------------------------


def _normalized(g: Tensor, s: Any, p: Tensor, c: Any) -> Any:
    return g / fl.reduce.norm(g) - fl.reduce.mean(g, dim=-1, keepdim=True) * torch.ones_like(p).clamp(max=c.top), s


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_rule_that_reduces_runs_between_kernels(backend):
    rule = fl.leafwise(_normalized, reduces=True, hyperparams={"top": 0.5})
    tx = fl.chain(fl.clip(1.0), rule, fl.adam8bit(0.1))
    params = {"w": torch.ones(64, 96), "b": torch.ones(7)}
    grads = [random_like(params, k) for k in range(3)]
    wanted = run_pure(tx, params, grads)
    assert same(run_step(fl.compile(tx, backend=backend, donate=False), params, grads, tx.init(params)), wanted)
    exact = (
        grads[0]["w"] / grads[0]["w"].double().norm() - 0.5 * grads[0]["w"].double().mean(-1, keepdim=True)
    ).float()
    got, _ = rule.update(grads[0], rule.init(params), params)
    torch.testing.assert_close(got["w"], exact, rtol=1e-6, atol=1e-8)


FORBIDDEN = {
    "aten.mean": lambda g, s, p, c: (g - g.mean(), s),
    "aten.linalg_vector_norm": lambda g, s, p, c: (g / torch.linalg.vector_norm(g), s),
    "aten.t": lambda g, s, p, c: (g + g.t(), s),
    "aten.mm": lambda g, s, p, c: (g @ g, s),
    "aten.bernoulli.p": lambda g, s, p, c: (g * torch.bernoulli(g, 0.5), s),
    "aten.sum.dim_IntList": lambda g, s, p, c: (g - fl.reduce.sum(g, 0, True).sum(1, True), s),
}


@pytest.mark.parametrize("op", FORBIDDEN)
def test_a_statistic_of_a_part_is_refused(op):
    tx = fl.leafwise(FORBIDDEN[op], reduces=True, name="mine")
    params = {"layers": [torch.ones(3, 3)]}
    message = f"mine.update: at 'layers.0', the leaf function <lambda> calls {op}, {WAY_OUT[op]}"
    for _ in range(2):
        refuses(ValueError, message, lambda: tx.update(params, tx.init(params), params))
        refuses(ValueError, message, lambda: fl.compile(tx)(params, tx.init(params), params))


@pytest.mark.parametrize("declared", [{}, {"reduces": True}])
def test_a_first_value_must_not_be_a_statistic_of_a_part(declared):
    tx = fl.leafwise(
        lambda g, s, p, c: (g, s), state=Mean, init=lambda p: {"mu": p / p.norm()}, name="mine", **declared
    )
    with pytest.raises(
        ValueError, match=r"^mine\.init: at 'w', the leaf function <lambda> calls aten\.linalg_vector_norm, which"
    ):
        tx.init({"w": torch.ones(2)})


class Mean(NamedTuple):
    """A moment."""

    mu: fl.Signed


def test_a_first_value_may_use_reductions():
    tx = fl.leafwise(lambda g, s, p, c: (g, s), state=Mean, init=lambda p: {"mu": p / fl.reduce.norm(p)}, reduces=True)
    assert torch.equal(tx.init(torch.tensor([3.0, 4.0])).mu, torch.tensor([0.6, 0.8]))


def test_reduce_says_what_it_can_reduce():
    g = torch.ones(2, 3)
    refuses(
        ValueError,
        "reduce.mean: dim must name one or several different dimensions of a tensor of 2, got 2; None stands for all",
        lambda: fl.reduce.mean(g, 2),
    )
    for dim in ((0, -2), (), (0, 5)):
        with pytest.raises(ValueError, match=r"^reduce\.sum: dim must name one or several different dimensions"):
            fl.reduce.sum(g, dim)
    refuses(
        TypeError, "reduce.max: x must be a floating-point tensor, got torch.int64", lambda: fl.reduce.max(g.long())
    )
    refuses(TypeError, "reduce.norm: x must be a floating-point tensor, got float", lambda: fl.reduce.norm(1.0))
    tx = fl.leafwise(lambda g, s, p, c: (g - fl.reduce.sum(fl.reduce.sum(g, 0)), s), reduces=True)
    refuses(
        ValueError,
        "reduce.sum: x must have the shape of this rank's part of the leaf at 'w', (2, 3), got (3,); reduce g, p, or "
        "what is made of them element by element (expand what is smaller)",
        lambda: tx.update({"w": g}, tx.init({"w": g})),
    )


def test_reductions_of_plain_tensors_are_exact_to_the_last_bit():
    x = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(0)) * 1e3
    d = x.double()
    for dim in (0, -1, (0, 2), (0, 1, 2)):
        for keepdim in (False, True):
            assert torch.equal(fl.reduce.sum(x, dim, keepdim), d.sum(dim, keepdim).float())
            assert torch.equal(fl.reduce.mean(x, dim, keepdim), d.mean(dim, keepdim).float())
            assert torch.equal(fl.reduce.max(x, dim, keepdim), x.amax(dim, keepdim))
            norm = torch.linalg.vector_norm(d, dim=dim, keepdim=keepdim).float()
            torch.testing.assert_close(fl.reduce.norm(x, dim, keepdim), norm, rtol=2**-24, atol=0)
    assert torch.equal(
        fl.reduce.mean(x[:, :1].expand(7, 6, 5), 0, True), d[:, :1].mean(0, True).float().expand(1, 6, 5)
    )
    assert torch.equal(fl.reduce.norm(x), fl.global_norm(x))
    assert fl.reduce.sum(x.bfloat16()).dtype == torch.float32
    assert fl.reduce.max(torch.empty(0, 3)).item() == -torch.inf
    assert fl.reduce.mean(torch.empty(0, 3)).isnan()
    assert fl.reduce.sum(torch.tensor(2.0)) == 2.0
    assert fl.reduce.sum(x, keepdim=True).shape == (1, 1, 1)


@pytest.mark.parametrize("spread", [0, 20, 60, 120])
@pytest.mark.parametrize("squares", [False, True])
def test_an_exact_sum_does_not_depend_on_the_order(spread, squares):
    """Numbers whose exponents differ by `spread`, and with signs that cancel, in many orders and cuts."""
    generator = torch.Generator().manual_seed(spread)
    x = torch.randn(600, 3, generator=generator) * torch.exp2(spread * (torch.rand(600, 3, generator=generator) - 0.5))
    x = torch.cat([x, -x * (1 + 2**-20)]) if not squares else x
    wanted = exact_sum(x, (0,), None, squares)
    for _ in range(10):
        order = torch.randperm(len(x), generator=generator)
        assert torch.equal(exact_sum(x[order], (0,), None, squares), wanted)
        assert torch.equal(exact_sum(x[order].t(), (1,), None, squares), wanted.t())
        assert torch.equal(exact_sum(x[order].view(40, -1, 3), (0, 1), None, squares), wanted[None])
    terms = (x.double() ** 2 if squares else x.double()).t().tolist()
    for got, values in zip(wanted[0].tolist(), terms, strict=True):
        bound = len(x) ** 3 * 2**-102 * max(map(abs, values)) + 2**-53 * abs(math.fsum(values))
        assert abs(got - math.fsum(values)) <= bound


def test_an_exact_sum_of_many_chunks_and_of_what_is_not_finite():
    x = torch.randn(3000, 50, generator=torch.Generator().manual_seed(0)) * 1e20
    wanted = x.double().sum(0).float()  # of so many numbers of one size, float64 has bits to spare
    torch.testing.assert_close(fl.reduce.sum(x, 0), wanted, rtol=2**-23, atol=0)
    assert torch.equal(fl.reduce.sum(x, 1), fl.reduce.sum(x.t().contiguous(), 0))
    x[2999, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x[0, 0] = -torch.inf
    got = fl.reduce.sum(x, 0)
    assert got[:3].isnan().tolist() == [True, False, True]
    assert got[1] == -torch.inf
    assert torch.equal(got[3:], fl.reduce.sum(x[:, 3:], 0))
    tiny = torch.full((5, 2), 2.0**-149)
    assert torch.equal(fl.reduce.sum(tiny, 0), torch.full((2,), 5 * 2.0**-149))
    assert torch.equal(fl.reduce.norm(torch.full((4, 2), 1e30), 0), torch.full((2,), 2e30))


def test_derivatives_go_through_reductions_and_whole_leaves():
    def centered(g: Tensor, s: Any, p: Any, c: Any) -> Any:
        return (g - fl.reduce.mean(g)) * fl.reduce.norm(g), s

    def plainly(g: Tensor, s: Any, p: Any, c: Any) -> Any:
        return (g - g.mean()) * g.norm(), s

    weight, x = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, -1.0, 2.0])
    wanted = torch.func.grad(lambda x: (weight * (x - x.mean()) * x.norm()).sum())(x)
    for tx in (fl.leafwise(centered, reduces=True), fl.leafwise(plainly, elementwise=False)):

        def loss(x: Tensor, tx: Any = tx) -> Tensor:
            return (weight * tx.update(x, tx.init(x))[0]).sum()

        y = x.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(loss(y), y)[0], wanted)
        torch.testing.assert_close(torch.func.grad(loss)(x), wanted)
        pair = torch.stack([x, 2 * x])
        each = torch.func.vmap(lambda x, tx=tx: tx.update(x, tx.init(x))[0])(pair)
        torch.testing.assert_close(each[1], tx.update(2 * x, tx.init(x))[0])


# Whole leaves ---------------------------------------------------------------------------------------------------------


def test_a_whole_leaf_is_plain_and_contiguous():
    seen: list[Any] = []

    def update(g: Tensor, s: Mean, p: Tensor, c: Any) -> Any:
        seen.append([(type(x), x.dtype, x.is_contiguous()) for x in (g, s.mu, p)])
        return torch.linalg.pinv(g), s._replace(mu=g.flip(0))

    tx = fl.leafwise(update, state=Mean, elementwise=False, needs_params=True)
    params = {"w": torch.nn.Parameter(torch.rand(4, 4).bfloat16())}
    updates, _ = tx.update(
        {
            "w": torch.rand(4, 4).t().bfloat16(),
        },
        tx.init(params),
        params,
    )
    assert seen == [[(Tensor, torch.float32, True)] * 3]
    assert updates["w"].dtype == torch.bfloat16


# The rules ------------------------------------------------------------------------------------------------------------


def test_orthogonalize_brings_singular_values_near_one():
    """Jordan's coefficients: what is above 0.01 of the norm ends between 0.68 and 1.21 (the map's own extrema)."""
    for shape in ((20, 50), (50, 20), (30, 30)):
        q, r = torch.linalg.qr(torch.randn(max(shape), min(shape), generator=torch.Generator().manual_seed(0)))
        g = q * torch.linspace(0.2, 1.0, min(shape))
        g = g if shape[0] >= shape[1] else g.T
        tx = fl.orthogonalize()
        u, _ = tx.update({"w": g, "b": torch.ones(3)}, tx.init({"w": g, "b": torch.ones(3)}))
        values = torch.linalg.svdvals(u["w"])
        assert values.min() > 0.68
        assert values.max() < 1.21
        torch.testing.assert_close(u["w"] @ g.T, (u["w"] @ g.T).T, atol=1e-4, rtol=0)  # the same singular vectors
        assert torch.equal(u["b"], torch.ones(3))
        assert r.shape[0] == min(shape)


def test_what_the_rules_refuse():
    for call, message in {
        lambda: fl.orthogonalize((1.0, 2.0)): "orthogonalize: ns_coeffs must be three numbers, got (1.0, 2.0)",
        lambda: fl.orthogonalize(ns_steps=0): "orthogonalize: ns_steps must be an int of at least 1, got 0",
        lambda: fl.scale_by_muon(beta=1.0): "scale_by_muon: beta must be in [0, 1), got 1.0",
        lambda: fl.scale_by_trust_ratio(-1.0): "scale_by_trust_ratio: min_norm must be at least 0, got -1.0",
        lambda: fl.scale_by_factored_rms(epsilon=-1.0): "scale_by_factored_rms: epsilon must be at least 0, got -1.0",
    }.items():
        refuses(ValueError, message, call)
    tx, x = fl.scale_by_trust_ratio(), torch.ones(2)
    refuses(
        ValueError,
        "scale_by_trust_ratio.update: params are needed; call update(updates, state, params)",
        lambda: tx.update(x, tx.init(x)),
    )


@pytest.mark.parametrize("make", [fl.centralize, fl.scale_by_factored_rms, fl.orthogonalize, fl.scale_by_muon])
def test_a_rule_survives_pickling(make):
    tx, params = make(), {"w": torch.rand(130, 140)}
    again = pickle.loads(pickle.dumps(tx))
    assert same(again.update(params, again.init(params), params), tx.update(params, tx.init(params), params))


def test_a_partial_is_named_by_its_function():
    def mean_of(factor: float, g: Tensor, s: Any, p: Any, c: Any) -> Any:
        return factor * g.mean(), s

    tx = fl.leafwise(partial(mean_of, 2.0), elementwise=False)
    with pytest.raises(ValueError, match=r"^leafwise: mean_of must return float32 tensors of g's shape \(2,\)"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)))
