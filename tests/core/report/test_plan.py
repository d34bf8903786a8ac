"""memory_plan: what training will take, before anything is allocated."""

import json
import resource

import pytest
import torch
from helpers import averaged, delayed, refuses
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import functional_lowbit as fl
from functional_lowbit._core.report.planned_mesh import PlannedMesh, on_rank

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000


def llama_7b() -> dict[str, torch.Tensor]:
    """The parameters of Llama 7B: 6,738,415,616."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{k}_proj.weight": (WIDTH, WIDTH) for k in "qkvo"}
        shapes |= {f"{layer}.mlp.{k}_proj.weight": (HIDDEN, WIDTH) for k in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        shapes |= {f"{layer}.{k}_layernorm.weight": (WIDTH,) for k in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    return {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}


def _peak() -> int:
    """The most memory that this process has ever held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_seven_billion_parameters_take_no_memory():
    params = llama_7b()
    fl.memory_plan(fl.adamw8bit(1e-3), {"w": torch.empty(64, 64, device="meta")}, mesh=8)  # what comes with the first
    before = _peak()
    alone = fl.memory_plan(fl.adamw8bit(1e-3), params)
    on_eight = fl.memory_plan(fl.adamw8bit(1e-3), params, mesh=8)
    assert _peak() - before < alone.total_bytes / 1000
    assert alone.parameters == 6_738_415_616
    # Each of two moments takes a byte for each element and 4 for each block of 256, which divides all of the rows.
    assert alone.total_bytes == 2 * (alone.parameters + alone.parameters // 64) + 8
    assert alone.weight_bytes == alone.gradient_bytes == 2 * alone.parameters
    # Eighths of all of it, but for the counter: 512 elements of a vector are two blocks.
    assert on_eight.total_bytes == (alone.total_bytes - 8) // 8 + 8
    assert on_eight.training_bytes == (alone.training_bytes - 8) // 8 + 8
    assert len(on_eight.ranks) == 8
    assert on_eight.mesh == (8,)


def test_repeated_layers_are_one_row():
    plan = fl.memory_plan(fl.lion8bit(1e-3), llama_7b(), mesh=(2, 4))
    lines = str(plan).splitlines()
    assert [" ".join(line.split()) for line in (lines[2], lines[4], lines[5], lines[-2], lines[-1])] == [
        "0.mu.lm_head.weight companded8 (32000, 4096) 33,280,000 at least 4,096 elements",
        "0.mu.model.layers.*.input_layernorm.weight x 32 companded8 (4096,) 33,280 at least 4,096 elements",
        "0.mu.model.layers.*.mlp.down_proj.weight x 32 companded8 (4096, 11008) 366,346,240 at least 4,096 elements",
        "each rank 8,449,341,464 as above",  # (2 + 2 + 1 + 1/64) bytes for a quarter of the parameters; the counter
        "all ranks 67,594,731,712 of a mesh of 2 x 4",
    ]
    every = plan.table(all_rows=True).splitlines()
    assert len(every) == 1 + len(plan.rows) + 7
    assert "*" not in plan.table(all_rows=True)
    assert len(lines) == 1 + 13 + 7


def test_a_short_table_shows_every_leaf_unless_asked():
    plan = fl.memory_plan(fl.trace(0.9), [torch.empty(3), torch.empty(3), torch.empty(4)])
    assert [line.split()[0] for line in str(plan).splitlines()[1:5]] == ["step", "trace.0", "trace.1", "trace.2"]
    assert [line.split("  ")[0] for line in plan.table(all_rows=False).splitlines()[1:4]] == [
        "step",
        "trace.* x 2",
        "trace.2",
    ]


def test_plans_of_real_tensors_make_none():
    params = {"w": torch.zeros(128, 512, dtype=torch.bfloat16), "b": torch.zeros(512), "nothing": None}
    tx = fl.master_weights(fl.adamw4bit(0.1, where=lambda path, leaf: path == "w"))
    assert fl.memory_plan(tx, params) == fl.describe(tx.init(params), params)
    as_float32 = fl.memory_plan(tx, params, dtype=torch.float32)
    assert as_float32 == fl.describe(
        tx.init({**params, "w": params["w"].float()}), {"w": params["w"].float(), "b": params["b"]}
    )


def test_a_pair_of_the_users_own():
    params = {"w": torch.zeros(129, 512), "b": torch.zeros(3)}
    tx = fl.chain(fl.low_bit(averaged()), delayed())
    assert fl.memory_plan(tx, params) == fl.describe(tx.init(params), params)
    plan = fl.memory_plan(tx, params, mesh=4)
    assert [rank.parameters for rank in plan.ranks] == [33 * 512 + 1, 33 * 512 + 1, 33 * 512 + 1, 30 * 512]
    buffers = [sum(r.bytes for r in rank.rows if r.path.startswith("1.")) for rank in plan.ranks]
    assert buffers == [2 * 4 * rank.parameters for rank in plan.ranks]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_counts_tied_parameters_once_and_no_buffers(device):
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False), nn.BatchNorm1d(100))
    model[1].weight = model[0].weight
    plan = fl.memory_plan(fl.sgd(0.1, 0.9), model)
    assert plan.parameters == 100 * 16 + 200
    assert [row.path for row in plan.rows] == ["0.step", "0.trace.0.weight", "0.trace.2.bias", "0.trace.2.weight"]


