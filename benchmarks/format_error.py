"""How far an AdamW update is from that of unrounded moments, for each format: the table in docs/formats.md.

    python benchmarks/format_error.py        # a minute on 2 CPU cores, and the demo's requirements

A small transformer reads bytes (examples/byte_lm.py, width 64) for some steps in float32. Then both moments, and each
alone, are rounded once, and the norm of the update's error is divided by the norm of the update, over all weights that
`low_bit` would store.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import functional_lowbit as fl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import byte_lm

B1, B2, EPS = 0.9, 0.999, 1e-8


def moments(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Adam's first and second moments after some steps of training."""
    args = argparse.Namespace(width=64, layers=2, batch=8, seed=0, device="cpu", dtype="float32", fsdp=False)
    torch.manual_seed(0)
    model = byte_lm.build_model(args)
    text, _ = byte_lm.read_sources(1 << 20)
    params = dict(model.named_parameters())
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw(2e-3, B1, B2, EPS))
    state, step = tx.init(params), fl.compile(tx, backend="eager")
    for i in range(steps):
        loss = model(byte_lm.get_batch(text, 0, i, args))
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        params, state = step(grads, state, params)
    adam = state[1][0]
    large = [name for name, p in params.items() if p.numel() >= 4096]
    return {n: adam.mu[n] for n in large}, {n: adam.nu[n] for n in large}, steps


def error(mu: dict[str, Tensor], nu: dict[str, Tensor], t: int, format: str, which: str) -> float:
    """Relative error of the update with rounded moments."""
    wrong = right = 0.0
    for name in mu:
        m, v = mu[name], nu[name]
        m_read = fl.quantize(m, format).dequantize() if "mu" in which else m
        v_read = fl.quantize(v, format, signed=False).dequantize() if "nu" in which else v
        u = update(m, v, t)
        wrong += float((update(m_read, v_read, t) - u).square().sum())
        right += float(u.square().sum())
    return (wrong / right) ** 0.5


def update(m: Tensor, v: Tensor, t: int) -> Tensor:
    return (m.double() / (1 - B1**t)) / ((v.double() / (1 - B2**t)).sqrt() + EPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    mu, nu, t = moments(parser.parse_args().steps)
    print(f"torch {torch.__version__}, {t} steps, {sum(m.numel() for m in mu.values()):,} weights")
    print("format      block  first moment  second moment     both")
    for name in fl.formats.names():
        cells = [error(mu, nu, t, name, which) for which in ("mu", "nu", "mu nu")]
        block = fl.formats.get(name).block_size if fl.formats.get(name).scaled else "–"
        print(f"{name:12}{block:>5}  {cells[0]:12.4f}  {cells[1]:13.4f}  {cells[2]:7.4f}")


if __name__ == "__main__":
    main()
