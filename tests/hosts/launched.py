"""What a launcher does before a host runs: the environment of a rank, for processes that have their group already."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

# Warnings are errors on ranks, too. Those of Lightning that a test cannot avoid, each with its cause:
LIGHTNINGS = [
    # lightning.pytorch.utilities._pytree makes a torch.utils._pytree.LeafSpec, which torch 2.13 deprecates.
    ".isinstance.treespec, LeafSpec.. is deprecated",
    # The resumed run saves its checkpoints into another folder, so as not to overwrite the one that it came from.
    "The dirpath has changed from",
]


@contextmanager
def launched(foreign: Sequence[str] = ()) -> Iterator[None]:
    """As torchrun leaves it. The rendezvous is not used, since the group exists.

    Args:
        foreign: How warnings begin that are none of this library's business, as regular expressions.
    """
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    try:
        with warnings.catch_warnings():
            for message in foreign:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ |= before


@contextmanager
def accelerated() -> Iterator[None]:
    """Let Accelerate begin anew, as in a new process, and take FSDP on CPUs for what it is.

    Accelerate goes by its FSDP plugin only where there is a GPU, though all that follows works on CPUs. What it sets
    there is set here; nothing else of it is replaced.
    """
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    _forget()
    try:
        with mock.patch.object(AcceleratorState, "__init__", init):
            yield
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
