"""The study behind the default formats: errors on real moments, bytes, times, and losses of whole trainings.

    python benchmarks/format_study.py --out docs              # about 15 minutes on 2 CPU cores
    python benchmarks/format_study.py --parts errors --no-timing --steps 40 --out study

Needs the demo's requirements. It fills the marked places of `formats.md` in the folder of `--out` (or writes a file for
each, if there is no such page), draws `formats_pareto.png` and `formats_curves.png`, and keeps every number in
`formats.json`. See benchmarks/README.md for how to read it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import functional_lowbit as fl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import byte_lm
import format_study_candidates as candidates
import format_study_report as report
import step_time
from byte_lm import B1, B2, CLIP, DECAY, EPS, decays, get_batch

from functional_lowbit.cli import _contenders as contenders
from functional_lowbit.cli._contenders import race, warm_up
from functional_lowbit.formats import Format

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
CANDIDATE_BLOCKS = (64, 128, 256)
MIN_SIZE = 4096  # low_bit's own
LION = 0.2  # of AdamW's learning rate, and its weight decay by 1 / LION
SIZES = {  # (width, layers) of the model: for errors, for curves
    "study": ((512, 1), (128, 2)),  # rows of 512 and 2048, so that large blocks are large; three seeds in minutes
    "demo": ((192, 3), (192, 3)),
    "tiny": ((32, 1), (32, 1)),
}
Maker = Callable[[argparse.Namespace, str], fl.GradientTransformation]
Trees = dict[str, dict[str, Tensor]]  # "mu", "nu", "g" -> leaves by name


# ---------------------------------------------------------------------------------------------------- training
def model_args(size: tuple[int, int], steps: int, seed: int, batch: int) -> argparse.Namespace:
    """What byte_lm's functions ask for."""
    return argparse.Namespace(
        width=size[0], layers=size[1], batch=batch, steps=steps, seed=seed, device="cpu", dtype="float32", fsdp=False
    )


def adamw(args: argparse.Namespace, format: str | Format) -> fl.GradientTransformation:
    """The demo's optimizer."""
    rate = byte_lm.schedule(args)
    tx = fl.adamw8bit(rate, B1, B2, EPS, weight_decay=DECAY, mask=decays, format=format)
    return fl.chain(fl.clip_by_global_norm(CLIP), tx)


def lion(args: argparse.Namespace, format: str | Format) -> fl.GradientTransformation:
    """Lion with the demo's schedule, at a rate that suits it."""
    rate = byte_lm.schedule(args)
    tx = fl.lion8bit(lambda step: LION * rate(step), weight_decay=DECAY / LION, mask=decays, format=format)
    return fl.chain(fl.clip_by_global_norm(CLIP), tx)


class Ours:
    """One of our optimizers on a module, as byte_lm.Functional, for any transformation. The step is shared by seeds."""

    def __init__(self, tx: fl.GradientTransformation, step: Any, module: torch.nn.Module):
        self.params, self.step = dict(module.named_parameters()), step
        self.state = tx.init(self.params)

    def update(self, step: int) -> None:
        grads = {name: p.grad for name, p in self.params.items()}
        self.params, self.state = self.step(grads, self.state, self.params)


def backward(model: byte_lm.ByteLM, text: Tensor, step: int, args: argparse.Namespace) -> float:
    """Gradients into the parameters; the loss."""
    model.zero_grad()
    loss = model(get_batch(text, args.seed, step, args))
    loss.backward()
    return loss.item()


