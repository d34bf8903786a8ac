"""convert=True: another format or block size is read and written leaf by leaf; what is never converted."""

from typing import Any

import pytest
import torch
from checkpoint_states import after_two_steps, make_params
from helpers import clone, random_like, refuses, same

import functional_lowbit as fl
from functional_lowbit._core.state.quantized import encode
from functional_lowbit.checkpoint._reading import write_again

NEVER_CONVERTED = {
    "shape": (
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        {"m": fl.quantize(torch.ones(8, 17), "companded8")},
        "leaf 'm' was saved with shape [8, 16], but the state has [8, 17]",
    ),
    "sign": (
        {"m": fl.quantize(torch.ones(8, 16), "companded8", signed=False)},
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        "leaf 'm' was saved with signed False, but the state has True",
    ),
    "dtype": (
        {"m": torch.ones(3)},
        {"m": torch.ones(3, dtype=torch.bfloat16)},
        "leaf 'm' was saved with dtype 'float32', but the state has 'bfloat16'",
    ),
    "few bits and another dtype": (
        {"m": torch.ones(8, 16, dtype=torch.float64)},
        {"m": fl.quantize(torch.ones(8, 16), "companded8")},
        "leaf 'm' was saved with kind 'tensor', but the state has 'quantized'",
    ),
    "number": ({"m": 3}, {"m": True}, "leaf 'm' was saved with kind 'int', but the state has 'bool'"),
    "number and tensor": (
        {"m": 3},
        {"m": torch.tensor(3)},
        "leaf 'm' was saved with kind 'int', but the state has 'tensor'",
    ),
}


@pytest.mark.parametrize("name", NEVER_CONVERTED)
def test_what_is_never_converted(name):
    was, has, message = NEVER_CONVERTED[name]
    refuses(
        ValueError, f"load_state_dict: {message}", lambda: fl.load_state_dict(has, fl.state_dict(was), convert=True)
    )


def test_an_unknown_format():
    mine = fl.formats.get("root4")._replace(name="mine")
    saved = fl.state_dict({"m": fl.quantize(torch.ones(8, 16), mine)})
    assert fl.load_state_dict({"m": fl.quantize(torch.zeros(8, 16), mine)}, saved)["m"].format is mine
    message = "load_state_dict: leaf 'm' was saved with the format 'mine', which formats.names() lacks"
    refuses(ValueError, message, lambda: fl.load_state_dict({"m": torch.ones(8, 16)}, saved, convert=True))


KEPT = [*fl.formats.names(), "root4 in blocks of 32", "plain"]


def _moment(kept: str, signed: bool, shape: tuple[int, ...], seed: int) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = x if signed else x.square()
    if kept == "plain":
        return x
    name, *words = kept.split()
    return fl.quantize(x, name, signed=signed, block_size=int(words[-1]) if words else None)


@pytest.mark.parametrize("has", KEPT)
@pytest.mark.parametrize("was", KEPT)
def test_conversion_reads_and_writes_each_leaf(was, has):
    """What is loaded is what `quantize` makes of the numbers that the saved leaf stands for."""
    for signed in (True, False):
        for shape in ((33, 70), (1000,), (0, 4), (3, 4, 50)):
            old, own = _moment(was, signed, shape, 0), _moment(has, signed, shape, 1)
            before = clone((old, own))
            saved = fl.state_dict({"m": old, "step": torch.tensor(3)})
            new = fl.load_state_dict({"m": own, "step": torch.tensor(0)}, saved, convert=True)["m"]
            assert same((old, own), before)
            if was == has:
                assert same(new, old)
                continue
            numbers = old if was == "plain" else old.dequantize()
            wanted = (
                numbers
                if has == "plain"
                else fl.quantize(numbers, own.format, signed=signed, block_size=own.block_size)
            )
            if has == "plain":
                assert torch.equal(new, wanted)
            else:
                assert new.layout == own.layout
                assert torch.equal(new.dequantize(), wanted.dequantize()) or not new.format.codec(signed).idempotent


@pytest.mark.parametrize("name", ["dynamic8", "dynamic4"])
def test_numbers_that_were_read_are_written_with_their_codes(name):
    """Also where the map has no -1: blocks whose largest number is negative keep codes and numbers, bit for bit."""
    layout = fl.quantize(torch.empty(0, 256), name, block_size=64).layout._replace(shape=(1000, 256))
    x = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 1000)[:, None]
    x[1, :] = 0
    x[2, 3:] = 0
    x[3, 5] = float("nan")
    x[4, 5] = -float("inf")
    old = encode(x, layout)
    new = write_again(old.dequantize(), layout)
    assert torch.equal(new.codes, old.codes)
    assert torch.equal(new.dequantize(), old.dequantize())
    assert (new.scales - old.scales).count_nonzero() <= 2  # where other numbers of the block do not tell the scale
    assert not torch.equal(encode(old.dequantize(), layout).codes, old.codes)  # which is why


def test_a_conversion_trains_on():
    """From 8 bits into 4, and from float32 into 8: a step of the converted state is near to that of the old one."""
    params = make_params()
    for was, has, bound in (
        (fl.adam8bit, fl.adam4bit, 0.3),
        (fl.adam, fl.adam8bit, 0.02),
        (fl.adam8bit, fl.adam, 1e-6),
    ):
        state = after_two_steps(was(0.1))
        new = fl.load_state_dict(has(0.1).init(params), fl.state_dict(state), convert=True)
        g = random_like(params, 5)
        old_u, new_u = was(0.1).update(g, state, params)[0]["w"], has(0.1).update(g, new, params)[0]["w"]
        assert (new_u - old_u).norm() <= bound * old_u.norm()
        assert new[0].step == 2
