"""fl.convert and files of this library: names, counters, blocks, and what is damaged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import leaves, refuses, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import functional_lowbit as fl

PARAMS = {"a.weight": torch.ones(64, 64), "b": torch.ones(3)}
GROUPS = [{"params": list(PARAMS), "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]


def _saved(tx: fl.GradientTransformation, steps: int = 2) -> dict[str, Any]:
    state = tx.init(PARAMS)
    for k in range(steps):
        grads = {name: (k + 1.0) * torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in PARAMS.items()}
        state = tx.update(grads, state, PARAMS)[1]
    return fl.state_dict(state)


LABELLED = {
    "partition": lambda: fl.partition({"mu": fl.adam(1e-3), "nu": fl.adam(1e-3)}, {"a.weight": "mu", "b": "nu"}),
    "named_chain": lambda: fl.named_chain(("trace", fl.clip(9.0)), ("mu", fl.adam(1e-3))),
    "inject_hyperparams": lambda: fl.inject_hyperparams(lambda mu: fl.adam(mu))(1e-3),
    "a parameter": lambda: fl.adam(1e-3),
}


@pytest.mark.parametrize("name", LABELLED)
def test_names_that_fields_have_too(name: str):
    """Labels, names in a chain, hyperparameters and parameters may be called `mu`."""
    saved = _saved(LABELLED[name]())
    assert {n: tuple(p.shape) for n, p in fl.convert.params_of(saved).items()} == {"a.weight": (64, 64), "b": (3,)}
    wanted = _saved(fl.adam(1e-3))
    assert same(fl.convert.to_torch(saved, GROUPS), fl.convert.to_torch(wanted, GROUPS))
    tree = {"mu": {"nu": torch.ones(2), "step": torch.ones(3)}, "step": torch.ones(4)}
    params = fl.convert.params_of(fl.state_dict(LABELLED["a parameter"]().init(tree)))
    assert {n: tuple(p.shape) for n, p in params.items()} == {"mu.nu": (2,), "mu.step": (3,), "step": (4,)}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))


def _optimizer(model: nn.Module, tx: fl.GradientTransformation, nan: bool = False) -> fl.optim.Optimizer:
    optimizer = fl.optim.Optimizer(model.named_parameters(), tx, backend="eager")
    for value in (1.0, float("nan") if nan else 2.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()
    return optimizer


def test_a_saved_optimizer_has_the_counter_beside_its_moments():
    """A schedule's counter, which counts a step that was left out too, is another one."""
    tx = fl.chain(fl.scale_by_schedule(fl.schedules.constant_schedule(1.0)), fl.apply_if_finite(fl.scale_by_adam(), 5))
    model = _net()
    optimizer = _optimizer(model, tx, nan=True)
    groups = [{**GROUPS[0], "params": [name for name, _ in model.named_parameters()]}]
    back = fl.convert.to_torch(optimizer.state_dict(), groups)
    assert {float(entries["step"]) for entries in back["state"].values()} == {1.0}
    assert same(back, fl.convert.to_torch(optimizer, groups))


@pytest.mark.parametrize("clip", [False, True])
def test_a_flattened_optimizer(clip: bool):
    """Entries have dots in their names, as parameters have."""
    tx = fl.chain(fl.clip(9.0), fl.adamw8bit(1e-3)) if clip else fl.adamw8bit(1e-3)
    model = _net()
    optimizer = _optimizer(model, tx)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert fl.convert.library_of(flat) == "functional_lowbit"
    params = dict(model.named_parameters())
    assert list(fl.convert.params_of(flat)) == list(params)
    target = fl.adam(1e-3).init(params)
    assert same(fl.convert.from_saved(flat, target), fl.convert.from_saved(optimizer, target, params))
    groups = [{**GROUPS[0], "params": list(params)}]
    assert same(fl.convert.to_torch(flat, groups), fl.convert.to_torch(optimizer, groups))


def test_a_tree_with_a_state():
    """Its leaves begin as those of a flattened optimizer do."""
    saved = fl.state_dict({"params": PARAMS, "state": fl.adam(1e-3).init(PARAMS)})
    assert list(fl.convert.params_of(saved)) == list(PARAMS)


def test_flattened_groups_whose_tensors_print_alike():
    params = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    rates = {"a": 0.00100001, "b": 0.00100002}
    flat = {f"state.{name}.step": torch.tensor(1.0) for name in params}
    flat |= {f"state.{name}.{entry}": torch.ones(2) for name in params for entry in ("exp_avg", "exp_avg_sq")}
    flat |= {f"param_groups.{name}.lr": torch.tensor(rate) for name, rate in rates.items()}
    groups = [{"params": [(name, p)]} for name, p in params.items()]
    ours = fl.optim.AdamW8bit(groups, backend="eager")
    found = fl.convert.from_torch(flat, ours)["param_groups"]
    assert [group["lr"] for group in found] == [float(torch.tensor(rate)) for rate in rates.values()]


