"""fl.convert.from_bitsandbytes: bitsandbytes' own optimizers, which run on the CPU."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

import functional_lowbit as fl

LR = 1e-2
# Rows of whole blocks, rows that divide a block (the last block is half full), rows that do neither; and too small.
SHAPES = {"long": (16, 512), "short": (33, 128), "odd": (128, 96), "bias": (64,)}
KEPT = ("long", "short")


class Kind(NamedTuple):
    """An optimizer there and here, and the fields of its moments."""

    make: Callable[[Any], torch.optim.Optimizer]
    tx: fl.GradientTransformation
    fields: tuple[str, ...]


def low(tx: fl.GradientTransformation) -> fl.GradientTransformation:
    return fl.low_bit(tx, "dynamic8")


ADAM = ("mu", "nu")
KINDS = {
    "AdamW8bit": Kind(
        lambda p: bnb.optim.AdamW8bit(p, LR, weight_decay=0.1), low(fl.adamw(LR, weight_decay=0.1)), ADAM
    ),
    "PagedAdamW8bit": Kind(lambda p: bnb.optim.PagedAdamW8bit(p, LR), low(fl.adamw(LR, weight_decay=1e-2)), ADAM),
    "Adam8bit": Kind(lambda p: bnb.optim.Adam8bit(p, LR), low(fl.adam(LR)), ADAM),
    "Lion8bit": Kind(lambda p: bnb.optim.Lion8bit(p, LR), low(fl.lion(LR, weight_decay=0.0)), ("mu",)),
    "SGD8bit": Kind(lambda p: bnb.optim.SGD8bit(p, LR, momentum=0.9), low(fl.sgd(LR, 0.9)), ("trace",)),
    "AdamW32bit": Kind(lambda p: bnb.optim.AdamW32bit(p, LR), fl.adamw(LR, weight_decay=1e-2), ADAM),
}


def gradients(k: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 + k)
    return {name: 0.1 * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def train(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
        for k in steps:
            for p, g in zip(params.values(), gradients(k).values(), strict=True):
                p.grad = g
            optimizer.step()


def made(kind: str, steps: int) -> tuple[dict[str, nn.Parameter], Any]:
    source = torch.Generator().manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape, generator=source)) for name, shape in SHAPES.items()}
    optimizer = KINDS[kind].make(list(params.values()))
    train(params, optimizer, range(steps))
    return params, optimizer


def numbers(state: dict[str, Any], i: int) -> Tensor:
    x = state[f"state{i}"]
    if x.dtype == torch.float32:
        return x
    return bnb.functional.dequantize_blockwise(x, absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256)


@pytest.mark.parametrize("kind", KINDS)
def test_codes(kind: str, tmp_path: Path):
    """Equal where no block of ours crosses one of theirs; else within half a step of the map, of the largest number."""
    params, optimizer = made(kind, 3)
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert fl.convert.library_of(saved) == "bitsandbytes"
    plain = {name: p.detach() for name, p in params.items()}
    state = fl.convert.from_bitsandbytes(saved, KINDS[kind].tx.init(plain))[0]
    assert state.step == 3
    for name, p in params.items():
        entries = optimizer.state[p]
        for i, field in enumerate(KINDS[kind].fields, 1):
            ours, theirs = getattr(state, field)[name], numbers(entries, i)
            if not isinstance(ours, fl.QuantizedTensor):
                assert torch.equal(ours, theirs)
                continue
            apart = (ours.dequantize() - theirs).abs()
            if name in KEPT:
                assert torch.equal(ours.codes.flatten(), entries[f"state{i}"].flatten())
                assert apart.max() <= 4e-7 * theirs.abs().max()  # our values: 2 ulp from the table
            else:
                worst = float((apart.view(-1, 96) / theirs.abs().view(-1, 96).amax(-1, keepdim=True)).max())
                print(f"{field}: {worst:.4f} of the block's largest")
                assert worst <= 0.9 / (128 if field == "nu" else 64) / 2 + 1e-6  # and some ulp


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_there_and_ten_here(kind: str):
    """Against twenty there, in learning rates.

    In float32, ten steps have some ulp of a parameter below 4 each, 5e-5 learning rates. In 8 bits sums fall to the
    other side of a tie now and then, and leaves whose rows are shorter than a block have scales of their own here: a
    code is a tenth of its value, less than a learning rate in all. Lion takes signs, so an element next to 0 goes the
    other way, two learning rates apart each time; at most 5% of them do.
    """
    params, optimizer = made(kind, 10)
    tx = KINDS[kind].tx
    ours = {name: p.detach().clone() for name, p in params.items()}
    state = fl.convert.from_bitsandbytes(optimizer.state_dict(), tx.init(ours), ours)
    step = fl.compile(tx, backend="eager")
    for k in range(10, 20):
        ours, state = step(gradients(k), state, ours)
    train(params, optimizer, range(10, 20))
    for name, p in params.items():
        apart = (ours[name] - p.detach()).abs() / LR
        print(f"{kind} {name}: {float(apart.max()):.3f} lr at most, {float(apart.square().mean().sqrt()):.5f} rms")
        exact = name == "bias" or "32" in kind
        if "Lion" in kind and not exact:
            assert (apart > 1).double().mean() <= 0.05
        else:
            assert apart.max() <= (5e-4 if exact else 1.0)
            assert apart.square().mean().sqrt() <= (1e-4 if exact else 0.1)


def test_blocks_of_zeros():
    """A row without gradients has scales of 0 there, which ours have not: written anew, as zeros. The rest is kept."""
    p = nn.Parameter(torch.ones(16, 512))
    optimizer = bnb.optim.AdamW8bit([p], LR)
    p.grad = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    p.grad[5] = 0
    optimizer.step()
    state = fl.convert.from_bitsandbytes(optimizer, KINDS["AdamW8bit"].tx.init({"w": p.detach()}))[0]
    entries = optimizer.state[p]
    assert not entries["absmax1"][10:12].any()
    others = [i for i in range(16) if i != 5]
    for leaf, i in ((state.mu["w"], 1), (state.nu["w"], 2)):
        assert not leaf.dequantize()[5].any()
        assert torch.equal(leaf.codes[others], entries[f"state{i}"][others])
        assert torch.equal(leaf.scales[others], entries[f"absmax{i}"].view(16, 2)[others])


def test_into_an_optimizer():
    params, optimizer = made("AdamW8bit", 2)

    def adamw(lr: Any, betas: Any, weight_decay: Any) -> fl.GradientTransformation:
        return fl.adamw8bit(lr, *betas, weight_decay=weight_decay, format="dynamic8")

    defaults = {"lr": 1.0, "betas": (0.5, 0.5), "weight_decay": 1.0}
    ours = fl.optim.Optimizer(params.items(), adamw, defaults, backend="eager")
    ours.load_state_dict(fl.convert.from_bitsandbytes(optimizer, ours))
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (LR, (0.9, 0.999), 0.1)
    p = params["long"]
    assert torch.equal(ours.state[p]["0.nu.codes"].flatten(), optimizer.state[p]["state2"].flatten())


def test_without_a_model():
    params, optimizer = made("AdamW8bit", 2)
    saved = optimizer.state_dict()
    found = fl.convert.params_of(saved)
    assert [tuple(p.shape) for p in found.values()] == list(SHAPES.values())
    state = fl.convert.from_saved(saved, KINDS["AdamW8bit"].tx.init(found), found)[0]
    assert torch.equal(state.mu["0"].codes.flatten(), optimizer.state[params["long"]]["state1"].flatten())


def test_the_example_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "conversion.md").read_text()
    code = next(x for x in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "bitsandbytes" in x)
    exec(code, {})


def test_what_is_refused():
    params = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    plain = {name: p.detach() for name, p in params.items()}
    for make, tx, text in (
        (
            lambda p: bnb.optim.AdEMAMix8bit(p, LR),
            fl.adamw(LR),
            "'state1' of parameter 1 has 34 scales and a map of 256",
        ),
        (lambda p: bnb.optim.RMSprop8bit(p, LR), fl.sgd(LR, 0.9), "parameter 0 has state1 alone, and the eps"),
        (
            lambda p: bnb.optim.SGD8bit(p, LR, momentum=0.9),
            fl.lion(LR),
            "parameter 0 has 'state1', which is trace here",
        ),
        (lambda p: bnb.optim.Lion8bit(p, LR), fl.adamw(LR), "parameter 0 has state1, and nothing for 0.nu.long"),
    ):
        optimizer = make(list(params.values()))
        train(params, optimizer, range(1))
        with pytest.raises(ValueError, match=f"^from_bitsandbytes: {text}"):
            fl.convert.from_bitsandbytes(optimizer.state_dict(), tx.init(plain))
