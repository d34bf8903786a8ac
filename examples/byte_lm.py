"""Train one small transformer four times at once: torch's AdamW, and ours in 32, 8 and 4 bits.

The model reads bytes, the text is the source of your own Python's standard library: nothing is downloaded.
All start from the same weights and see the same batches, so whatever differs comes from the optimizer; and from the
parameters' dtype in the run with 4 bits, whose weights and gradients are bfloat16, rounded stochastically.

    python examples/byte_lm.py                                     # about 3 minutes on 2 CPU cores
    python examples/byte_lm.py --steps 20                          # a short look
    torchrun --nproc-per-node 2 examples/byte_lm.py --fsdp         # sharded: the same losses
    python examples/byte_lm.py --resume demo.pt                    # go on from the checkpoint in the middle

The part to copy is `Functional`: it is all that using the library takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path

# Read when torch is loaded. Threads that wait sleep instead of spinning: 6 times faster where others use the cores too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA's sums do not repeat bit for bit

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from byte_lm_report import LABELS, Result, plot, print_difference, print_table
    from torch import Tensor, nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from tqdm import tqdm

    import functional_lowbit as fl
except ImportError as error:
    sys.exit(f"byte_lm.py: {error}; this brings what it needs: pip install -e '.[demo]'")

CONTEXT = 128  # bytes that the model looks back on
START = 256  # the token in front of the first byte: 257 tokens, 129 positions, both odd, so shards are uneven
EIGHT_BIT = "adamw8bit"
FOUR_BIT = "adamw4bit"  # with parameters in bfloat16
CLIP, PEAK_LR, DECAY, B1, B2, EPS = 1.0, 2e-3, 0.1, 0.9, 0.99, 1e-8


# ---------------------------------------------------------------------------------------------- optimizers
class Functional:
    """One of our optimizers at work on a module: `params, state = step(grads, state, params)`."""

    def __init__(self, name: str, module: nn.Module, args: argparse.Namespace):
        # root4, the default at 4 bits, has the smaller error of an update, but this model's runs with it spread more.
        adamw = {"adamw": fl.adamw, "adamw8bit": fl.adamw8bit, FOUR_BIT: partial(fl.adamw4bit, format="dynamic4")}[name]
        tx = fl.chain(
            fl.clip_by_global_norm(CLIP),
            adamw(schedule(args), b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, mask=decays),
        )
        self.params = dict(module.named_parameters())  # tensors, or DTensors under --fsdp
        self.state = tx.init(self.params)
        rounding = {"rounding": "stochastic", "key": args.seed} if name == FOUR_BIT else {}
        self.step = fl.compile(tx, **rounding)

    def update(self, step: int) -> None:
        """Take one step. The buffers are donated, so the module's own parameters change."""
        grads = {name: param.grad for name, param in self.params.items()}
        self.params, self.state = self.step(grads, self.state, self.params)

    def state_bytes(self) -> int:
        return fl.describe(self.state).total_bytes

    def graphs(self) -> int:
        return self.step.graphs


class Torch:
    """What we compare with: torch.optim.AdamW (fused, fp32) and torch's own clipping."""

    def __init__(self, name: str, module: nn.Module, args: argparse.Namespace):
        self.params = dict(module.named_parameters())
        self.rates = [float(schedule(args)(torch.tensor(step))) for step in range(args.steps)]
        mask = decays(self.params)
        groups = [
            {"params": [p for n, p in self.params.items() if mask[n]], "weight_decay": DECAY},
            {"params": [p for n, p in self.params.items() if not mask[n]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(B1, B2), eps=EPS, fused=True)

    def update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[step]
        nn.utils.clip_grad_norm_(self.params.values(), CLIP)
        self.optimizer.step()

    def state_bytes(self) -> int:
        tensors = [t for leaf in self.optimizer.state.values() for t in leaf.values()]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    def graphs(self) -> int:
        return 0


def schedule(args: argparse.Namespace):
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, args.steps // 10)
    return fl.schedules.warmup_cosine_decay_schedule(0.1 * PEAK_LR, PEAK_LR, warmup, args.steps, 0.1 * PEAK_LR)


def decays(params: dict[str, Tensor]) -> dict[str, bool]:
    """Weight decay is for matrices; norms are left alone."""
    return {name: param.ndim >= 2 for name, param in params.items()}


# --------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """Causal attention, then an MLP, each added to the stream: [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 32
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, 32]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteLM(nn.Module):
    """Predicts each byte of a window from the bytes before it: int64[B, 129] -> mean loss in nats per byte."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.tokens = nn.Embedding(START + 1, width)
        self.positions = nn.Embedding(CONTEXT + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02)  # GPT-2's

    def forward(self, windows: Tensor) -> Tensor:
        inputs = F.pad(windows[:, :-1], (1, 0), value=START)
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), windows.flatten())


def build_model(args: argparse.Namespace, dtype: torch.dtype = torch.float32) -> ByteLM:
    """The same weights on every call and on every rank; sharded under --fsdp."""
    torch.manual_seed(args.seed)
    model = ByteLM(args.width, args.layers).to(args.device, dtype)
    if args.fsdp:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


# ---------------------------------------------------------------------------------------------------- data
def read_sources(limit: int = 8 << 20) -> tuple[Tensor, Tensor]:
    """The standard library's source, uint8[n]: files to train on, and every 16th file held out."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = [d for d in root.iterdir() if d.is_dir() and d.name not in {"site-packages", "dist-packages", "test"}]
    files = sorted([*root.glob("*.py"), *(f for d in folders for f in d.rglob("*.py"))])
    held_out = b"".join(f.read_bytes() for f in files[::16])
    train = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 16)
    return tuple(torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8) for text in (train, held_out))


