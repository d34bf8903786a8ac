"""Training loops of other libraries. Needs the `hosts` extra; `make hosts` makes an environment that has it."""

import os
from collections.abc import Iterator

import pytest
import world as w

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made from configs; whoever asks the hub for one fails at once

# Each rank would import them anew, which takes longer than its tests.
w._processes.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.distributed.fsdp",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "accelerate.utils.fsdp_utils",
        "lightning.pytorch",
    ]
)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[w.World]:
    """Two ranks that serve all tests."""
    world = w.World(2, tmp_path_factory.mktemp("world"))
    yield world
    world.close()
