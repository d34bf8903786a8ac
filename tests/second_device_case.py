"""offload with parameters on a second device: run by `test_offload_devices.py`, in a process of its own."""

from typing import Any

import second_device as desk
import torch
import torch.utils._pytree as pytree
from helpers import random_like, same
from torch import Tensor

import functional_lowbit as fl

desk.set_up()
PARAMS = {"w": torch.empty(256, 384), "v": torch.empty(33, 257), "b": torch.empty(3), "none": torch.empty(4)}


def to_desk(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(desk.DESK) if isinstance(x, Tensor) else x, tree)


def to_cpu(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.to("cpu") if isinstance(x, Tensor) else x, tree)


def devices(tree: Any) -> set[str]:
    return {x.device.type for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.ndim}


def run(tx: fl.GradientTransformation, params: Any, grads: list[Any], way: str, **options: Any) -> Any:
    params, state = fl.tree.map(lambda p: p.clone(), params), tx.init(params)
    step = fl.compile(tx, backend="eager", donate=way != "copied", **options)
    for g in grads:
        if way == "pure":
            updates, state = tx.update(g, state, params)
            params = fl.apply_updates(params, updates)
        else:
            params, state = step(g, state, params)
    return params, state


def check(name: str, plain: fl.GradientTransformation, tx: fl.GradientTransformation, way: str, **options: Any) -> None:
    dtype = options.pop("dtype", None)
    params = random_like(PARAMS, 0, dtype)
    grads = [{**random_like(PARAMS, 1 + t, dtype), "none": None} for t in range(2)]
    wanted = run(plain, params, grads, "donated", **options)
    found = run(tx, to_desk(params), to_desk(grads), way, **options)
    assert devices(found[0]) == {"desk"}, (name, way)
    assert devices(found[1]) == {"cpu"}, (name, way, devices(found[1]))
    assert same(to_cpu(found), wanted), (name, way)


def main() -> None:
    with desk.Desk():
        size = 40_000  # w, of 98304 elements, goes through in pieces
        for format in fl.formats.names():
            plain = fl.adamw8bit(1e-2, format=format)
            for way in ("donated", "copied", "pure"):
                check(format, plain, fl.offload(plain, buffer_size=size), way)
        adam = fl.adamw8bit(1e-2)
        cases = {
            "clip": lambda tx: fl.chain(fl.clip_by_global_norm(0.5), tx),
            "gate": lambda tx: fl.apply_if_finite(tx),
            "mask": lambda tx: fl.masked(tx, {"w": True, "v": False, "b": True, "none": True}),
        }
        for name, wrap in cases.items():
            for way in ("donated", "pure"):
                check(f"{name} around", wrap(adam), wrap(fl.offload(adam, buffer_size=size)), way)
                check(f"{name} inside", wrap(adam), fl.offload(wrap(adam), buffer_size=size), way)
        check("low_bit around", fl.low_bit(fl.adam(1e-2)), fl.low_bit(fl.offload(fl.adam(1e-2))), "donated")
        check(
            "stochastic", adam, fl.offload(adam, buffer_size=size), "donated", dtype=torch.bfloat16,
            rounding="stochastic", key=3,
        )  # fmt: skip
        # The errors of master weights stay with the parameters.
        half = random_like(PARAMS, 0, torch.bfloat16)
        grads = [random_like(PARAMS, 1 + t, torch.bfloat16) for t in range(2)]
        wanted = run(fl.master_weights(adam), half, grads, "donated")
        found = run(fl.offload(fl.master_weights(adam), buffer_size=size), to_desk(half), to_desk(grads), "donated")
        assert same(to_cpu(found), wanted)
        assert devices(found[1].error) == {"desk"}
        assert devices(found[1].inner_state) == {"cpu"}


if __name__ == "__main__":
    main()
