"""mesh x placement x format: which cells have the bits of the unsharded run, and how far the others may be from it.

`PYTHONPATH=tests/support python tests/sharding/test_mesh_table.py` prints the table as Markdown: = is bit-equal; else
the largest difference of a parameter to the unsharded run, in lr * steps, and in brackets how much of its bound an
element uses at most.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import world as w
from moment_bounds import AdamW, bounds
from tiers import slow_unless
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from world import World

import functional_lowbit as fl

STEPS, DECAY = 3, 0.1
RULE = AdamW(lr=1e-2, b1=0.9, b2=0.999, eps=1e-8)
CLIPPED = RULE._replace(clip=1.0)


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

    tx = fl.adamw8bit(RULE.lr, RULE.b1, RULE.b2, RULE.eps, weight_decay=DECAY, format=format)
    tx = fl.chain(fl.clip_by_global_norm(CLIPPED.clip) if clipped else fl.identity(), tx)
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


class Cell(NamedTuple):
    """What a run on ranks has to do with the plain one."""

    equal: bool  # bit for bit: params, moments, codes and scales
    params: float  # the largest difference of a parameter, in lr * steps
    share: float  # the largest difference of a parameter as a part of its own bound
    mu: float  # relative error of the whole moment
    nu: float
    broken: list[str]  # what is outside of its bound


def compare(format: str, cut: Cut, clipped: bool, plain: Any, found: Any) -> Cell:
    limit = bounds(format, CLIPPED if clipped else RULE, "w", [grads(cut, k) for k in range(STEPS)])
    off = {n: (found[n].double() - plain[n].double()).abs() for n in limit}
    return Cell(
        found["bits"] == plain["bits"] and found["state"] == plain["state"],
        float(off["params"].max()) / RULE.lr / STEPS,
        float((off["params"] / limit["params"]).max()),
        float(off["mu"].norm() / plain["mu"].norm()),
        float(off["nu"].norm() / plain["nu"].norm()),
        [n for n in limit if bool((off[n] > limit[n]).any())],
    )


def is_cut(format: str, cut: Cut) -> bool:
    f = fl.formats.get(format)
    return f.scaled and f.block_size in cut.cuts


WHY = "; the mesh cuts its rows, so each shard has blocks of its own"


@slow_unless(
    lambda world, format, clipped: (
        world == 2 and (format, clipped) in [("companded8", False), ("root4", True), ("float32", False)]
    )
)
@pytest.mark.parametrize("world", [2, 3, 4], indirect=True, ids="W={}".format)
@pytest.mark.parametrize(
    ("format", "clipped"),
    [*((f, False) for f in FORMATS), *((f, True) for f in ("companded8", "root4", "bfloat16", "float32"))],
    ids=lambda x: x if isinstance(x, str) else "clipped" if x else "",
)
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
        print("|", cut, "|", " | ".join("=" if c.equal else f"{c.params:.2g} ({c.share:.0%})" for c in row), "|")
    print("\n| largest of the column | " + " | ".join(f"`{f}`" for f in FORMATS), "|")
    print("| --- " * (1 + len(FORMATS)) + "|")
    for name in ("mu", "nu"):
        worst = [max(getattr(cells[str(cut), f], name) for cut in CUTS) for f in FORMATS]
        print(f"| relative error of `{name}` | " + " | ".join(f"{x:.2g}" for x in worst), "|")


if __name__ == "__main__":
    main()
