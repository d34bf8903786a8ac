"""fl.convert.from_flashoptim: states that FlashOptim itself made, and its formulas written a second time.

tests/convert/flashoptim.pt is from FlashOptim 0.1.4, by `scripts/flashoptim_state.py`: its own kernels, run by Triton's
interpreter, since they need CUDA otherwise.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import clone, refuses, same
from torch import Tensor

import functional_lowbit as fl
from functional_lowbit.convert._flashoptim import master_of, split

FILE = torch.load(Path(__file__).parent / "flashoptim.pt", weights_only=True)
FIELDS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}


def _rule(name: str) -> fl.GradientTransformation:
    """The same optimizer, with groups of 32 as there."""
    if name.startswith("sgd"):
        tx = fl.sgd(1e-2, 0.9)
    elif name.startswith("lion"):
        tx = fl.lion(1e-3, weight_decay=0.0)
    else:
        tx = fl.adamw(1e-2, weight_decay=1e-2 if name.startswith("adamw") else 0.0)
    return fl.low_bit(tx, "companded8", block_size=32, min_size=100)


def _params(name: str) -> dict[str, Tensor]:
    return {str(i): p.clone() for i, p in enumerate(FILE[name]["params"])}


def _numbers(leaf: Any) -> Tensor:
    return leaf.dequantize() if isinstance(leaf, fl.QuantizedTensor) else leaf


@pytest.mark.parametrize("name", FILE)
def test_moments(name: str):
    """First moments keep their codes; second ones have 254 steps here and 255 there, and are rounded once.

    A root is off by half of 1/254 of the group's largest at most, so a number by 1/254 + 1/508**2 of it.
    """
    saved, params = FILE[name]["saved"], _params(name)
    before = clone(saved)
    state = fl.convert.from_flashoptim(saved, _rule(name).init(params), params)[0]
    assert same(saved, before)
    for i, moments in enumerate(FILE[name]["moments"]):
        for entry, wanted in moments.items():
            leaf = getattr(state, FIELDS[entry])[str(i)]
            codes = saved["state"][i].get(f"{entry}::quantized")
            kept = codes is not None and (entry != "exp_avg_sq" or i == 1)
            if i == 0:
                assert isinstance(leaf, fl.QuantizedTensor)
                if kept:
                    assert torch.equal(leaf.codes, codes)
            # The interpreter's division and our product with 1 / 127 differ by some ulp.
            largest = 4e-7 if i == 1 or kept else 1 / 254 + 1 / 508**2
            assert (_numbers(leaf) - wanted).abs().max() <= largest * wanted.abs().max()
    if "exp_avg_sq" in FILE[name]["moments"][0]:
        assert state.step == 3


@pytest.mark.parametrize("name", [name for name in FILE if "bits" in name])
@pytest.mark.parametrize("bits", [8, 16])
def test_masters(name: str, bits: int):
    """What is kept in 16 bits is the whole float32 master; 8 bits keep 2**-16 of it (float16: 2**-19)."""
    params = _params(name)
    tx = fl.master_weights(_rule(name), bits)
    state = fl.convert.from_flashoptim(FILE[name]["saved"], tx.init(params), params)
    for i, master in enumerate(FILE[name]["masters"]):
        ours = fl.master_params(params, state)[str(i)]
        half = params[str(i)].dtype
        tolerance = 2.0**-24 if bits == 16 else 2.0**-16 if half == torch.bfloat16 else 2.0**-19
        assert ((ours - master).abs() <= tolerance * master.abs()).all()
        assert torch.equal(ours.to(half), params[str(i)])


@pytest.mark.parametrize("name", FILE)
def test_the_training_goes_on(name: str):
    """Three more steps here and there, from one state and with the same gradients: masters within 2% of their way.

    Each side rounds moments to 8 bits at each step, FlashOptim's scales to 11 bits: 1/254 of the group's largest a
    step. Lion takes the sign: an element whose sum is next to 0 may go the other way.
    """
    params = _params(name)
    tx = fl.master_weights(_rule(name))
    state = fl.convert.from_flashoptim(FILE[name]["saved"], tx.init(params), params)
    step = fl.compile(tx, backend="eager")
    for gradients in FILE[name]["grads"]:
        params, state = step({str(i): g for i, g in enumerate(gradients)}, state, params)
    for i, (first, last) in enumerate(zip(FILE[name]["masters"], FILE[name]["later"], strict=True)):
        way, apart = (last - first).norm(), (fl.master_params(params, state)[str(i)] - last).norm()
        print(f"{name}, {i}: {float(apart / way):.4f}")
        assert apart <= 0.02 * way


def _encoded(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """FlashOptim's formulas in float64, groups of 32 of a flat tensor."""
    groups = torch.nn.functional.pad(x.double().flatten(), (0, -x.numel() % 32)).view(-1, 32)
    groups = groups if signed else groups.sqrt()
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    y = groups / largest
    codes = torch.floor(127 * 2 * y / (1 + y.abs()) + 0.5) if signed else torch.floor(255 * y + 0.5)
    dtype = torch.int8 if signed else torch.uint8
    return codes.flatten()[: x.numel()].view(x.shape).to(dtype), largest.flatten().to(torch.float16)


