"""low_bit(adamw(...), "dynamic8") beside torchao.optim.AdamW8bit: same weights, same gradients, same codes.

torchao runs by its eager path (`force_eager`), which has the arithmetic of its compiled one and does not compile for
each shape. Rows here hold whole blocks of 256, where its blocks, which run over the flattened tensor, are ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchao.optim import AdamW8bit

import functional_lowbit as fl

STEPS, LR, B1, B2, EPS, DECAY = 30, 1e-2, 0.9, 0.999, 1e-8, 0.1
SHAPES = {"square": (64, 256), "tall": (96, 512), "conv": (16, 16, 32), "bias": (64,)}  # bias: too small for 8 bits
STORED = ("square", "tall", "conv")
Leaves = dict[str, Tensor]


class Side(NamedTuple):
    """What a run ends with."""

    params: Leaves
    codes: dict[str, tuple[Tensor, Tensor]]  # int64, flat, of the first and the second moment
    scales: dict[str, tuple[Tensor, Tensor]]  # float32, flat


def draw(shapes: dict[str, tuple[int, ...]], per_element: float) -> tuple[Leaves, list[Leaves]]:
    """Parameters, and gradients with a common direction and heavy-tailed noise (a product of two normals).

    Their size differs by up to 100 from row to row, and by up to `per_element` inside a row.
    """
    source = torch.Generator().manual_seed(0)

    def tree(f: Callable[[tuple[int, ...]], Tensor]) -> Leaves:
        return {name: f(shape) for name, shape in shapes.items()}

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=source)

    def size(shape: tuple[int, ...]) -> Tensor:
        rows = 100.0 ** torch.rand(shape[0], *(1 for _ in shape[1:]), generator=source)
        return 1e-3 * rows * per_element ** torch.rand(shape, generator=source)

    params, sizes, direction = tree(normal), tree(size), tree(normal)
    grads = []
    for _ in range(STEPS):
        noise = tree(lambda shape: normal(shape) * normal(shape))
        grads.append({name: sizes[name] * (0.5 * direction[name] + noise[name]) for name in shapes})
    return params, grads


def torchao_side(params: Leaves, grads: list[Leaves]) -> Side:
    modules = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    optimizer = AdamW8bit(modules.values(), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY, block_size=256)
    with torch.compiler.set_stance("force_eager"):
        for step in grads:
            for name, p in modules.items():
                p.grad = step[name].clone()
            optimizer.step()
    moments = {
        name: (optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
        for name, p in modules.items()
        if name != "bias"
    }
    return Side(
        {name: p.detach() for name, p in modules.items()},
        {name: tuple(m.codes.flatten().long() for m in both) for name, both in moments.items()},
        {name: tuple(m.scale.flatten() for m in both) for name, both in moments.items()},
    )


def our_side(tx: fl.GradientTransformation, params: Leaves, grads: list[Leaves]) -> Side:
    step, state = fl.compile(tx, backend="eager", donate=False), tx.init(params)
    for g in grads:
        params, state = step(g, state, params)
    moments: dict[str, Any] = {
        name: (state[0].mu[name], state[0].nu[name])
        for name in params
        if isinstance(state[0].mu[name], fl.QuantizedTensor)
    }
    return Side(
        params,
        {name: tuple(m.codes.flatten().long() for m in both) for name, both in moments.items()},
        {name: tuple(m.scales.flatten() for m in both) for name, both in moments.items()},
    )


def adamw() -> fl.GradientTransformation:
    return fl.adamw(LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


def error(side: Side, reference: Side, name: str) -> float:
    """Root mean square of the difference from a run in float32, in learning rates."""
    return float((side.params[name] - reference.params[name]).square().mean().sqrt()) / LR


@pytest.fixture(scope="module")
def sides() -> dict[str, Side]:
    params, grads = draw(SHAPES, per_element=1.0)
    return {
        "torchao": torchao_side(params, grads),
        "dynamic8": our_side(fl.low_bit(adamw(), "dynamic8"), params, grads),
        "companded8": our_side(fl.low_bit(adamw(), "companded8"), params, grads),
        "float32": our_side(adamw(), params, grads),
    }


@pytest.mark.parametrize("name", STORED)
def test_codes_after_30_steps(sides, name):
    """Equal, but for numbers that rounding moves across a tie: 1 in 1000 at most, by one code.

    The float32 sums of both sides differ in their last bits, so scales do by up to 1e-6. A cell is 1e-2 to 1e-1 wide,
    so 1e-5 to 1e-4 of all numbers cross a tie at a step, and some of them stay apart for a few more. Measured: 8 of
    147,456 codes.
    """
    for ours, theirs in zip(sides["dynamic8"].codes[name], sides["torchao"].codes[name], strict=True):
        apart = (ours - theirs).abs()
        print(f"{name}: {int((apart > 0).sum())} of {apart.numel()} codes differ")
        assert apart.max() <= 1
        assert (apart > 0).sum() <= 1e-3 * apart.numel()
    for ours, theirs in zip(sides["dynamic8"].scales[name], sides["torchao"].scales[name], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_params_after_30_steps(sides, name):
    """Within 2e-5, as against optax, but for elements one of whose codes once fell to the other side of a tie.

    A code is up to 1/10 of its value from the next one, so such an element's step changes by some percent for some
    steps: less than one learning rate in all. Measured: 0.2 learning rates at most, and 20 of 73,792 elements.
    """
    apart = (sides["dynamic8"].params[name] - sides["torchao"].params[name]).abs()
    crossed = int((apart > 2e-5).sum())
    print(f"{name}: {float(apart.max()) / LR:.2e} lr at most, {crossed} of {apart.numel()} above 2e-5")
    assert crossed <= 1e-3 * apart.numel()
    assert apart.max() < LR
    if name == "bias":
        assert crossed == 0


@pytest.mark.parametrize("name", STORED)
def test_companded8_is_nearer_to_float32(sides, name):
    """On the same run, companded8's error is at most 0.6 of dynamic8's, and dynamic8's is torchao's.

    Measured, in learning rates after 30 steps: companded8 0.117, dynamic8 and torchao 0.213.
    """
    theirs, dynamic, companded = (
        error(sides[s], sides["float32"], name) for s in ("torchao", "dynamic8", "companded8")
    )
    print(f"{name}: torchao {theirs:.4f}, dynamic8 {dynamic:.4f}, companded8 {companded:.4f} lr")
    assert dynamic == pytest.approx(theirs, rel=1e-2)
    assert companded <= 0.6 * dynamic


def test_where_torchao_reads_a_live_second_moment_as_0():
    """Gradients that differ by 10,000 inside a block, so second moments below 1.6e-7 of the largest.

    torchao writes those as 0, and a zero under a live first moment is a step of m / eps: the run diverges. Ours are the
    smallest number that is not 0. The rest differs by 2% of the codes at most, since what was forgotten lags behind.
    Measured, in learning rates from float32: torchao 1429, dynamic8 4.0, companded8 8.3 (its smallest number is
    1.5e-5 of the largest, so very small second moments are rounded up further).
    """
    params, grads = draw({"wide": (64, 256)}, per_element=1e4)
    theirs = torchao_side(params, grads)
    ours = our_side(fl.low_bit(adamw(), "dynamic8"), params, grads)
    companded = our_side(fl.low_bit(adamw(), "companded8"), params, grads)
    reference = our_side(adamw(), params, grads)
    their_nu, our_nu = theirs.codes["wide"][1], ours.codes["wide"][1]
    forgotten = (their_nu == 0) & (our_nu != 0)
    errors = {k: error(v, reference, "wide") for k, v in (("ao", theirs), ("d8", ours), ("c8", companded))}
    print(f"{int(forgotten.sum())} of {our_nu.numel()} forgotten; errors in lr: {errors}")
    assert forgotten.any()
    assert (our_nu[forgotten] == 1).all()
    assert (our_nu > 0).all()
    assert (companded.codes["wide"][1] > 0).all()
    assert ((their_nu != our_nu) & ~forgotten).sum() <= 2e-2 * our_nu.numel()
    assert max(errors["d8"], errors["c8"]) < 0.01 * errors["ao"]
