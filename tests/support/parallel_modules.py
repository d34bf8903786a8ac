"""Modules, and torch's own functions to make them parallel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import world as w
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """A sum of linear maps, one for each expert: (experts, in, out), and a bias for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 40, 256) / 16)
        self.bias = nn.Parameter(torch.zeros(3, 1, 256))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.matmul(x, self.weight) + self.bias).sum(0)


def dense() -> nn.Module:
    """Odd rows, a bias of odd length, and rows of 512 that two ranks cut on the edge of a block."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 129), nn.LayerNorm(129), nn.GELU(), nn.Linear(129, 512), nn.GELU(), nn.Linear(512, 9)
    )


def experts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Experts(), nn.GELU(), nn.Linear(256, 9))


def by_columns(p: Tensor) -> Shard:
    return Shard(1) if p.ndim > 1 and p.shape[1] == 512 else Shard(0)


def inside_experts(p: Tensor) -> Shard:
    return Shard(1) if p.shape[1:2] == (40,) else Shard(0)


def fsdp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def build(model: nn.Module) -> nn.Module:
        fully_shard(model[3], mesh=w.mesh(), **options)
        return fully_shard(model, mesh=w.mesh(), **options)

    return build


def ignored(model: nn.Module) -> nn.Module:
    """The last layer stays plain; whoever asks for that has to average its gradients."""
    plain = set(model[5].parameters())
    fully_shard(model, mesh=w.mesh(), ignored_params=plain)
    for p in plain:
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, dist.ReduceOp.AVG))
    return model


def hsdp(*mesh: int) -> Callable[[nn.Module], nn.Module]:
    return lambda model: fully_shard(model, mesh=w.mesh(*mesh))


PLAN = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()}


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, w.mesh(), PLAN)


def fsdp_over_tp(model: nn.Module) -> nn.Module:
    parallelize_module(model, w.mesh(2, 2)["shard"], PLAN)
    return fully_shard(model, mesh=w.mesh(2, 2)["replicate"])


def spread(dim: int) -> Callable[[nn.Module], nn.Module]:
    """DTensors all through: the experts cut along `dim`, the rest repeated."""

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            placement = Shard(dim) if isinstance(module, Experts) and p.shape[dim] > 1 else Replicate()
            module.register_parameter(key, nn.Parameter(distribute_tensor(p.data, mesh, [placement])))

    def enter(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

    def leave(module: nn.Module, output: Any, mesh: Any) -> Any:
        return output.full_tensor()

    return lambda model: distribute_module(model, w.mesh(), cut, enter, leave)


def several(model: nn.Module) -> nn.Module:
    """One layer over all ranks, one tensor parallel on a part of the mesh, one on two dimensions, the rest plain."""
    fully_shard(model[0], mesh=w.mesh())
    parallelize_module(model, w.mesh(2, 2)["shard"], {"3": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model[5], mesh=w.mesh(2, 2))
    return model


ALL = 0  # every rank has the same batch; else ranks have parts of it
# name -> the model, how it is made parallel, into how many parts the batch is cut (1: one for each rank)
SETUPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], int]] = {
    "mixed precision": (
        dense,
        fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        1,
    ),
    "offload": (dense, fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)), 1),
    "ignored": (dense, ignored, 1),
    "columns": (dense, fsdp(shard_placement_fn=by_columns), 1),
    "hsdp 2x1": (dense, hsdp(2, 1), 1),
    "hsdp 2x2": (dense, hsdp(2, 2), 1),
    "tensor parallel": (dense, tensor_parallel, ALL),
    "fsdp over tp": (dense, fsdp_over_tp, 2),
    "experts, fsdp": (experts, lambda m: fully_shard(m, mesh=w.mesh()), 1),
    "experts, fsdp on 1": (
        experts,
        lambda m: fully_shard(
            m, mesh=w.mesh(), shard_placement_fn=lambda p: Shard(1) if p.shape[1:2] == (40,) else None
        ),
        1,
    ),
    "experts on 0": (experts, spread(0), ALL),
    "experts on 1": (experts, spread(1), ALL),
    "replicate": (dense, spread(0), ALL),
    "ddp": (dense, DistributedDataParallel, 1),
    "several": (dense, several, ALL),
}
