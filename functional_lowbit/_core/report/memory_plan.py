"""memory_plan: what training will take, before anything is allocated."""

import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation
from functional_lowbit._core.report.describe import describe
from functional_lowbit._core.report.plan_params import planned_params
from functional_lowbit._core.report.planned_mesh import MeshShape, Placements, PlannedMesh, on_rank
from functional_lowbit._core.report.table import Report
from functional_lowbit._core.state import fits
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.sharding import ShardSpec


@speaking("memory_plan")
def memory_plan(
    tx: GradientTransformation,
    params: Any,
    *,
    mesh: MeshShape | None = None,
    placements: Placements = None,
    dtype: torch.dtype | None = None,
) -> Report:
    """What `describe(tx.init(params), params)` will say, on every rank, before anything is allocated.

    `init` runs on meta tensors, as each rank would run it, so the numbers are those of the real run. No process group
    is needed.

    Args:
        tx: Any transformation.
        params: A tree of tensors on any device, the meta device included; an `nn.Module`, of which parameters count
            once, frozen ones too, and buffers do not; the path of a `.safetensors` file, of a
            `model.safetensors.index.json`, or of a folder with these (their headers are read; tensors that are not
            floating-point are left out, with a warning); the path of a Hugging Face `config.json`, of a folder with
            one, or a config object, which need the package `transformers`.
        mesh: Ranks along each mesh dimension: 8, (2, 4) or {"replicate": 2, "shard": 4}; or a `DeviceMesh`. None: one
            process, or the mesh of the parameters if they are DTensors.
        placements: One for each mesh dimension, `[Replicate(), Shard(0)]`, or `placements(path, leaf)` that returns
            them. None: those of `fully_shard`, `Shard(0)` along the last mesh dimension and copies along the others.
        dtype: Plan as if the parameters had this dtype: for a checkpoint that will be trained in another one.

    Returns:
        A `Report`, as of `describe(state, params)`. With a mesh, `.ranks[i]` is that of rank i, and the numbers of the
        whole are those of `.largest_rank`. `print` shows repeated layers as one row (`.table(all_rows=True)` does not),
        and `.to_dict()` is ready for JSON. Activations, buffers and what a step needs while it runs are not counted.

    Raises:
        TypeError: if `tx` is no GradientTransformation, and for parameters that `tx.init` refuses.
        ValueError: for a mesh or placements that do not fit, for a mesh beside DTensors, and for a damaged file.
        FileNotFoundError, ImportError: for a path where there is nothing; for a config without `transformers`.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> params = {"w": torch.empty(1001, 512, device="meta"), "b": torch.empty(512, device="meta")}
        >>> plan = fl.memory_plan(fl.adamw8bit(1e-3), params, mesh=2)
        >>> print(plan)
        path      format      shape            bytes  why
        0.step    int64       ()                   8  shared by all leaves
        0.mu.b    float32     (512,)           1,024  fewer than 4,096 elements
        0.mu.w    companded8  (1001, 512)    260,520  at least 4,096 elements
        0.nu.b    float32     (512,)           1,024  fewer than 4,096 elements
        0.nu.w    companded8  (1001, 512)    260,520  at least 4,096 elements
        total                                523,096
        weights                            1,027,072  4.00 for each parameter
        gradients                          1,027,072  4.00 for each parameter
        state                                523,096  2.04 for each parameter
        training                           2,577,240  10.04 for each parameter
        most                               2,577,240  rank 0, as above
        least                              2,572,104  rank 1
        all ranks                          5,149,344  of a mesh of 2
        >>> plan.ranks[1].total_bytes
        522056
    """
    refuse.transformation("tx", tx)
    tree, notes = planned_params(params, dtype)
    for note in notes:
        warnings.warn(f"memory_plan: {note}", stacklevel=3)  # whoever called memory_plan
    leaves, treedef = _optree.flatten(tree)
    paths = _optree.names(treedef)
    fits.params(paths, leaves)
    planned, specs = _sharding(paths, leaves, mesh, placements)
    if planned is None:
        return describe(tx.init(tree), tree)
    reports: list[Any] = [None] * prod(planned.shape)
    for ranks in planned.alike([s for s in specs if s is not None]):
        placed = _optree.unflatten(treedef, on_rank(specs, leaves, planned.of_rank(ranks[0])))
        report = describe(tx.init(placed), placed)
        for rank in ranks:
            reports[rank] = report
    largest = max(reports, key=lambda report: report.training_bytes)
    return largest._replace(mesh=planned.shape, ranks=tuple(reports))


def _sharding(
    paths: list[str], leaves: list[Tensor], mesh: MeshShape | None, placements: Placements
) -> tuple[PlannedMesh | None, list[ShardSpec | None]]:
    """The mesh to plan for, and each leaf's spec; None for one report of this process."""
    own = [ShardSpec.of(x) for x in leaves]
    first = next(((path, s) for path, s in zip(paths, own, strict=True) if s is not None), None)
    if first is not None:
        if mesh is not None or placements is not None:
            raise WrongValue.at(
                "params",
                first[0],
                "is a DTensor and has a mesh and placements, so leave both out, or give the parameters as they were "
                "before they were sharded",
            )
        is_one_mesh = all(s is None or s.mesh == first[1].mesh for s in own)
        return (PlannedMesh(first[1].mesh), own) if is_one_mesh else (None, own)
    if mesh is None:
        if placements is not None:
            raise WrongValue("placements need a mesh; give its shape, for instance mesh=8")
        return None, own
    planned = PlannedMesh(mesh)
    return planned, list(planned.specs(paths, leaves, placements))
