"""fl.convert between torch.optim and this library: numbers, steps, names, wrappers, and the way back."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from convert_models import LR, grads_of, make_model, train, tree_of
from helpers import averaged, clone, run_pure, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import functional_lowbit as fl


class Kind(NamedTuple):
    """An optimizer of torch, ours, and the entries of its moments with their fields."""

    make: Callable[[Any], torch.optim.Optimizer]
    tx: Callable[[], fl.GradientTransformation]
    fields: dict[str, str]


ADAM = {"exp_avg": "mu", "exp_avg_sq": "nu"}


KINDS = {
    "AdamW": Kind(lambda p: torch.optim.AdamW(p, LR, weight_decay=0.1), lambda: fl.adamw(LR, weight_decay=0.1), ADAM),
    "Adam": Kind(lambda p: torch.optim.Adam(p, LR, foreach=True), lambda: fl.adam(LR), ADAM),
    "SGD": Kind(
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, nesterov=True),
        lambda: fl.sgd(LR, 0.9, nesterov=True),
        {"momentum_buffer": "trace"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str):
    """float32: every bit of every moment and step; then the training goes on here as there, and goes back."""
    make, tx, fields = KINDS[kind]
    model = make_model()
    optimizer = make(model.parameters())
    train(model, optimizer, range(10))
    params = tree_of(model)
    saved = optimizer.state_dict()
    before = clone(saved)
    state = fl.convert.from_torch(saved, tx().init(params), params)
    for i, name in enumerate(params):
        for entry, field in fields.items():
            leaf = getattr(state[0], field)[name]
            assert torch.equal(leaf, saved["state"][i][entry])
            assert leaf.data_ptr() != saved["state"][i][entry].data_ptr()
    assert state[0].step == (0 if kind == "SGD" else 10)  # torch's SGD counts nothing

    back = fl.convert.to_torch(state, optimizer, params)
    assert same(back, saved)
    params, state = run_pure(tx(), params, [grads_of(model, k) for k in range(10, 20)], state)
    assert same(saved, before)  # which has the tensors of the optimizer: nothing was written to them
    train(model, optimizer, range(10, 20))
    for name, p in model.named_parameters():
        # Some ulp of each of ten steps, of a learning rate or so.
        torch.testing.assert_close(params[name], p.detach(), rtol=0, atol=10 * LR * 1e-5)
    fresh = make(make_model().parameters())
    fresh.load_state_dict(fl.convert.to_torch(state, fresh, params))
    for one, other in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        for entry in fields:
            torch.testing.assert_close(one[entry], other[entry], rtol=2e-5, atol=1e-7)
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("format", fl.formats.names())
def test_any_format_is_one_quantization(format: str):
    """As `fl.quantize` writes the numbers; small leaves stay as they are."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    train(model, optimizer, range(3))
    params = tree_of(model)
    tx = fl.adamw8bit(LR, format=format)
    mu, nu = fl.convert.from_torch(optimizer, tx.init(params), params)[0][1:]
    for (name, p), state in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        for leaf, x, signed in ((mu[name], state["exp_avg"], True), (nu[name], state["exp_avg_sq"], False)):
            if p.numel() < 4096 or format == "float32":
                assert torch.equal(leaf, x)
            else:
                wanted = fl.quantize(x, format, signed=signed)
                assert same((leaf.codes, leaf.scales), (wanted.codes, wanted.scales))
    back = fl.convert.to_torch((fl.ScaleByAdamState(torch.tensor(3), mu, nu),), optimizer, params)
    leaf = mu["0.weight"]
    assert torch.equal(back["state"][0]["exp_avg"], leaf if format == "float32" else leaf.dequantize())


def test_lion_muon_rmsprop():
    """A mean alone is a `mu`, as third-party Lions keep it; Muon's buffer is a mean; RMSprop's square a `nu`."""
    params = {"w": torch.ones(4, 4)}
    lion = {"state": {0: {"exp_avg": torch.full((4, 4), 2.0)}}, "param_groups": [{"params": [0], "lr": 1.0}]}
    state = fl.convert.from_torch(lion, fl.lion(LR).init(params))
    assert torch.equal(state[0].mu["w"], torch.full((4, 4), 2.0))
    assert fl.convert.to_torch(state, lion["param_groups"])["state"][0].keys() == {"exp_avg", "step"}

    model = nn.Linear(4, 4, bias=False)
    muon = torch.optim.Muon(model.parameters(), LR)
    model.weight.grad = torch.arange(16.0).view(4, 4)
    muon.step()
    state = fl.convert.from_torch(muon, fl.scale_by_muon().init(params))
    assert torch.equal(state[0].mu["w"], muon.state[model.weight]["momentum_buffer"])
    assert same(fl.convert.to_torch(state, muon), muon.state_dict())

    class Squares(NamedTuple):
        step: Tensor
        nu: fl.NonNegative

    rmsprop = torch.optim.RMSprop(model.parameters(), LR)
    rmsprop.step()
    state = fl.convert.from_torch(rmsprop, Squares(torch.tensor(0), {"w": torch.zeros(4, 4)}))
    assert state.step == 1
    assert torch.equal(state.nu["w"], rmsprop.state[model.weight]["square_avg"])