def test_one_block_out_of_several():
    """A row that is one block of ours has the scales of several of theirs: its codes are written anew."""
    w = torch.cat([torch.full((2048,), 1.0), torch.full((2048,), 1000.0)])
    saved = {
        "state": {0: {"step": 1, "exp_avg": w, "exp_avg_sq": w}},
        "param_groups": [{"params": [0]}],
    }
    params = {"w": torch.zeros(4096)}
    fine = fl.convert.from_torch(saved, fl.adam8bit(1e-3, block_size=32).init(params))
    coarse = fl.convert.from_saved(fl.state_dict(fine), fl.adam8bit(1e-3, block_size=4096).init(params))
    assert coarse[0].mu["w"].layout.local_grid().n_blocks == 1
    assert torch.equal(coarse[0].mu["w"].dequantize()[2048:], w[2048:])  # the largest of the block


def _damaged(path: str, value: Any) -> Callable[[], Any]:
    saved = _saved(fl.adam8bit(1e-3))
    if value is None:
        del saved[path]
    else:
        saved[path] = value
    return lambda: fl.convert.from_saved(saved, fl.adam(1e-3).init(PARAMS))


def test_entries_that_do_not_fit_the_schema():
    for path in ("0.mu.b", "0.mu.a.weight.codes", "0.nu.a.weight.scales", "0.step"):
        refuses(ValueError, f"from_saved: saved has no entry {path!r}, which its schema lists", _damaged(path, None))
    for path, wanted, value, got in (
        ("0.mu.b", "float32 (3,)", torch.ones(2), "float32 (2,)"),
        ("0.mu.b", "float32 (3,)", "x", "str"),
        ("0.step", "int64 ()", torch.ones(1), "float32 (1,)"),
        ("0.mu.a.weight.codes", "int8 (64, 64)", torch.ones(64, 64), "float32 (64, 64)"),
        ("0.nu.a.weight.scales", "float32 (64, 1)", torch.ones(2), "float32 (2,)"),
    ):
        refuses(
            ValueError,
            f"from_saved: {path!r} must be a tensor, {wanted}, got {got}; the file is damaged",
            _damaged(path, value),
        )
    saved = _optimizer(_net(), fl.adam(1e-3)).state_dict()
    saved["state"][0]["schema"] = torch.ones(3)
    refuses(
        ValueError,
        "params_of: 'schema' of parameter '0.weight' must be bytes, got torch.float32 (3,); the file is damaged",
        lambda: fl.convert.params_of(saved),
    )


def test_a_new_state_shares_no_memory():
    """Two states that are made from one target go on by themselves, and the target stays as it is."""
    tx = fl.multi_steps(fl.inject_hyperparams(fl.sgd)(0.1, 0.9), 2)
    target = tx.init(PARAMS)
    saved = {
        "state": {i: {"momentum_buffer": torch.ones(p.shape)} for i, p in enumerate(PARAMS.values())},
        "param_groups": [{"params": [0, 1]}],
    }
    pointers = [
        {x.untyped_storage().data_ptr() for x in leaves(tree) if isinstance(x, Tensor)}
        for tree in (saved, target, *(fl.convert.from_torch(saved, target) for _ in range(2)))
    ]
    assert not any(a & b for i, a in enumerate(pointers) for b in pointers[:i])


def test_the_order_of_a_saved_tree_is_not_known():
    """Its leaves are sorted: by order, these two would change places."""
    params = {"z": torch.ones(3), "a": torch.ones(3)}
    tx = fl.adam(1e-3)
    state = tx.update({"z": torch.ones(3), "a": torch.full((3,), 2.0)}, tx.init(params), params)[1]
    saved = fl.state_dict(state)
    modules = {name: nn.Parameter(p) for name, p in params.items()}
    unnamed, named = (torch.optim.Adam(x) for x in (modules.values(), modules.items()))
    refuses(
        ValueError,
        "to_torch: source has names of parameters, whose order was not saved, and target has none; make it of named "
        "parameters",
        lambda: fl.convert.to_torch(saved, unnamed),
    )
    wanted = fl.convert.to_torch(state, unnamed)["state"]
    assert same(fl.convert.to_torch(saved, named)["state"], wanted)
    for target in (fl.optim.Adam8bit(modules.values(), backend="eager"), tx.init(list(params.values()))):
        refuses(
            ValueError,
            "from_saved: saved has names of parameters, whose order was not saved, and the target has none; make it of "
            "named parameters",
            lambda target=target: fl.convert.from_saved(saved, target),
        )
    ours = fl.optim.Adam8bit(modules.items(), backend="eager")
    ours.load_state_dict(fl.convert.from_saved(saved, ours))
    assert same(fl.convert.to_torch(ours, unnamed)["state"], wanted)
