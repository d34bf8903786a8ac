"""Two 4-bit codes in a byte, from the codec to a trained and saved state."""

import io

import pytest
import torch
from format_table import assert_same, codec
from helpers import random_like, run_pure, run_step, same

import functional_lowbit as fl
from functional_lowbit._core.state.quantized import zeros
from functional_lowbit.formats._format import pack, unpack

SHAPES = ((3,), (5, 7), (33, 129), (1, 1), (0, 4), (4, 0), (), (2, 3, 43), (4, 513))
each_format = pytest.mark.parametrize("format", ["root4", "dynamic4"])
each_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "nonnegative"])


def test_unpack_is_the_inverse_of_pack():
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 261):
        codes = torch.randint(16, (3, length), generator=generator, dtype=torch.uint8)
        packed = pack(codes)
        assert packed.shape == (3, (length + 1) // 2)
        assert_same(unpack(packed, length), codes)


def test_a_byte_holds_an_element_of_each_half():
    assert pack(torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8)).tolist() == [[0x41, 0x52, 0x13]]


@each_format
@each_sign
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_any_shape(format: str, signed: bool, shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.abs()
    q = fl.quantize(x, format, signed=signed)
    read = q.dequantize()
    assert (read.shape, read.dtype) == (x.shape, torch.float32)
    assert q.codes.dtype == torch.uint8

    c, grid = codec(format, signed), q.layout.local_grid()
    assert q.codes.numel() == grid.n_blocks * ((grid.block + 1) // 2)
    if x.numel():
        expected = c.decode(*c.encode(grid.to_blocks(x)))
        assert_same(read, grid.from_blocks(expected, shape))


@each_format
@each_sign
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zeros_read_as_zeros(format: str, signed: bool, shape: tuple[int, ...]):
    """Both halves of each byte."""
    written = fl.quantize(torch.zeros(shape), format, signed=signed)
    made = zeros(written.layout, torch.device("cpu"))
    assert same((made.codes, made.scales), (written.codes, written.scales))
    assert_same(made.dequantize(), torch.zeros(shape))


@each_format
def test_five_steps_compiled_eagerly_are_those_of_the_pure_functions(format: str):
    shapes = {"odd": torch.empty(33, 129), "short": torch.empty(700, 7), "long": torch.empty(4099), "b": torch.empty(3)}
    params = random_like(shapes, seed=0)
    grads = [random_like(shapes, seed=1 + t) for t in range(5)]
    tx = fl.low_bit(fl.adam(1e-2), format)
    wanted = run_pure(tx, params, grads)
    assert same(run_step(fl.compile(tx, donate=False, backend="eager"), params, grads, tx.init(params)), wanted)
    assert all(p.isfinite().all() for p in wanted[0].values())


@each_format
def test_the_state_survives_a_file(format: str):
    params = {"w": torch.randn(33, 129, generator=torch.Generator().manual_seed(0))}
    tx = fl.low_bit(fl.adam(1e-2), format)
    _, state = run_pure(tx, params, [params])
    file = io.BytesIO()
    torch.save(fl.state_dict(state), file)
    file.seek(0)
    loaded = fl.load_state_dict(tx.init(params), torch.load(file, weights_only=True))
    assert same(loaded, state)
    assert same(run_pure(tx, params, [params], loaded), run_pure(tx, params, [params], state))


def test_bytes_per_parameter_of_a_whole_model():
    """Two blocks of a transformer, its norms and biases, which stay in float32, among them."""
    width = 512
    layer = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    shapes = {f"{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {f"{i}.norm{j}": (width,) for i in range(2) for j in range(2)} | {"embed": (256, width)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    elements = sum(p.numel() for p in params.values())
    for tx, bound in ((fl.adamw4bit(1e-3), 1.08), (fl.adamwfp8(1e-3), 2.05)):
        assert fl.describe(tx.init(params)).total_bytes / elements <= bound