def snapshots(
    make: Callable[..., fl.GradientTransformation], text: Tensor, args: argparse.Namespace
) -> dict[int, Trees]:
    """Step -> float32 moments after that many steps, and the gradient that comes next; leaves that are stored."""
    model = byte_lm.build_model(args)
    tx = make(args, "float32")
    run = Ours(tx, fl.compile(tx), model)
    wanted = sorted({max(1, args.steps // 8), max(1, args.steps // 2), args.steps})
    found: dict[int, Trees] = {}
    for step in tqdm(range(args.steps + 1), make.__name__, mininterval=1.0):
        backward(model, text, step, args)
        if step in wanted:
            large = [n for n, p in run.params.items() if p.numel() >= MIN_SIZE]
            state = run.state[1][0]
            moments = {field: getattr(state, field) for field in ("mu", "nu") if hasattr(state, field)}
            grads = {n: p.grad for n, p in run.params.items() if p.grad is not None}
            moments["g"] = grads
            found[step] = {k: {n: _dense(tree[n]) for n in large} for k, tree in moments.items()}
        if step < args.steps:
            run.update(step)
    return found


def _dense(x: Any) -> Tensor:
    return (x.dequantize() if isinstance(x, fl.QuantizedTensor) else x).detach().clone()


# ------------------------------------------------------------------------------------------------------ errors
class Entry(NamedTuple):
    """One way to store moments, at one block size."""

    name: str
    block: int | None  # None: no blocks
    read: candidates.Read
    format: Format | None  # to time; None: not as a block-local format
    kind: str  # "format" or "candidate"
    default: bool  # whether it is at its default block size


def store(format: Format, x: Tensor, signed: bool, block: int | None) -> tuple[Tensor, int]:
    q = fl.quantize(x, format, signed=signed, block_size=block)
    return q.dequantize(), q.nbytes


def entries() -> list[Entry]:
    """Every format at every block size, and the candidates."""

    def reader(format: Format) -> candidates.Read:
        return lambda x, signed, block: store(format, x, signed, block)

    found = []
    for f in (*map(fl.formats.get, fl.formats.names()), *candidates.FORMATS):
        known = f not in candidates.FORMATS
        for block in (BLOCKS if known else CANDIDATE_BLOCKS) if f.scaled else (None,):
            kind = "format" if known else "candidate"
            found.append(Entry(f.name, block, reader(f), f, kind, block in (None, f.block_size)))
    for name, levels in candidates.RANK1.items():
        read = candidates.rank1(levels, store)
        found += [Entry(name, block, read, None, "candidate", block == 128) for block in CANDIDATE_BLOCKS]
    return found


def adam_update(m: Tensor, v: Tensor, t: int) -> Tensor:
    """In units of the learning rate."""
    return (m.double() / (1 - B1**t)) / ((v.double() / (1 - B2**t)).sqrt() + EPS)


def error_row(entry: Entry, adam: dict[int, Trees], signs: dict[int, Trees]) -> dict[str, Any]:
    """Errors of one entry, pooled over all steps and leaves; `leaves` and `steps` have each one's own."""
    wrong: dict[str, float] = dict.fromkeys(("both", "mu", "nu"), 0.0)
    right, nbytes, numel, zeros, worst_change = 0.0, 0, 0, 0, 0.0
    leaves: dict[str, list[float]] = {}
    steps: dict[int, float] = {}
    for t, trees in adam.items():
        wrong_before, right_before = wrong["both"], right
        for name, m in trees["mu"].items():
            v = trees["nu"][name]
            m_read, m_bytes = entry.read(m, True, entry.block)
            v_read, v_bytes = entry.read(v, False, entry.block)
            u = adam_update(m, v, t)
            for which, (a, b) in {"both": (m_read, v_read), "mu": (m_read, v), "nu": (m, v_read)}.items():
                change = adam_update(a, b, t) - u
                squares = float(change.square().sum())
                wrong[which] += squares
                if which == "both":
                    worst_change = max(worst_change, float(change.abs().max()))
                    leaf = leaves.setdefault(name, [0.0, 0.0])
                    leaf[0] += squares
                    leaf[1] += float(u.square().sum())
            right += float(u.square().sum())
            zeros += int(((v > 0) & (v_read == 0)).sum())
            nbytes, numel = nbytes + m_bytes + v_bytes, numel + m.numel()
        steps[t] = ((wrong["both"] - wrong_before) / (right - right_before)) ** 0.5
    flips = flipped = 0
    for trees in signs.values():
        for name, m in trees["mu"].items():
            read = entry.read(m, True, entry.block)[0]
            fresh = 0.1 * trees["g"][name]
            flipped += int((torch.sign(0.9 * read + fresh) != torch.sign(0.9 * m + fresh)).sum())
            flips += m.numel()
    return {
        "name": entry.name,
        "block": entry.block,
        "kind": entry.kind,
        "default": entry.default,
        **{which: (x / right) ** 0.5 for which, x in wrong.items()},
        "max_change": worst_change,
        "zeros": zeros,
        "flips": flipped / flips,
        "bytes_per_param": nbytes / numel,
        "steps": steps,
        "leaves": {name: (a / b) ** 0.5 for name, (a, b) in leaves.items()},
    }


def errors(args: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[args.sizes][0]
    settings = model_args(size, args.steps or 400, 0, args.batch)
    text = byte_lm.read_sources()[0]
    adam, signs = snapshots(adamw, text, settings), snapshots(lion, text, settings)
    todo = entries()
    with torch.no_grad():
        rows = [error_row(entry, adam, signs) for entry in tqdm(todo, "errors", mininterval=1.0)]
    result: dict[str, Any] = {"width": size[0], "layers": size[1], "steps": list(adam)}
    result["weights"] = sum(m.numel() for m in adam[settings.steps]["mu"].values())
    if not args.no_timing:
        result["timing"] = timing(todo, rows, args)
    return result | {"rows": rows}


# ------------------------------------------------------------------------------------------------------ timing
def timing(todo: list[Entry], rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Times of a compiled AdamW step on one leaf, all in one race with torch's fused one: into `rows`."""
    shapes = step_time.workloads(args.size)["one"]
    params, grads = (contenders.leaves(shapes, torch.float32, "cpu", seed) for seed in (0, 1))
    made = {contenders.REFERENCE: step_time.make(contenders.REFERENCE, shapes, "cpu")}
    for entry in tqdm(todo, "compile", mininterval=1.0):
        if entry.format is None or (entry.kind == "candidate" and entry.block != entry.format.block_size):
            continue
        tx = contenders.low_bit(entry.format, entry.block)
        made[f"{entry.name} {entry.block}"] = contenders.functional(tx, params, grads)
    racers = {name: warm_up(contender, "cpu") for name, contender in made.items()}
    reference = racers[contenders.REFERENCE]
    print(machine := report.machine("cpu"))
    for _ in tqdm(range(args.rounds), "time", mininterval=1.0):
        race(racers, reference, 1, "cpu", slow_rounds=args.rounds)
    for row in rows:
        racer = racers.get(f"{row['name']} {row['block']}")
        if racer is not None:
            row["ratio"], row["ratios"] = statistics.median(racer.ratios), racer.ratios
            row["ns"] = 1e9 * statistics.median(racer.seconds) / params[0].numel()
    noise = sorted(reference.ratios)
    fused = 1e9 * statistics.median(reference.seconds) / params[0].numel()
    return {"machine": machine, "elements": params[0].numel(), "fused_ns": fused, "fused_ratios": noise}


# ------------------------------------------------------------------------------------------------------ curves
def curves(args: argparse.Namespace) -> dict[str, Any]:
    size, steps = SIZES[args.sizes][1], args.steps or 240
    texts = byte_lm.read_sources()
    of_shape = model_args(size, steps, 0, args.batch)
    runs: dict[str, Any] = {"torch fused": None}
    wanted = ["float32", *(name for name in fl.formats.names() if name in args.formats)]
    runs |= {name: adamw(of_shape, name) for name in wanted}
    runs |= {f"lion {name}": lion(of_shape, name) for name in ("float32", "companded8", "root4")}
    compiled = {name: None if tx is None else fl.compile(tx) for name, tx in runs.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    with tqdm(total=len(runs) * args.seeds * steps, desc="curves", mininterval=1.0) as bar:
        for seed in range(args.seeds):
            settings = model_args(size, steps, seed, args.batch)
            for name, tx in runs.items():
                bar.set_postfix_str(f"{name}, seed {seed}", refresh=False)
                model = byte_lm.build_model(settings)
                ours = byte_lm.Torch(name, model, settings) if tx is None else Ours(tx, compiled[name], model)
                losses = []
                for step in range(steps):
                    losses.append(backward(model, texts[0], step, settings))
                    ours.update(step)
                    bar.update()
                found[name].append({"losses": losses, "valid": validation_loss(model, texts[1], settings)})
    return {"width": size[0], "layers": size[1], "steps": steps, "seeds": args.seeds, "runs": found}


@torch.no_grad()
def validation_loss(model: byte_lm.ByteLM, text: Tensor, args: argparse.Namespace) -> float:
    """On the same 32 batches of held-out text every time; nats per byte."""
    return statistics.fmean(model(get_batch(text, -1, i, args)).item() for i in range(32))


# -------------------------------------------------------------------------------------------------------- main
PARTS = {"errors": errors, "curves": curves}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="*", default=list(PARTS), help="what to measure; none: only write formats.json's tables again"
    )
    parser.add_argument("--steps", type=int, help="of each training (default: 400 for errors, 240 for curves)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each format")
    parser.add_argument("--sizes", default="study", choices=list(SIZES), help="of the models")
    parser.add_argument("--batch", type=int, default=8, help="windows of 129 bytes per step")
    parser.add_argument("--formats", nargs="+", default=list(fl.formats.names()), help="of the curves")
    parser.add_argument("--size", type=int, default=2**22, help="elements of the leaf that is timed")
    parser.add_argument("--rounds", type=int, default=9, help="timings of each format")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--out", default="docs", help="folder of the tables and pictures")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}; got {', '.join(unknown)}")
    return args


def main() -> None:
    args = parse()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "formats.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for part in args.parts:
        print(report.machine("cpu"))
        start = time.perf_counter()
        result = PARTS[part](args)
        seconds = time.perf_counter() - start
        results[part] = {"command": report.command(sys.argv[1:], part), "seconds": seconds, **result}
        kept.write_text(json.dumps(report.rounded(results)) + "\n")
        print(f"{part}: {seconds:.0f} s")
    report.publish(json.loads(kept.read_text()), out)


if __name__ == "__main__":
    main()
