"""What a launcher does before a host runs: the environment of a rank, for processes that have their group already."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Warnings are errors on ranks, too. Each that a host gives has its cause.
FOREIGN = [
    # torch.distributed.checkpoint, for Accelerate, which lets it write into a folder that it has just made.
]


@contextmanager
def launched() -> Iterator[None]:
    """As torchrun leaves it. The rendezvous is not used, since the group exists."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "HF_HUB_OFFLINE": "1"}
    try:
        with warnings.catch_warnings():
            for message, category in FOREIGN:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ |= before