def get_batch(text: Tensor, seed: int, step: int, args: argparse.Namespace) -> Tensor:
    """Windows int64[batch, 129]: a pure function of (seed, step), of which each rank takes its part."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT, (args.batch,), generator=generator)
    mine = starts.chunk(world_size())[rank()]
    return text[mine[:, None] + torch.arange(CONTEXT + 1)].long().to(args.device)


# ------------------------------------------------------------------------------------------------ training
class Run:
    """One model, its optimizer, and what was measured."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args = name, args
        self.model = build_model(args, torch.bfloat16 if name == FOUR_BIT else getattr(torch, args.dtype))
        self.optimizer = (Torch if name == "torch" else Functional)(name, self.model, args)
        self.losses: list[float] = []  # training loss of every step, nats per byte
        self.valid: dict[int, float] = {}  # steps taken -> validation loss, nats per byte
        self.seconds: list[float] = []  # clip and optimizer step, for every step

    def train_step(self, step: int, batch: Tensor) -> None:
        for param in self.optimizer.params.values():
            param.grad = None
        loss = self.model(batch)
        loss.backward()
        start = clock(self.args)
        self.optimizer.update(step)
        self.seconds.append(clock(self.args) - start)
        self.losses.append(sum_over_ranks(loss) / world_size())

    @torch.no_grad()
    def validate(self, steps_taken: int, text: Tensor, batches: int = 8) -> None:
        """Measure on held-out text, on the same `batches` batches every time."""
        losses = [sum_over_ranks(self.model(get_batch(text, -1, i, self.args))) for i in range(batches)]
        self.valid[steps_taken] = statistics.fmean(losses) / world_size()

    def result(self) -> Result:
        params = sum(param.numel() for param in self.optimizer.params.values())
        state_bytes = int(sum_over_ranks(torch.tensor(self.optimizer.state_bytes(), device=self.args.device)))
        width = next(iter(self.optimizer.params.values())).element_size()  # of a weight, and of its gradient
        return Result(self.losses, self.valid, self.seconds, state_bytes, params, self.optimizer.graphs(), 2 * width)


