"""What a launcher does before a host runs: the environment of a rank, for processes that have their group already."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

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
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "HF_HUB_OFFLINE": "1"}
    try:
        with warnings.catch_warnings():
            for message in foreign:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ |= before