def test_fields_by_name():
    """A user's own state, whose moment has another name, both ways."""
    params = {"w": torch.ones(4)}
    saved = {"state": {0: {"exp_avg": torch.full((4,), 2.0), "step": 3}}, "param_groups": [{"params": [0]}]}
    state = fl.convert.from_torch(saved, averaged().init(params), fields={"exp_avg": "mean"})
    assert torch.equal(state.mean["w"], torch.full((4,), 2.0))
    back = fl.convert.to_torch(state, saved["param_groups"], fields={"exp_avg": "mean"})
    assert same(back["state"][0], {"exp_avg": torch.full((4,), 2.0)})


WRAPPED: dict[str, Callable[[], fl.GradientTransformation]] = {
    "clip": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(LR, format="float32")),
    "finite": lambda: fl.apply_if_finite(fl.adamw(LR)),
    "low_bit": lambda: fl.low_bit(fl.chain(fl.clip(1.0), fl.adamw(LR)), {"mu": "bfloat16"}),
    "master": lambda: fl.master_weights(fl.adamw(LR)),
    "schedule": lambda: fl.adamw(fl.schedules.linear_schedule(0.0, LR, 100)),
    "decay mask": lambda: fl.adamw(LR, mask=lambda p: {name: x.ndim > 1 for name, x in p.items()}),
    "two masks": lambda: fl.chain(
        fl.masked(fl.adamw(LR), lambda p: {name: x.ndim > 1 for name, x in p.items()}),
        fl.masked(fl.adamw(0.1), lambda p: {name: x.ndim < 2 for name, x in p.items()}),
    ),
    "extra state": lambda: fl.chain(averaged(), fl.adamw(LR)),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_found_in_wrappers(name: str, dtype: torch.dtype):
    """All moments are filled, every counter is set, and all else is as `init` made it."""
    model = make_model(dtype)
    optimizer = torch.optim.AdamW(model.named_parameters(), LR)
    train(model, optimizer, range(2))
    params = tree_of(model)
    target = WRAPPED[name]().init(params)
    before = clone(target)
    state = fl.convert.from_torch(optimizer.state_dict(), target, params)
    assert same(target, before)
    old, new = fl.state_dict(target), fl.state_dict(state)
    seen = set()
    for path, leaf in new.items():
        parts = path.split(".")
        field = next((i for i, part in enumerate(parts) if part in ADAM.values()), None)
        if field is not None:
            owner = path.removeprefix(".".join(parts[: field + 1]) + ".").removesuffix(".codes")
            entry = {v: k for k, v in ADAM.items()}[parts[field]]
            wanted = optimizer.state[dict(model.named_parameters())[owner]][entry]
            assert torch.equal(leaf.float(), wanted.to(leaf.dtype).float())
            seen.add((owner, entry))
        elif parts[-1] == "step":
            assert leaf == 2
            assert leaf.dtype == torch.int64
        else:
            assert same(leaf, old[path])
    assert len(seen) == 8
    assert same(fl.convert.from_torch(optimizer, target), state)  # names are enough


def test_names_numbers_and_order():
    """In whichever order the groups are, a parameter's state goes to itself."""
    model = make_model()
    named = dict(model.named_parameters())
    params = tree_of(model)

    def groups(with_names: bool) -> list[dict[str, Any]]:
        own = [(n, p) if with_names else p for n, p in named.items()]
        return [{"params": own[1::2], "weight_decay": 0.0}, {"params": own[::2]}]

    optimizer = torch.optim.AdamW(groups(True), LR)
    train(model, optimizer, range(1))
    wanted = {name: optimizer.state[p]["exp_avg"] for name, p in named.items()}

    def mu(saved: Any, tree: Any, params: Any = None) -> Any:
        return fl.convert.from_torch(saved, fl.adam(LR).init(tree), params)[0].mu

    assert same(mu(optimizer.state_dict(), params), wanted)
    assert same(mu(get_optimizer_state_dict(model, optimizer), params), wanted)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert same(mu(flat, params), wanted)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert same(mu(torch.load(file, weights_only=True), params), wanted)

    nested = {"0": {"weight": 0, "bias": 0}, "2": {"weight": 0, "bias": 0}}
    nested = {i: {n: params[f"{i}.{n}"] for n in inner} for i, inner in nested.items()}
    found = mu(optimizer.state_dict(), nested)
    assert same({f"{i}.{n}": x for i, inner in found.items() for n, x in inner.items()}, wanted)

    nameless = torch.optim.AdamW(groups(False), LR)
    nameless.load_state_dict({**optimizer.state_dict()})
    for group in nameless.param_groups:
        group.pop("param_names", None)
    assert same(mu(nameless, named, named), wanted)  # the parameters themselves
    in_order = {name: params[name] for name in [*list(params)[1::2], *list(params)[::2]]}
    assert same(dict(sorted(mu(nameless.state_dict(), in_order).items())), dict(sorted(wanted.items())))
    assert same(mu(nameless.state_dict(), tuple(in_order.values())), tuple(wanted[name] for name in in_order))


