"""offload with parameters on a second device: run by `test_offload.py`, in a process of its own."""

from typing import Any

import second_device as desk
import torch
import torch.utils._pytree as pytree
from helpers import random_like, refuses, same
from torch import Tensor

import functional_lowbit as fl

PARAMS = {"w": torch.empty(96, 384), "v": torch.empty(33, 257), "b": torch.empty(3), "none": torch.empty(4)}


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


def numbers_are_those_of_the_plain_step() -> None:
    size = 20_000  # w, of 36864 elements, goes through in pieces
    for format in fl.formats.names():
        plain = fl.adamw8bit(1e-2, format=format)
        for way in ("donated", "pure"):
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
    # The errors of master weights rest with the moments, or with the parameters.
    half = random_like(PARAMS, 0, torch.bfloat16)
    grads = [random_like(PARAMS, 1 + t, torch.bfloat16) for t in range(2)]
    wanted = run(fl.master_weights(adam), half, grads, "donated")
    for tx, where in (
        (fl.offload(fl.master_weights(adam), buffer_size=size), "cpu"),
        (fl.master_weights(fl.offload(adam, buffer_size=size)), "desk"),
    ):
        for way in ("donated", "pure"):
            found = run(tx, to_desk(half), to_desk(grads), way)
            assert same(to_cpu(found), wanted), (where, way)
            assert devices(found[1].error) == {where}
            assert devices(found[1].inner_state) == {"cpu"}


def streams_are_asked_for_what_the_plan_says() -> None:
    tx, params = fl.offload(fl.sgd(0.1, 0.9), buffer_size=4096), to_desk(random_like(torch.empty(2500), 0))
    step, state = fl.compile(tx, backend="eager"), tx.init(params)  # 3 pieces
    step(params.clone(), state, params)
    desk.Stream.log.clear()
    for stream in desk.Stream.made:
        stream.events = 0
    step(params.clone(), state, params)
    wanted = """
        current records current1, in waits for current1, out waits for current1, in does a job, in records in1,
        in does a job, in records in2,
        current waits for in1, current does a job, current records current2,
        out waits for current2, out does a job, out records out1,
        in waits for out1, in does a job, in records in3,
        current waits for in2, current does a job, current records current3,
        out waits for current3, out does a job, out records out2,
        current waits for in3, current does a job, current records current4,
        out waits for current4, out does a job, out records out3,
        current waits for stream in, current waits for stream out, host waits for stream out, host waits for stream in
    """
    assert desk.Stream.log == [entry.strip() for entry in wanted.replace("\n", " ").split(",")], desk.Stream.log


def memory_is_pinned_and_stays_so() -> None:
    tx, params = fl.offload(fl.adamw8bit(0.1), buffer_size=4096), to_desk(random_like({"w": torch.empty(80, 80)}, 0))

    def is_pinned(state: Any) -> bool:
        return all(x.is_pinned() for x in pytree.tree_leaves(state) if x.ndim)

    state = tx.init(params)
    assert is_pinned(state)
    copied = fl.compile(tx, backend="eager", donate=False)(params, state, params)[1]
    assert is_pinned(copied)
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in fl.state_dict(state).items()}
    assert not is_pinned({k: v for k, v in saved.items() if k != "schema"})
    assert is_pinned(fl.load_state_dict(state, saved))
    assert is_pinned(tx.update(params, state, params)[1])


def the_device_never_holds_all_of_the_state() -> None:
    params = to_desk(random_like({str(i): torch.empty(16, 1024) for i in range(12)}, 0))
    leaf = 4 * 16 * 1024  # bytes of one moment of one leaf
    tx, grads = fl.offload(fl.adam(0.1), buffer_size=leaf), fl.tree.map(torch.clone, params)
    with desk.MEMORY.at_most(2 * leaf):
        state = tx.init(params)
    with desk.MEMORY.at_most(2 * leaf):
        fl.low_bit(tx).init(params)
        fl.offload(fl.low_bit(fl.adam(0.1))).init(params)
    assert fl.describe(state).total_bytes > 24 * leaf
    step = fl.compile(tx, backend="eager")
    # Two buffers, and the kernel's own tensors, here not fused, of half a leaf: a buffer holds both moments of that.
    with desk.MEMORY.at_most(10 * leaf):
        step(grads, state, params)
    # 12 leaves of updates are the result; beside them one leaf's moments, and what the update makes of them.
    with desk.MEMORY.at_most((2 * 12 + 12) * leaf):
        tx.update(grads, state, params)


def a_state_of_another_device_is_refused() -> None:
    plain, params = fl.scale_by_adam(), to_desk({"w": torch.ones(3)})
    tx = fl.offload(plain)
    refuses(
        ValueError,
        "compile(tx): state.mu['w'] is on desk:0, but fl.offload keeps it on the CPU; make the state with init(params) "
        "of the offloaded transformation",
        lambda: fl.compile(tx)(params, plain.init(params), params),
    )
    refuses(
        ValueError,
        "compile(tx): state.mu['w'] is on cpu, but its parameter is on desk:0; make the state with init(params) after "
        "the parameters are moved",
        lambda: fl.compile(plain)(params, tx.init(params), params),
    )


def as_a_torch_optimizer() -> None:
    def trained(tx: Any, move: Any) -> Any:
        params = [torch.nn.Parameter(move(random_like(torch.empty(n, 300), n))) for n in (20, 30)]
        optimizer = fl.optim.Optimizer(params, tx, backend="eager")
        for t in range(3):
            for p in params:
                p.grad = move(random_like(torch.empty(p.shape), t))
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer = fl.optim.Optimizer(params, tx, backend="eager")
            optimizer.load_state_dict(saved)
        return [p.detach() for p in params], optimizer.state_dict()["state"]

    plain = fl.adamw8bit(0.01)
    params, state = trained(fl.offload(plain, buffer_size=9000), to_desk)
    assert devices(params) == {"desk"}
    assert devices(state) == {"cpu"}  # set_optimizer_state_dict wants one device, also for the schema
    assert same(to_cpu((params, state)), trained(plain, lambda x: x))


if __name__ == "__main__":  # not where pytest looks for doctests: the device would be there for all other tests
    desk.set_up()
    with desk.Desk():
        streams_are_asked_for_what_the_plan_says()
        memory_is_pinned_and_stays_so()
        the_device_never_holds_all_of_the_state()
        a_state_of_another_device_is_refused()
        as_a_torch_optimizer()
        numbers_are_those_of_the_plain_step()