def train(runs: dict[str, Run], texts: tuple[Tensor, Tensor], args: argparse.Namespace, start: int = 0) -> None:
    """The loop: every step, one batch, and one step of each run on it (so that all are timed side by side)."""
    every = max(1, args.steps // 12)
    pause = 0.2 if sys.stderr.isatty() else 20.0  # seconds between two lines of progress
    steps = range(start, args.steps)
    bar = tqdm(steps, "resume" if start else "train", unit="step", mininterval=pause, disable=rank() > 0)
    for step in bar:
        if step == args.steps // 2 and not start and not args.fsdp and EIGHT_BIT in runs:
            save_checkpoint(runs[EIGHT_BIT], step, args)
        batch = get_batch(texts[0], args.seed, step, args)
        for run in runs.values():
            run.train_step(step, batch)
        if (step + 1) % every == 0 or step + 1 == args.steps:
            for run in runs.values():
                run.validate(step + 1, texts[1])
        bar.set_postfix({name: f"{run.losses[-1]:.4f}" for name, run in runs.items()}, refresh=False)


def sum_over_ranks(x: Tensor) -> float:
    total = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def clock(args: argparse.Namespace) -> float:
    """Seconds, after the device has finished what it was given."""
    if args.device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---------------------------------------------------------------------------------------------- checkpoint
def save_checkpoint(run: Run, step: int, args: argparse.Namespace) -> None:
    """Save a run of ours before `step`. The data has no state of its own: it follows from (seed, step)."""
    params = {name: param.detach() for name, param in run.optimizer.params.items()}
    saved = {"args": vars(args), "step": step, "params": params, "optimizer": fl.state_dict(run.optimizer.state)}
    torch.save(saved, checkpoint_path(args))


def checkpoint_path(args: argparse.Namespace) -> Path:
    return Path(args.out).with_suffix(".pt")


def resume(path: str, losses: str | None) -> None:
    """Go on from a checkpoint, with the arguments that are stored in it, to the end of the run."""
    saved = torch.load(path, weights_only=True)
    args = argparse.Namespace(**saved["args"])
    run = Run(EIGHT_BIT, args)
    with torch.no_grad():
        for name, param in run.optimizer.params.items():
            param.copy_(saved["params"][name])
    run.optimizer.state = fl.load_state_dict(run.optimizer.state, saved["optimizer"])
    train({EIGHT_BIT: run}, read_sources(), args, start=saved["step"])
    print(f"resumed at step {saved['step']}: train loss {run.losses[-1]!r}, validation loss {run.valid[args.steps]!r}")
    write_losses({EIGHT_BIT: run}, losses)


def resumes_exactly(run: Run, args: argparse.Namespace) -> bool:
    """Resume in a fresh process; True if every remaining loss equals that of the run that was never stopped."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "losses.json"
        command = [sys.executable, __file__, "--resume", str(checkpoint_path(args)), "--losses", str(log)]
        subprocess.run(command, check=True)
        resumed = json.loads(log.read_text())[EIGHT_BIT]
    kept = run.losses[args.steps // 2 :]
    valid = {str(step): loss for step, loss in run.valid.items() if step > args.steps // 2}
    equal = sum(a == b for a, b in zip(kept, resumed["train"], strict=True))
    exact = equal == len(kept) and valid == resumed["valid"]
    print(f"resumed in a fresh process: {equal} of the {len(kept)} remaining training losses are bit-equal,")
    print(f"the {len(valid)} validation losses {'too' if valid == resumed['valid'] else 'ARE NOT'}")
    return exact


# ---------------------------------------------------------------------------------------------------- main
def main() -> int:
    """Exit status: 0, or 1 if the resumed run was not bit-equal."""
    args = parse_arguments()
    torch.use_deterministic_algorithms(True)  # a resumed run on CUDA is bit-equal too
    torch.utils.deterministic.fill_uninitialized_memory = False
    if args.resume:
        resume(args.resume, args.losses)
        return 0
    if args.fsdp:
        join_ranks(args)
    texts = read_sources()
    runs = {name: Run(name, args) for name in dict.fromkeys(args.optimizers)}
    if rank() == 0:
        count = sum(param.numel() for param in next(iter(runs.values())).model.parameters())
        print(f"model: {count:,} parameters, {args.dtype}; data: {len(texts[0]):,} bytes, {len(texts[1]):,} held out")
        print(f"torch {torch.__version__} on {args.device}, ranks: {world_size()}, threads: {torch.get_num_threads()}")
    train(runs, texts, args)
    results = {name: run.result() for name, run in runs.items()}
    if rank() == 0:
        print_table(results)
        print_difference(results)
        plot(results, args.out)
        write_losses(runs, args.losses)
        print(f"picture: {args.out}", flush=True)
    if args.fsdp:
        dist.destroy_process_group()
    elif EIGHT_BIT in runs:
        return 0 if resumes_exactly(runs[EIGHT_BIT], args) else 1
    return 0


def write_losses(runs: dict[str, Run], path: str | None) -> None:
    """Every loss in full precision, to compare one invocation with another."""
    if path:
        losses = {name: {"train": run.losses, "valid": run.valid} for name, run in runs.items()}
        Path(path).write_text(json.dumps(losses))


def join_ranks(args: argparse.Namespace) -> None:
    """Join the group that torchrun set up; one thread per rank on CPU."""
    if "WORLD_SIZE" not in os.environ:
        sys.exit("byte_lm.py: --fsdp runs under torchrun: torchrun --nproc-per-node 2 examples/byte_lm.py --fsdp")
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if args.batch % int(os.environ["WORLD_SIZE"]):
        sys.exit(f"byte_lm.py: --batch {args.batch} must be a multiple of the number of ranks")
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="of each run (default 240)")
    parser.add_argument("--width", type=int, default=192, help="of the model, a multiple of 32 (default 192)")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="windows of 129 bytes per step, all ranks (default 8)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the parameters")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--optimizers", nargs="+", default=list(LABELS), choices=list(LABELS), metavar="NAME")
    parser.add_argument("--out", default="demo.png", help="the picture; the checkpoint lies beside it, as .pt")
    parser.add_argument("--losses", metavar="FILE", help="write every loss to this file, as JSON")
    parser.add_argument("--fsdp", action="store_true", help="shard with fully_shard; start with torchrun")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="go on from a checkpoint to its run's end")
    args = parser.parse_args()
    if args.steps < 2 or args.width % 32:
        parser.error("--steps must be at least 2 and --width a multiple of 32")
    return args


if __name__ == "__main__":
    sys.exit(main())