@pytest.mark.parametrize("format", ["companded8", "float32", "root4"])
def test_an_encoder_of_our_own(format: str):
    """Decoded as FlashOptim does, in float64; groups of 32 run over rows of 33."""
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(0))
    (m, m_scales), (v, v_scales) = _encoded(x, True), _encoded(x * x, False)
    saved = {
        "state": {
            0: {
                "exp_avg::quantized": m,
                "exp_avg::scales": m_scales.view(torch.bfloat16),  # as beside bfloat16 parameters
                "exp_avg_sq::quantized": v,
                "exp_avg_sq::scales": v_scales,
                "step": torch.tensor(7),
            }
        },
        "param_groups": [{"params": [0], "master_bytewidth": 0}],
    }

    def each(scales: Tensor) -> Tensor:
        return scales.double().repeat_interleave(32)[: x.numel()].view(x.shape)

    t = m.double() / 127
    mu, nu = each(m_scales) * t / (2 - t.abs()), (each(v_scales) * v.double() / 255) ** 2
    tx = fl.low_bit(fl.scale_by_adam(), format, min_size=0)
    state = fl.convert.from_flashoptim(saved, tx.init({"w": x}))
    assert state.step == 7
    for leaf, wanted, signed in ((state.mu["w"], mu, True), (state.nu["w"], nu, False)):
        if format == "float32":
            torch.testing.assert_close(leaf.double(), wanted, rtol=3e-7, atol=0)  # three roundings to float32
        else:  # one quantization: the codes are those of the decoded numbers
            again = fl.quantize(wanted.float(), format, signed=signed)
            assert torch.equal(leaf.codes, again.codes)
            torch.testing.assert_close(leaf.scales, again.scales, rtol=2.0**-19, atol=0)  # root4's have 20 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", [torch.int8, torch.int16])
@pytest.mark.parametrize("share", [0.0, 0.5, -0.5, 1.0])
def test_masters_at_the_edges(dtype: torch.dtype, error: torch.dtype, share: float):
    """Powers of two, 0, subnormal numbers and errors of half a step: the parameter stays, the master is the nearest.

    `share` is of half a step outward. At a power of two the step inward is half as long: there -0.5 is half of it.
    """
    p = torch.tensor([1.0, -1.0, 2.0, 1.5, 0.0, -3.0, 2.0**-14, -(2.0**-20), 2.0**-24, 100.0], dtype=dtype)
    e = (torch.where(p < 0, -share, share) * torch.iinfo(error).max).trunc().to(error)
    mantissa, smallest = (7, 2.0**-126) if dtype == torch.bfloat16 else (10, 2.0**-14)
    step = 2.0 ** (torch.log2(p.double().abs().clamp_min(smallest)).floor() - mantissa)
    wanted = p.double() + e.double() / torch.iinfo(error).max * step / 2
    torch.testing.assert_close(master_of(p, e).double(), wanted, rtol=2.0**-24, atol=2.0**-150)
    for bits in (8, 16):
        codes = split(p, e, bits)
        codes = codes if bits == 8 else codes.unsqueeze(-1).view(torch.int8)
        ours = fl.master_params({"w": p}, fl.MasterWeightsState({"w": codes}, None))["w"].double()
        # Half a step up has no code: it is one unit less. A unit is the step's share of the bits, or 2**-37.
        unit = step / 2.0 ** min(bits, 16 if dtype == torch.bfloat16 else 13)
        assert ((ours - wanted).abs() <= unit.clamp_min(2.0**-37 if dtype == torch.float16 else 0.0)).all()


def _saved(**entries: Any) -> dict[str, Any]:
    return {"state": {0: entries}, "param_groups": [{"params": [0], "master_bytewidth": 3}]}


def test_errors():
    params = {"w": torch.zeros(2, 4, dtype=torch.bfloat16)}
    state = fl.master_weights(fl.scale_by_lion()).init(params)
    codes, scales = torch.zeros(2, 4, dtype=torch.int8), torch.ones(1, dtype=torch.float16)
    whole = {"exp_avg::quantized": codes, "exp_avg::scales": scales}
    refuses(
        ValueError,
        "from_flashoptim: 'exp_avg' of parameter 0 must have tensors '::quantized' and '::scales'; the file is damaged",
        lambda: fl.convert.from_flashoptim(_saved(**{"exp_avg::quantized": codes}), state, params),
    )
    refuses(
        ValueError,
        "from_flashoptim: 'exp_avg' of parameter 0 has 2 scales for 8 elements in groups of 32; the file is damaged",
        lambda: fl.convert.from_flashoptim(_saved(**{**whole, "exp_avg::scales": scales.repeat(2)}), state, params),
    )
    saved = _saved(**whole, error_bits=codes)
    refuses(
        ValueError,
        "from_flashoptim: 'error_bits' of parameter 0 needs a group with master_bytewidth 3 or 4, got 0; the file is "
        "damaged",
        lambda: fl.convert.from_flashoptim({**saved, "param_groups": [{"params": [0], "master_bytewidth": 0}]}, state),
    )
    refuses(
        ValueError,
        "from_flashoptim: parameter 0 has error bits, which need the parameter that they belong to; pass params as "
        "FlashOptim left them",
        lambda: fl.convert.from_flashoptim(saved, state),
    )
    refuses(
        ValueError,
        "from_flashoptim: the error bits of parameter 0 have shape (8,), the parameter (2, 4); it is the state of "
        "another model",
        lambda: fl.convert.from_flashoptim(_saved(**whole, error_bits=codes.flatten()), state, params),
    )
    without = fl.scale_by_lion().init(params)
    assert torch.equal(fl.convert.from_flashoptim(saved, without).mu["w"], torch.zeros(2, 4))