def test_meshes():
    tx, params = fl.adamw8bit(1e-3), {"w": torch.empty(10, 512), "b": torch.empty(5)}
    whole = fl.memory_plan(tx, params)
    assert [r.parameters for r in fl.memory_plan(tx, params, mesh=4).ranks] == [
        3 * 512 + 2,
        3 * 512 + 2,
        3 * 512 + 1,
        512,
    ]
    one = fl.memory_plan(tx, params, mesh=1)
    assert one.ranks[0] == whole
    assert one._replace(mesh=(), ranks=()) == whole
    hsdp = fl.memory_plan(tx, params, mesh={"replicate": 3, "shard": 4})
    assert hsdp.ranks == 3 * fl.memory_plan(tx, params, mesh=4).ranks
    assert hsdp == fl.memory_plan(tx, params, mesh=[3, 4])
    assert (hsdp.largest_rank, hsdp.smallest_rank) == (0, 3)
    assert (whole.largest_rank, whole.smallest_rank) == (None, None)
    by_columns = fl.memory_plan(tx, {"w": params["w"]}, mesh=(2, 2), placements=[Replicate(), Shard(-1)])
    assert by_columns.rows[1].bytes == 10 * 256 + 10 * 4
    more_ranks_than_rows = fl.memory_plan(tx, params, mesh=16)
    assert more_ranks_than_rows.ranks[15].bytes_per_parameter == 0.0
    assert fl.memory_plan(tx, {}, mesh=2).training_bytes == 8


def _dtensors(mesh, params):
    """The parameters as rank 0 of a mesh would hold them."""
    planned = PlannedMesh(mesh)
    specs = planned.specs(list(params), list(params.values()), None)
    return dict(zip(params, on_rank(specs, list(params.values()), planned.of_rank(0)), strict=True))


def test_dtensors_have_a_mesh():
    tx, params = fl.adamw8bit(1e-3), {"w": torch.empty(10, 512), "b": torch.empty(5)}
    placed = _dtensors(4, params)
    assert fl.memory_plan(tx, placed) == fl.memory_plan(tx, params, mesh=4)
    # Beside a plain tensor, which every rank has; and on two meshes, of which only this rank's part is known.
    plain = fl.memory_plan(tx, {**placed, "b": params["b"]})
    assert [rank.parameters for rank in plain.ranks] == [3 * 512 + 5, 3 * 512 + 5, 3 * 512 + 5, 512 + 5]
    two = fl.memory_plan(tx, {"w": placed["w"], "b": _dtensors(2, params)["b"]})
    assert two.ranks == ()
    assert two.parameters == 3 * 512 + 3
    for arguments in ({"mesh": 4}, {"placements": [Shard(0)]}):
        refuses(
            ValueError,
            "memory_plan: params['b'] is a DTensor and has a mesh and placements, so leave both out, or give the "
            "parameters as they were before they were sharded",
            lambda arguments=arguments: fl.memory_plan(tx, placed, **arguments),
        )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_whatever_the_default_device(device):
    with torch.device(device):
        plan = fl.memory_plan(fl.adamw8bit(1e-3), {"w": torch.empty(10, 512)}, mesh=(2, 2))
    assert plan.ranks[1].parameters == 5 * 512


