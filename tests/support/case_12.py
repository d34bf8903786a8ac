"""One rank of CASES.md number 12, as a user would start it; see test_cases_on_ranks.py."""

import faulthandler
import json
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import functional_lowbit as fl


def main(meeting: str, backend: str) -> None:
    """Three steps of a Linear(512, 33), whose weight is cut into 17 and 16 rows; prints JSON."""
    faulthandler.dump_traceback_later(150, exit=True)
    warnings.simplefilter("error")
    # torch 2.13: importing the inductor backend imports torch.utils.mkldnn, which uses it.
    warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 33)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3))
    params = dict(model.named_parameters())
    state = tx.init(params)
    step = fl.compile(tx, backend=backend)
    inputs = torch.randn(8, 512)
    losses = []
    for _ in range(3):
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.item())
        params, state = step({n: p.grad for n, p in params.items()}, state, params)
        model.zero_grad()
    tensors = {**params, **fl.state_dict(state)}
    whole = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in tensors.items() if n != "schema"}
    digests = {
        n: x.detach().double().mul(torch.arange(x.numel()).view(x.shape) + 1).sum().item() for n, x in whole.items()
    }
    print(
        json.dumps(
            {
                "rows": model.weight.to_local().shape[0],
                "losses": losses,
                "digests": digests,
                "graphs": step.graphs,
            }
        ),
        flush=True,
    )
    dist.barrier()  # no rank leaves while another still reads from it
    dist.destroy_process_group()
    # torch 2.13: seen once, at interpreter exit a thread was destroyed unjoined, which aborts the process
    # ("terminate called without an active exception"). The job is done by here.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
