"""dynamic4 against torchao's 4-bit tables: the same values, and the same code for every number but a few."""

import pytest
import torch
from torch import Tensor
from torchao.optim.quant_utils import create_dynamic_map, quantize_4bit_with_qmap, scale_tensor

from functional_lowbit.formats import dynamic4

SIGNED = torch.tensor(create_dynamic_map(True, 3, 4))
UNSIGNED = torch.linspace(0, 1, 17)[1:]  # torchao.optim.subclass_4bit.get_qmap_unsigned
CODES = torch.arange(16, dtype=torch.uint8)[None]


def draw(kind: str) -> Tensor:
    """float32[n, 128] with an absmax of its own in each block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16000, 128, generator=generator)
    match kind:
        case "normal":
            pass
        case "heavy-tailed":
            x = x**5
        case "all decades":
            x = x.sign() * 10.0 ** (4 * torch.rand(x.shape, generator=generator) - 4)
        case "ranges":
            x = x * 10.0 ** (40 * torch.rand(16000, 1, generator=generator) - 10)
    return x


each_kind = pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "all decades", "ranges"])


def test_signed_values():
    decoded = dynamic4.signed.decode(CODES, torch.ones(1, 1))[0]
    torch.testing.assert_close(decoded, SIGNED, rtol=4e-7, atol=0)
    assert torch.equal(dynamic4.signed.encode(SIGNED[None])[0], CODES)


def test_nonnegative_values():
    """Code c is torchao's c - 1, but for 15/16, which has none, since 0 has one."""
    decoded = dynamic4.nonnegative.decode(CODES, torch.ones(1, 1))[0]
    assert torch.equal(decoded[1:15], UNSIGNED[:14])
    assert decoded[15] == UNSIGNED[15] == 1
    assert decoded[0] == 0


@each_kind
def test_signed_codes(kind: str):
    """All of 2 million, but for one that lies within 2 ulp of a tie."""
    x = draw(kind)
    codes, scales = dynamic4.signed.encode(x)
    y, torchao_scales = scale_tensor(x, 128)
    assert torch.equal(scales.flatten(), torchao_scales)
    different = codes != quantize_4bit_with_qmap(y, SIGNED)
    assert different.sum() <= 1
    middle = (SIGNED[1:].double() + SIGNED[:-1].double()) / 2
    for near in y[different].double():
        assert (near - middle).abs().min() <= 2 * 2.0**-23 * near.abs()


@each_kind
def test_nonnegative_codes(kind: str):
    x = draw(kind).abs()
    codes, scales = dynamic4.nonnegative.encode(x)
    y, torchao_scales = scale_tensor(x, 128)
    assert torch.equal(scales.flatten(), torchao_scales)
    expected = quantize_4bit_with_qmap(y, UNSIGNED) + 1
    fifteenth = expected == 15  # the value that we have not
    assert torch.equal(codes[~fifteenth], expected[~fifteenth].clamp_max(15))
    assert torch.equal(codes[fifteenth], torch.where(y[fifteenth] < 15 / 16, 14, 15).to(torch.uint8))
    assert fifteenth.double().mean() < 0.008  # 0.0052, 0.0008, 0.0073, 0.0052


def test_zero():
    """torchao reads 0 as 1/16 of the absmax."""
    x = torch.tensor([[1.0, 0.0]])
    assert quantize_4bit_with_qmap(x, UNSIGNED).tolist() == [[15, 0]]
    assert dynamic4.nonnegative.encode(x)[0].tolist() == [[15, 0]]
    assert dynamic4.nonnegative.decode(*dynamic4.nonnegative.encode(x)).tolist() == [[1.0, 0.0]]
    assert dynamic4.signed.encode(x)[0].tolist() == quantize_4bit_with_qmap(x, SIGNED).tolist() == [[15, 7]]