def test_json():
    tx, params = fl.sgd8bit(1e-3), {"w": torch.empty(10, 512), "b": torch.empty(5)}
    found = json.loads(json.dumps(fl.memory_plan(tx, params, mesh=(1, 3)).to_dict()))
    ranks = found.pop("ranks")
    assert found == {
        "rows": [
            {"path": "0.step", "format": "int64", "shape": [], "bytes": 8, "why": "shared by all leaves"},
            {"path": "0.trace.b", "format": "float32", "shape": [5], "bytes": 8, "why": "fewer than 4,096 elements"},
            {
                "path": "0.trace.w",
                "format": "companded8",
                "shape": [10, 512],
                "bytes": 2080,
                "why": "at least 4,096 elements",
            },
        ],
        "parameters": 2050,
        "weight_bytes": 8200,
        "gradient_bytes": 8200,
        "state_bytes": 2096,
        "training_bytes": 18496,
        "bytes_per_parameter": 18496 / 2050,
        "mesh": [1, 3],
        "largest_rank": 0,
        "smallest_rank": 2,
        "all_ranks": {
            "parameters": 5125,
            "weight_bytes": 20500,
            "gradient_bytes": 20500,
            "state_bytes": 5244,
            "training_bytes": 46244,
        },
    }
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert ranks[2] == {
        "rank": 2,
        "parameters": 1025,
        "weight_bytes": 4100,
        "gradient_bytes": 4100,
        "state_bytes": 1052,
        "training_bytes": 9252,
        "bytes_per_parameter": 9252 / 1025,
    }
    assert fl.describe(tx.init({"b": params["b"]})).to_dict() == {
        "rows": [
            {"path": "0.step", "format": "int64", "shape": [], "bytes": 8, "why": "shared by all leaves"},
            {"path": "0.trace.b", "format": "float32", "shape": [5], "bytes": 20, "why": "not stored in few bits"},
        ],
        "state_bytes": 28,
    }


def test_what_is_refused():
    tx, params = fl.adamw8bit(1e-3), {"w": torch.empty(10, 512), "b": torch.empty(5)}

    def plan(**arguments):
        return lambda: fl.memory_plan(tx, params, **arguments)

    for mesh, said in (
        (0, "0"),
        ((2, 0), "(2, 0)"),
        ((), "()"),
        ("8", "'8'"),
        (True, "True"),
        ({"a": 1.5}, "{'a': 1.5}"),
    ):
        refuses(
            ValueError,
            "memory_plan: mesh must be a number of ranks, or such numbers for each mesh dimension, as (2, 4) or "
            f"{{'replicate': 2, 'shard': 4}}, got {said}",
            plan(mesh=mesh),
        )
    refuses(
        ValueError,
        "memory_plan: placements need a mesh; give its shape, for instance mesh=8",
        plan(placements=[Shard(0)]),
    )
    refuses(
        ValueError,
        "memory_plan: placements of 'b' must be 2, one for each dimension of the mesh (2, 2), got [Shard(dim=0)]",
        plan(mesh=(2, 2), placements=[Shard(0)]),
    )
    refuses(
        ValueError,
        "memory_plan: placements of 'b': Shard(dim=1) splits a dimension that shape (5,) does not have; give a "
        "function of path and leaf, which may choose others for it",
        plan(mesh=2, placements=[Shard(1)]),
    )
    refuses(
        ValueError,
        "memory_plan: placements of 'b' must be Shard or Replicate, got Partial(sum)",
        plan(mesh=2, placements=[Partial()]),
    )
    refuses(
        TypeError,
        "memory_plan: tx must be a GradientTransformation, got function; call it: adam8bit(...)",
        lambda: fl.memory_plan(fl.adam8bit, params),
    )
    refuses(
        TypeError,
        "memory_plan: dtype must be a floating-point torch.dtype, got 'bfloat16'",
        plan(dtype="bfloat16"),
    )
    refuses(
        TypeError,
        "memory_plan: params['n'] must be float16, bfloat16, float32 or float64, got torch.int64; leave it out of the "
        "tree or mask it with fl.masked",
        lambda: fl.memory_plan(tx, {"n": torch.tensor(3)}),
    )