def test_a_parameter_alone():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p], LR)
    p.grad = torch.ones(3)
    optimizer.step()
    state = fl.convert.from_torch(optimizer, fl.adam(LR).init(p.detach()))
    assert torch.equal(state[0].mu, optimizer.state[p]["exp_avg"])
    assert same(fl.convert.to_torch(state, optimizer), optimizer.state_dict())


def test_without_a_gradient():
    """Never used, frozen, and None: what torch has no state of stays as it is."""
    model = make_model()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], LR)
    model[0].weight.grad = torch.ones(64, 64)
    optimizer.step()
    named = dict(model.named_parameters())
    tree = {**named, "nothing": None}
    state = fl.convert.from_torch(optimizer.state_dict(), fl.adam(LR).init(tree), tree)
    assert state[0].step == 1
    assert torch.equal(state[0].mu["0.weight"], torch.full((64, 64), 0.1))
    assert all(not state[0].mu[name].any() for name in ("0.bias", "2.weight", "2.bias"))
    back = fl.convert.to_torch(state, optimizer, tree)
    assert same(back["state"][0], optimizer.state_dict()["state"][0])
    assert sorted(back["state"]) == [0, 1, 2]  # zeros, where torch had nothing
    ours = fl.optim.Optimizer(named.items(), fl.adam(LR), backend="eager")
    ours.load_state_dict(fl.convert.from_torch(optimizer, ours))
    assert torch.equal(ours.state[model[0].weight]["0.mu"], torch.full((64, 64), 0.1))
    assert not ours.state[model[2].bias]["0.mu"].any()


def test_what_a_mask_left_out_goes_back_without_state():
    """Also where its parameters are known by themselves alone: groups in another order, no names."""
    model = make_model()
    named = dict(model.named_parameters())
    tx = fl.masked(fl.adam(LR), {name: p.ndim > 1 for name, p in named.items()})
    other_order = list(named.values())[::-1]
    optimizer = torch.optim.Adam(other_order, LR)
    back = fl.convert.to_torch(tx.init(named), optimizer, named)
    assert {i: tuple(entries["exp_avg"].shape) for i, entries in back["state"].items()} == {1: (3, 64), 3: (64, 64)}
    optimizer.load_state_dict(back)
    train(model, optimizer, range(1))


def test_step():
    """Given by hand; and of parameters that have counters of their own."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    train(model, sgd, range(1))
    target = fl.sgd(fl.schedules.constant_schedule(LR), 0.9).init(tree_of(model))
    state = fl.convert.from_torch(sgd, target, step=7)
    assert (state[0].step, state[1].step) == (7, 7)

    adam = torch.optim.Adam(model.named_parameters(), LR)
    train(model, adam, range(3))
    model[0].bias.grad = model[2].bias.grad = None
    adam.step()
    kinds = [lambda p, n=n: {name: (x.ndim > 1) == n for name, x in p.items()} for n in (True, False)]
    tx = fl.chain(*(fl.masked(fl.adam(fl.schedules.constant_schedule(LR)), kind) for kind in kinds))
    state = fl.convert.from_torch(adam, tx.init(tree_of(model)))
    matrices, vectors = (x.inner_state for x in state)
    assert [matrices[0].step, matrices[1].step, vectors[0].step, vectors[1].step] == [4, 4, 3, 3]
    together = fl.convert.from_torch(adam, fl.adam(LR).init(tree_of(model)), step=4)
    assert together[0].step == 4


def test_params_of_leaves_out_what_has_no_state():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), LR)
    model[2].weight.grad = torch.ones(3, 64)
    optimizer.step()
    params = fl.convert.params_of(optimizer)
    assert list(params) == ["2"]
    state = fl.convert.from_torch(optimizer.state_dict(), fl.adam(LR).init(params), params)
    assert torch.equal(state[0].mu["2"], torch.full((3, 64), 0.1))


def test_sgd_without_momentum():
    """No moments on either side: only counters, which torch has not."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    train(model, optimizer, range(1))
    params = tree_of(model)
    state = fl.convert.from_torch(
        optimizer, fl.sgd(fl.schedules.constant_schedule(LR)).init(params), dict(model.named_parameters()), step=1
    )
    assert state[1].step == 1


def test_an_empty_tree():
    saved = {"state": {}, "param_groups": [{"params": []}]}
    assert fl.convert.from_torch(saved, fl.adam(LR).init({}), {})[0].mu == {}
