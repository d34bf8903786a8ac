"""global_norm: one number, on every rank and for every mesh."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import world as w
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from world import World

import functional_lowbit as fl

SHAPES = [
    (33, 512),
    (3, 2048),
    (129, 192),
    (34, 257),
    (19, 8, 3, 3),
    (4099,),
    (5, 1),
    (1, 5000),
    (5,),
    (1,),
    (0, 3),
    (),
]


def leaves(spread: float) -> list[Tensor]:
    """Numbers whose exponents differ by up to `spread` within one leaf, so that the order of a sum matters."""
    return [
        w.random(shape, i) * torch.exp2(spread * torch.rand(shape, generator=torch.Generator().manual_seed(50 + i)))
        for i, shape in enumerate(SHAPES)
    ]


def norms(sharded: bool) -> Any:
    cut = w.shard if sharded else (lambda x: x)
    seen = {}
    for spread in (0.0, 20.0, 50.0):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            norm = fl.global_norm([cut(x.to(dtype)) for x in leaves(spread)])
            assert type(norm) is Tensor
            seen[spread, dtype] = (norm.item(), norm.dtype, tuple(norm.shape))
    # A gradient whose memory order is not the shape's, as autograd makes them.
    seen["transposed"] = fl.global_norm([cut(w.random((512, 33), 7).t()), cut(w.random((300, 7), 8).t())]).item()
    seen["channels last"] = fl.global_norm(
        [cut(w.random((8, 5, 6, 4), 9).to(memory_format=torch.channels_last))]
    ).item()
    return seen


def test_the_same_bits_for_every_world_size(world: World, alone: Callable[..., Any]) -> None:
    plain = alone(norms, False)
    for seen in world.run(norms, True):
        assert seen == plain


def test_close_to_the_exact_sum(alone: Callable[..., Any]) -> None:
    for spread in (0.0, 20.0, 50.0):
        exact = math.sqrt(math.fsum(v * v for x in leaves(spread) for v in x.double().flatten().tolist()))
        # Blocks of 256 squares are summed in float32: at most 256 roundings of 2**-24 each, halved by the root.
        assert alone(norms, False)[spread, torch.float32][0] == pytest.approx(exact, rel=129 * 2**-24)


def test_the_memory_order_does_not_matter(alone: Callable[..., Any]) -> None:
    def contiguous(*xs: Tensor) -> float:
        return fl.global_norm([x.contiguous() for x in xs]).item()

    seen = alone(norms, False)
    assert seen["transposed"] == contiguous(w.random((512, 33), 7).t(), w.random((300, 7), 8).t())
    assert seen["channels last"] == contiguous(w.random((8, 5, 6, 4), 9))


def mixed() -> Any:
    """The same leaves, each resting on another mesh."""
    full = leaves(20.0)
    one, grid = w.mesh(), w.mesh(2, 2)
    rests: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: w.shard(x, one, Shard(0)),
        lambda x: w.shard(x, one, Replicate()),
        lambda x: w.shard(x, grid, Replicate(), Shard(0)),
        lambda x: w.shard(x, grid, Shard(0), Replicate()),
        lambda x: w.shard(x, grid, Shard(0), Shard(0)),
        lambda x: w.shard(x, grid, Replicate(), Replicate()),
    ]
    seen = []
    for turn in range(len(rests)):
        tree = [rests[(i + turn) % len(rests)](x) if x.ndim else x for i, x in enumerate(full)]
        seen.append(fl.global_norm({"a": tree, "none": None}).item())
    # Rows that are cut: their parts are summed in another order.
    columns = [w.shard(x, grid, Shard(0), Shard(1)) if x.ndim > 1 else x for x in full]
    return seen, fl.global_norm(columns).item(), fl.global_norm(full).item()


@pytest.mark.parametrize("world", [4], indirect=True, ids="W={}".format)
def test_any_mix_of_meshes_counts_each_element_once(world: World) -> None:
    for seen, columns, plain in world.run(mixed):
        assert seen == [plain] * len(seen)
        assert columns == pytest.approx(plain, rel=129 * 2**-24)


def not_finite() -> Any:
    seen = {}
    for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        full = w.random((33, 512), 0)
        full[32, 3] = value  # on the last rank
        seen[name] = str(fl.global_norm([w.shard(full), w.shard(torch.ones(3))]).item())
    full[0, 0] = math.nan
    seen["both"] = str(fl.global_norm([w.shard(full)]).item())
    seen["zero"] = fl.global_norm([w.shard(torch.zeros(33, 4))]).item()
    seen["nothing"] = fl.global_norm([w.shard(torch.zeros(0, 4))]).item()
    return seen


@pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)
def test_what_one_rank_has_all_ranks_see(world: World) -> None:
    for seen in world.run(not_finite):
        assert seen == {"nan": "nan", "inf": "inf", "-inf": "inf", "both": "nan", "zero": 0.0, "nothing": 0.0}


@pytest.mark.parametrize(
    ("dtype", "integer", "bits"),
    [
        (torch.float32, torch.int32, -(2**22)),  # what a processor makes of 0 / 0
        (torch.float32, torch.int32, -1),
        (torch.bfloat16, torch.int16, -1),  # what torch makes of a NaN in bfloat16
        (torch.float16, torch.int16, -512),
    ],
)
@pytest.mark.parametrize("shape", [(1000,), (4, 300)])
def test_a_nan_with_its_sign_bit(shape: tuple[int, ...], dtype: torch.dtype, integer: torch.dtype, bits: int) -> None:
    """It is counted as a NaN, and not by an exponent of 511 in memory behind the bins."""
    x = w.random(shape, 0, dtype)
    x.view(-1)[7] = torch.tensor(bits, dtype=integer).view(dtype)
    assert x.view(integer).view(-1)[7] == bits
    assert fl.global_norm([x]).isnan()
