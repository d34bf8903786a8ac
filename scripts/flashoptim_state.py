"""Write tests/convert/flashoptim.pt: optimizer states that FlashOptim itself made, for test_convert_flashoptim.py.

    pip install flashoptim==0.1.4 triton
    TRITON_INTERPRET=1 python scripts/flashoptim_state.py

FlashOptim needs CUDA. Triton's interpreter runs its kernels on the CPU: autotuning, which asks for a driver, is left
out, and so is the fused step, for which the interpreter lacks a function. The step in Python then calls the same
kernels that quantize, dequantize and split masters.
"""

import types
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

STEPS, MORE = 3, 3  # before the state is saved, and after it


class Fixed:
    """A kernel with the first of its configurations."""

    def __init__(self, kernel, config):
        self.kernel, self.kwargs = kernel, config.kwargs

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **{**kwargs, **self.kwargs})


def on_the_cpu() -> Any:
    """FlashOptim's module, for the interpreter."""
    triton.autotune = lambda configs, key: lambda kernel: Fixed(kernel, configs[0])
    torch.cuda.is_available = lambda: True
    torch.Tensor.is_cuda = property(lambda self: True)
    import flashoptim.optimizers as flash

    flash._get_sm_count = lambda device=None: 1
    flash.libdevice = types.SimpleNamespace(copysign=lambda x, sign: tl.where(sign < 0, -tl.abs(x), tl.abs(x)))
    return flash


def optimizers(flash: Any) -> dict[str, Any]:
    """Name to the dtype of the parameters, and the optimizer."""
    half, wide = torch.bfloat16, torch.float32
    return {
        "adamw, bfloat16, 24 bits": (half, lambda p: flash.FlashAdamW(p, 1e-2, fused=False)),
        "adam, float16, 32 bits": (
            torch.float16,
            lambda p: flash.FlashAdam(p, 1e-2, master_weight_bits=32, fused=False),
        ),
        "sgd, bfloat16, 32 bits": (
            half,
            lambda p: flash.FlashSGD(p, 1e-2, momentum=0.9, master_weight_bits=32, fused=False),
        ),
        "lion, float32": (wide, lambda p: flash.FlashLion(p, 1e-3, master_weight_bits=None, fused=False)),
        "adamw, not compressed": (
            wide,
            lambda p: flash.FlashAdamW(p, 1e-2, master_weight_bits=None, compress_state_dict=False, fused=False),
        ),
    }


def run(flash: Any, dtype: torch.dtype, make: Any) -> dict[str, Any]:
    """Two parameters: one of whole groups, and one with a shorter last group."""
    source = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=source).to(dtype)) for s in ((2, 64), (3, 13))]
    optimizer = make(params)
    grads = [[(0.1 * torch.randn(p.shape, generator=source)).to(dtype) for p in params] for _ in range(STEPS + MORE)]

    def step(gradients: list[torch.Tensor]) -> None:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()

    def masters() -> list[torch.Tensor]:
        states = [optimizer.state[p] for p in params]
        return [
            flash.reconstruct_fp32_param(p.detach(), s["error_bits"]) if "error_bits" in s else p.detach().clone()
            for p, s in zip(params, states, strict=True)
        ]

    for g in grads[:STEPS]:
        step(g)
    states = [optimizer.state[p] for p in params]
    found = {
        "saved": {**optimizer.state_dict()},
        "params": [p.detach().clone() for p in params],
        "moments": [{k: v.materialize().clone() for k, v in s.items() if hasattr(v, "materialize")} for s in states],
        "masters": masters(),
        "grads": grads[STEPS:],
    }
    found = _copy(found)
    for g in grads[STEPS:]:
        step(g)
    return {**found, "later": masters()}


def _copy(tree: Any) -> Any:
    """With tensors of their own: the next step writes into those of the optimizer."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: _copy(v) for k, v in tree.items()}
    return type(tree)(map(_copy, tree)) if isinstance(tree, (list, tuple)) else tree


def main() -> None:
    """All of them into one file."""
    flash = on_the_cpu()
    found = {name: run(flash, *how) for name, how in optimizers(flash).items()}
    torch.save(found, Path(__file__).parents[1] / "tests" / "convert" / "flashoptim.pt")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
