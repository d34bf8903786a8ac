"""dynamic8 against torchao's table: the same values, and the same code for every number."""

import pytest
import torch
from torch import Tensor
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

from functional_lowbit.formats import dynamic8

both = pytest.mark.parametrize("signed", [True, False], ids=["signed", "nonnegative"])

CODES = torch.arange(256, dtype=torch.uint8)[None]
FAR_FROM_A_TIE = 2  # ulp of x / absmax; nearer to it, the two libraries' roundings may choose different neighbours


def torchao_map(signed: bool) -> Tensor:
    """float32[256], ascending."""
    return torch.tensor(create_dynamic_map(signed))


def ulps_from_a_tie(y: Tensor, qmap: Tensor) -> Tensor:
    """How many float32 numbers lie between y and the nearest middle of two values: int32, like y."""
    middle = ((qmap[1:].double() + qmap[:-1].double()) / 2).float()
    above = torch.searchsorted(middle, y.contiguous()).clamp(1, 254)
    bits = y.abs().view(torch.int32)
    return torch.minimum(
        (middle[above].abs().view(torch.int32) - bits).abs(), (middle[above - 1].abs().view(torch.int32) - bits).abs()
    )


def draw(kind: str, signed: bool) -> Tensor:
    """float32[n, 256] with an absmax of its own in each block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8000, 256, generator=generator)
    match kind:
        case "normal":
            pass
        case "heavy-tailed":
            x = x**5
        case "all decades":
            x = x.sign() * 10.0 ** (8 * torch.rand(x.shape, generator=generator) - 8)
        case "ranges":
            x = x * 10.0 ** (40 * torch.rand(8000, 1, generator=generator) - 10)
    return x if signed else x.abs()


def assert_same_codes(x: Tensor, signed: bool, ties: int) -> None:
    """Equal, but for at most `ties` numbers next to a tie, and for live non-negative ones that torchao writes as 0."""
    qmap = torchao_map(signed)
    codes, scales = dynamic8.codec(signed).encode(x)
    y, torchao_scales = scale_tensor(x, x.shape[-1])
    assert torch.equal(scales.flatten(), torchao_scales)
    expected = quantize_8bit_with_qmap(y, qmap)

    kept_alive = (expected == 0) & (x > 0) & (not signed)
    assert (codes[kept_alive] == 1).all()
    different = (codes != expected) & ~kept_alive
    assert (codes.int() - expected.int())[different].abs().le(1).all()
    assert (ulps_from_a_tie(y, qmap)[different] <= FAR_FROM_A_TIE).all()
    assert different.sum() <= ties


@both
def test_values(signed: bool):
    qmap = torchao_map(signed)
    values = dynamic8.codec(signed).decode(CODES, torch.ones(1, 1))[0]
    assert torch.equal(values == 0, qmap == 0)
    assert torch.equal(values.sign(), qmap.sign())
    assert (values.abs().view(torch.int32) - qmap.abs().view(torch.int32)).abs().max() <= 2
    assert values[-1] == qmap[-1] == 1


@both
@pytest.mark.parametrize("scale", [1e-12, 3.3e-7, 1.0, 3e38])
def test_scaled_values(signed: bool, scale: float):
    scales = torch.tensor([[scale]])
    expected = dequant_with_qmap(CODES, torchao_map(signed), scales.flatten())
    torch.testing.assert_close(dynamic8.codec(signed).decode(CODES, scales), expected, rtol=4e-7, atol=0)


@both
def test_every_value_of_the_table_keeps_its_code(signed: bool):
    codes, _ = dynamic8.codec(signed).encode(torchao_map(signed)[None])
    assert torch.equal(codes, CODES)


@both
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "all decades", "ranges"])
def test_codes_of_random_blocks(kind: str, signed: bool):
    assert_same_codes(draw(kind, signed), signed, ties=20)  # among 2 million


@both
def test_codes_next_to_every_tie(signed: bool):
    """All float32 numbers up to 500 ulp away from each of the 255 ties."""
    qmap = torchao_map(signed)
    middle = ((qmap[1:].double() + qmap[:-1].double()) / 2).float()
    y = (middle.view(torch.int32)[:, None] + torch.arange(-500, 501, dtype=torch.int32)).view(torch.float32)
    x = torch.cat([y, torch.ones(len(y), 1)], dim=-1)
    assert_same_codes(x, signed, ties=3 * 255)


@both
def test_torchao_writes_small_numbers_as_zero_where_we_do_not(signed: bool):
    x = torch.tensor([[1.0, 1e-7, 1e-12]])
    theirs = quantize_8bit_with_qmap(x, torchao_map(signed))
    ours, _ = dynamic8.codec(signed).encode(x)
    zero = dynamic8.codec(signed).zero_code
    assert theirs.tolist() == [[255, zero, zero]]
    assert ours.tolist() == ([[255, zero, zero]] if signed else [[255, 1, 1]])
