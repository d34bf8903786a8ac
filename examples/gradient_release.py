"""Step each parameter during the backward pass, and free its gradient at once: gradients take the room of one leaf.

Two copies of the small transformer of byte_lm.py train on the same bytes, in bfloat16 with 4-bit moments and stochastic
rounding: one steps after the backward pass, as usual, the other inside it. Every loss is the same, bit for bit, since a
leaf's step depends on that leaf alone. (A transformation that looks at all leaves first, as clip_by_global_norm does,
cannot be used like this.)

    python examples/gradient_release.py                       # less than a minute on 2 CPU cores
    python examples/gradient_release.py --rounding nearest    # what bfloat16 loses without stochastic rounding

The part to copy is `Release`.
"""

import argparse
import sys
from functools import partial

import torch
from byte_lm import ByteLM, get_batch, read_sources
from torch import Tensor

import functional_lowbit as fl


class Ordinary:
    """Backward, then one step for all leaves."""

    def __init__(self, model: ByteLM, tx: fl.GradientTransformation, step):
        self.model, self.step = model, step
        self.params = dict(model.named_parameters())
        self.state = tx.init(self.params)
        self.most_gradient_bytes = 0

    def train(self, batch: Tensor) -> float:
        loss = self.model(batch)
        loss.backward()
        grads = {name: param.grad for name, param in self.params.items()}
        self.most_gradient_bytes = max(self.most_gradient_bytes, bytes_of_gradients(self.params))
        self.params, self.state = self.step(grads, self.state, self.params)
        for param in self.params.values():
            param.grad = None
        return loss.item()


class Release:
    """A step for each leaf as soon as its gradient is there; one compiled step serves them all."""

    def __init__(self, model: ByteLM, tx: fl.GradientTransformation, step):
        self.model, self.step = model, step
        self.params = dict(model.named_parameters())
        self.state = {name: tx.init({name: param}) for name, param in self.params.items()}
        self.most_gradient_bytes = 0
        for name, param in self.params.items():
            param.register_post_accumulate_grad_hook(partial(self.take_step, name))

    def take_step(self, name: str, param: Tensor) -> None:
        """Called by autograd when all of a parameter's gradient is in, and so nobody reads its old value any more."""
        self.most_gradient_bytes = max(self.most_gradient_bytes, bytes_of_gradients(self.params))
        # The leaf keeps its name, from which the noise of stochastic rounding follows. Written in place.
        _, self.state[name] = self.step({name: param.grad}, self.state[name], {name: param})
        param.grad = None

    def train(self, batch: Tensor) -> float:
        loss = self.model(batch)
        loss.backward()
        return loss.item()


def bytes_of_gradients(params: dict[str, Tensor]) -> int:
    """Bytes of all gradients that are there now."""
    return sum(param.grad.nbytes for param in params.values() if param.grad is not None)


def main() -> int:
    """Exit status: 0, or 1 if a loss or a parameter differs."""
    args = parse_arguments()
    torch.use_deterministic_algorithms(True)
    adamw = {4: fl.adamw4bit, 8: fl.adamw8bit, 32: fl.adamw}[args.bits]
    tx = adamw(2e-3, b2=0.99, weight_decay=0.1)
    stochastic = {"rounding": "stochastic", "key": args.seed} if args.rounding == "stochastic" else {}
    step = fl.compile(tx, backend=args.backend, **stochastic)
    text, _ = read_sources(args.bytes)
    runs = []
    for kind in (Ordinary, Release):
        torch.manual_seed(args.seed)
        runs.append(kind(ByteLM(args.width, args.layers).to(args.device, torch.bfloat16), tx, step))
    ordinary, release = runs
    equal = 0
    for i in range(args.steps):
        batch = get_batch(text, args.seed, i, args)
        losses = [run.train(batch) for run in runs]
        equal += losses[0] == losses[1]
        if i % max(1, args.steps // 6) == 0 or i + 1 == args.steps:
            print(f"step {i + 1:4}: loss {losses[0]:.4f} after the backward pass, {losses[1]:.4f} inside it")

    reports = [fl.describe(run.state, run.params) for run in runs]
    print(f"\n{reports[0].parameters:,} parameters in bfloat16, rounding: {args.rounding}; bytes for each of them:")
    print(f"{'step':24}{'weights':>9}{'gradients':>11}{'state':>8}{'together':>10}")
    for name, run, report in zip(("after the backward pass", "inside it"), runs, reports, strict=True):
        sizes = [report.weight_bytes, run.most_gradient_bytes, report.total_bytes]
        each = [size / report.parameters for size in (*sizes, sum(sizes))]
        print("{:24}{:9.2f}{:11.2f}{:8.2f}{:10.2f}".format(name, *each))
    largest = max(param.nbytes for param in release.params.values())
    print(f"(describe: {reports[0].bytes_per_parameter:.2f} with all gradients.) Inside the backward pass at most")
    print(f"{release.most_gradient_bytes:,} bytes of gradients were there at once; the largest leaf has {largest:,}.")
    same = all(torch.equal(p, release.params[name]) for name, p in ordinary.params.items())
    print(f"{equal} of {args.steps} losses are bit-equal; the parameters {'too' if same else 'ARE NOT'}")
    return 0 if same and equal == args.steps else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 32 (default 128)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8, 32], help="of each moment (default 4)")
    parser.add_argument("--batch", type=int, default=8, help="windows of 129 bytes per step (default 8)")
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of text, at most (default 4 Mi)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and noise")
    parser.add_argument("--rounding", default="stochastic", choices=["stochastic", "nearest"])
    parser.add_argument("--backend", help="of fl.compile; eager needs no C++ compiler")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
