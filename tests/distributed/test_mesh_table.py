"""mesh x placement x format: which cells have the bits of the unsharded run, and how far the others may be from it.

`python tests/distributed/test_mesh_table.py` prints the table as Markdown.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import world as w
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from world import World

import functional_lowbit as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from format_table import TABLE, Promise

LR, DECAY, STEPS, B1, B2, EPS, CLIP = 1e-2, 0.1, 3, 0.9, 0.999, 1e-8, 1.0


class Cut(NamedTuple):
    """One leaf on one mesh."""

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    cuts: tuple[int, ...] = ()  # block sizes of which the mesh cuts blocks; with the others it cuts between blocks

    @property
    def keeps_norm(self) -> bool:
        """Whether the norm, which adds up blocks of 256 (single elements, in one dimension), is the same number."""
        return 256 not in self.cuts or len(self.shape) == 1

    def __str__(self) -> str:
        names = ", ".join(str(p).replace("(dim=", "(") for p in self.placements)
        return f"{' x '.join(map(str, self.mesh))} | {names} | {self.shape}"


CUTS = [
    Cut((2,), (Replicate(),), (33, 512)),
    Cut((2,), (Shard(0),), (33, 512)),
    Cut((2,), (Shard(1),), (9, 1024)),
    Cut((2,), (Shard(1),), (9, 768), (256,)),  # 3 blocks of 256, 6 of 128
    Cut((2,), (Shard(1),), (9, 750), (256,)),  # 3 blocks of 250, 6 of 125; cut at 375
    Cut((2,), (Shard(0),), (8192,)),
    Cut((2,), (Shard(0),), (9001,), (256, 128)),
    Cut((2,), (Shard(0),), (3, 40, 256)),
    Cut((2,), (Shard(1),), (3, 40, 256)),
    Cut((2,), (Shard(1),), (3, 41, 100), (256,)),  # 20 blocks of 205, 41 of 100; cut at 2100
    Cut((2,), (Shard(2),), (40, 9, 13), (256, 128)),
    Cut((3,), (Shard(0),), (34, 257)),
    Cut((3,), (Shard(1),), (33, 300), (256,)),  # 2 blocks of 150, 3 of 100
    Cut((3,), (Shard(1),), (5, 20, 640)),  # rows of 640 are 4 blocks of 160, or 5 of 128
    Cut((4,), (Shard(0),), (3, 2048)),  # rank 3 has nothing
    Cut((4,), (Shard(0),), (3, 40, 256)),
    Cut((2, 2), (Replicate(), Shard(0)), (33, 512)),
    Cut((2, 2), (Shard(0), Shard(0)), (33, 512)),
    Cut((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (33, 512)),
    Cut((2, 2), (Shard(0), Shard(1)), (9, 1024)),
    Cut((1, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)), (33, 512)),
    Cut((2, 1, 2), (Shard(0), Replicate(), Shard(1)), (7, 512)),
    Cut((2, 2), (Shard(1), Shard(0)), (33, 300), (128,)),
]
FORMATS = fl.formats.names()


def grads(cut: Cut, step: int) -> dict[str, Tensor]:
    return {"w": w.random(cut.shape, 10 + step), "b": w.random((5,), 20 + step)}


def train(format: str, cut: Cut, clipped: bool, sharded: bool) -> Any:
    """AdamW on the leaf and a plain one beside it."""

    def place(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tree, "w": w.shard(tree["w"], w.mesh(*cut.mesh), *cut.placements)} if sharded else tree

    tx = fl.adamw8bit(LR, B1, B2, EPS, weight_decay=DECAY, format=format)
    tx = fl.chain(fl.clip_by_global_norm(CLIP) if clipped else fl.identity(), tx)
    params = place({"w": w.random(cut.shape, 0), "b": w.random((5,), 1)})
    state = tx.init(params)
    step = w.take(tx, "eager")
    for k in range(STEPS):
        params, state = step(place(grads(cut, k)), state, params)
    moments = {
        field: w.whole(x.dequantize() if isinstance(x, fl.QuantizedTensor) else x).contiguous()
        for field, x in (("mu", state[1][0].mu["w"]), ("nu", state[1][0].nu["w"]))
    }
    return {
        "params": w.whole(params["w"]),
        **moments,
        "bits": w.fingerprint({**params, **moments}),
        "state": w.of_state(state),
        "why": [row.why for row in fl.describe(state).rows if row.path.endswith(".w")],
    }


def column(format: str, ranks: int, clipped: bool, sharded: bool) -> list[Any]:
    """One format in all cells of one number of ranks."""
    return [train(format, cut, clipped, sharded) for cut in CUTS if math.prod(cut.mesh) == ranks]


class Interval(NamedTuple):
    """float64, elementwise."""

    low: Tensor
    high: Tensor

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    def mixed(self, decay: float, x: Tensor) -> "Interval":
        """decay * self + (1 - decay) * x, where x, a clipped gradient or its square, has an error of float32 itself.

        The norm adds fewer than 2**15 squares in an order that the mesh chooses, in blocks of 256: 2**-16 of it. The
        other roundings of a step are a dozen of 2**-24.
        """
        low, high = ((1 - decay) * x * (1 + sign * 2**-15 * x.sign()) for sign in (-1, 1))
        return Interval(decay * self.low + low, decay * self.high + high)

    def stored(self, promise: Promise, signed: bool) -> "Interval":
        """Where a number may be after it was stored in a block of any neighbours in the leaf.

        The format promises an error of a * bound(x / a) at a block's absmax of a. Here x is at most m and a at most the
        leaf's largest, A; so y = x / a is anything, and a at most A and at most m / y.
        """
        m = torch.maximum(self.low.abs(), self.high.abs())
        largest = m.max()
        y = torch.logspace(-12, 0, 4001, base=10, dtype=torch.float64)
        bounds = promise.bound(y)
        below = bounds.cummax(0).values  # of y up to here
        above = (bounds / y).flip(0).cummax(0).values.flip(0)  # of y from here
        at = torch.searchsorted(y, m / largest).clamp_max(len(y) - 1)
        error = torch.maximum(largest * below[at], m * above[(at - 1).clamp_min(0)])
        low = self.low - error
        return Interval(low if signed else low.clamp_min(0), self.high + error)


def bounds(format: str, cut: Cut, clipped: bool) -> dict[str, Tensor]:
    """How far two runs may be from each other whose blocks differ, by interval arithmetic: for each element."""
    signed, nonnegative = TABLE[format]
    zero = torch.zeros(cut.shape, dtype=torch.float64)
    mu = nu = Interval(zero, zero)
    apart = zero
    for k in range(STEPS):
        gs = {n: g.double() for n, g in grads(cut, k).items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gs.values()))
        g = gs["w"] * (min(1.0, CLIP / norm) if clipped else 1.0)
        mu, nu = mu.mixed(B1, g), nu.mixed(B2, g * g)
        slow, fast = ((x / (1 - B2 ** (k + 1))).sqrt() + EPS for x in (nu.low, nu.high))
        low, high = (x / (1 - B1 ** (k + 1)) for x in mu)
        highest = torch.where(high > 0, high / slow, high / fast)
        lowest = torch.where(low < 0, low / slow, low / fast)
        apart = apart + LR * (highest - lowest) + 2**-22 * (1 + LR * STEPS)  # the sum with p, which is below 8
        mu, nu = mu.stored(signed, True), nu.stored(nonnegative, False)
    return {"params": apart, "mu": mu.width, "nu": nu.width}


class Cell(NamedTuple):
    """What a run on ranks has to do with the plain one."""

    equal: bool  # bit for bit: params, moments, codes and scales
    params: float  # the largest difference of a parameter, in lr * steps
    bound: float  # of the parameter whose bound is largest, in lr * steps
    mu: float  # relative error of the whole moment
    nu: float
    broken: list[str]  # what is outside of its bound


def compare(format: str, cut: Cut, clipped: bool, plain: Any, found: Any) -> Cell:
    limit = bounds(format, cut, clipped)
    off = {n: (found[n].double() - plain[n].double()).abs() for n in limit}
    return Cell(
        found["bits"] == plain["bits"] and found["state"] == plain["state"],
        float(off["params"].max()) / LR / STEPS,
        float(limit["params"].max()) / LR / STEPS,
        float(off["mu"].norm() / plain["mu"].norm()),
        float(off["nu"].norm() / plain["nu"].norm()),
        [n for n in limit if bool((off[n] > limit[n]).any())],
    )


def is_cut(format: str, cut: Cut) -> bool:
    f = fl.formats.get(format)
    return f.scaled and f.block_size in cut.cuts


WHY = "; the mesh cuts its rows, so each shard has blocks of its own"


@pytest.mark.parametrize("world", [2, 3, 4], indirect=True, ids="W={}".format)
@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_bit_equal_and_what_is_bounded(
    world: World, alone: Callable[..., Any], format: str, clipped: bool
) -> None:
    here = [cut for cut in CUTS if math.prod(cut.mesh) == world.size]
    plain = alone(column, format, world.size, clipped, False)
    for results in world.run(column, format, world.size, clipped, True):
        cells = [compare(format, c, clipped, a, b) for c, a, b in zip(here, plain, results, strict=True)]
        assert {str(c): cell.broken for c, cell in zip(here, cells, strict=True) if cell.broken} == {}
        exact = {str(c): cell.equal for c, cell in zip(here, cells, strict=True) if c.keeps_norm or not clipped}
        assert exact == {str(c): not is_cut(format, c) for c in here if str(c) in exact}
        for cut, result in zip(here, results, strict=True):
            assert [why.endswith(WHY) for why in result["why"]] == [is_cut(format, cut)] * 2


def main() -> None:
    """The table as Markdown."""
    cells: dict[tuple[str, str], Cell] = {}
    with tempfile.TemporaryDirectory() as place:
        alone = World(0, Path(place))
        for ranks in (2, 3, 4):
            world = World(ranks, Path(place))
            here = [cut for cut in CUTS if math.prod(cut.mesh) == ranks]
            for format in FORMATS:
                plain = alone.run(column, format, ranks, True, False)[0]
                found = world.run(column, format, ranks, True, True)[0]
                for c, a, b in zip(here, plain, found, strict=True):
                    cells[str(c), format] = compare(format, c, True, a, b)
            world.close()
        alone.close()
    print("| mesh | placements | shape |", " | ".join(f"`{f}`" for f in FORMATS), "|")
    print("| --- " * (3 + len(FORMATS)) + "|")
    for cut in CUTS:
        row = [cells[str(cut), f] for f in FORMATS]
        print("|", cut, "|", " | ".join("=" if c.equal else f"{c.params:.2g} ({c.bound:.2g})" for c in row), "|")
    print("\n| mesh | placements | shape | format | first moment | second moment |")
    print("| --- " * 6 + "|")
    for cut, f in itertools.product(CUTS, FORMATS):
        cell = cells[str(cut), f]
        if not cell.equal:
            print(f"| {cut} | `{f}` | {cell.mu:.2g} | {cell.nu:.2g} |")


if __name__ == "__main__":
    main()
