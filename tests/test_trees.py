"""Any pytree of any floating-point tensors, leaves that are left out, and nodes of our own."""

import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import bits, clone, leaves, random_like, same
from torch import Tensor, nn

import functional_lowbit as fl


class Pair(NamedTuple):
    left: Any
    right: Any


@optree.dataclasses.dataclass(namespace="tests.trees")
class Own:
    weight: Any
    bias: Any
    name: str = optree.dataclasses.field(default="layer", pytree_node=False)


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Global:
    weight: Any
    bias: Any


def _w() -> Tensor:
    return random_like(torch.empty(64, 65), seed=3)


def _b() -> Tensor:
    return random_like(torch.empty(5), seed=4)


TREES = {
    "dict": lambda: {"w": _w(), "b": _b()},
    "list": lambda: [_w(), _b()],
    "tuple": lambda: (_w(), _b()),
    "NamedTuple": lambda: Pair(_w(), _b()),
    "dataclass of a namespace": lambda: Own(_w(), _b()),
    "dataclass, global": lambda: Global(_w(), _b()),
    "bare tensor": _w,
    "None leaf": lambda: {"w": _w(), "none": None, "b": _b()},
    "empty dict": dict,
    "empty tuple": tuple,
    "empty inside": lambda: {"a": {}, "b": [(), _w()]},
    "nested": lambda: {"enc": [Own(_w(), {"x": _b()}), Pair(Global(_b(), None), (_w(),))], "dec": _b()},
    "keys that are numbers": lambda: {0: _w(), 10: _b(), 2: _b()},
}
TXS = {
    "adamw8bit": lambda: fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.1)),
    "apply_if_finite": lambda: fl.apply_if_finite(fl.lion8bit(0.1)),
    "masked": lambda: fl.masked(fl.adam(0.1), lambda params: fl.tree.map(lambda p: p.ndim > 1, params)),
    "partition": lambda: fl.partition(
        {"matrix": fl.adamw8bit(0.1), "rest": fl.sgd(0.1, 0.9)},
        lambda path, leaf: "matrix" if leaf.ndim > 1 else "rest",
    ),
    "stateless": lambda: fl.chain(fl.stateless(lambda u, p: fl.tree.add(u, p)), fl.sgd(0.1, 0.9)),
}


def _tensors(tree: Any) -> list[Tensor]:
    """Tensors in optree's order, whatever the nodes."""
    return optree.tree_leaves(tree, namespace="tests.trees")


@pytest.mark.parametrize("make_tx", TXS.values(), ids=TXS)
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_any_tree(make, make_tx):
    params, grads, tx = make(), make(), make_tx()
    flat, flat_grads = _tensors(params), _tensors(grads)
    wanted_updates, wanted_state = tx.update(flat_grads, tx.init(flat), flat)
    wanted = fl.apply_updates(flat, wanted_updates)
    state = tx.init(params)
    updates, new_state = tx.update(grads, state, params)
    assert optree.tree_structure(updates, namespace="tests.trees") == optree.tree_structure(
        params, namespace="tests.trees"
    )
    assert same(_tensors(updates), wanted_updates)
    assert same(_tensors(fl.apply_updates(params, updates)), wanted)
    assert same(_tensors(new_state), _tensors(wanted_state))
    saved = fl.state_dict(new_state)
    assert same(_tensors(fl.load_state_dict(state, saved)), _tensors(wanted_state))
    fl.describe(new_state)
    new_params, state = fl.compile(tx, backend="eager")(grads, state, params)
    assert same(_tensors(new_params), wanted)
    assert same(_tensors(state), _tensors(wanted_state))
    assert new_params is params or type(new_params) is type(params)


@pytest.mark.parametrize("make_tx", TXS.values(), ids=TXS)
def test_a_gradient_of_none_leaves_its_leaf_alone_and_counts_the_step(make_tx):
    tx = make_tx() if make_tx is not TXS["stateless"] else fl.sgd(0.1, 0.9)
    params = {"a": _w(), "b": _b(), "c": _w()}
    grads = {"a": _w(), "b": _b(), "c": _w()}
    params_1, state = fl.compile(tx, backend="eager", donate=False)(grads, tx.init(params), params)
    some = {**grads, "a": None}
    updates, pure_state = tx.update(some, state, params_1)
    assert updates["a"] is None
    pure = fl.apply_updates(params_1, updates)
    new, new_state = fl.compile(tx, backend="eager", donate=False)(some, state, params_1)
    assert same((new, new_state), (pure, pure_state))
    assert torch.equal(new["a"], params_1["a"])
    assert not torch.equal(new["c"], params_1["c"])
    before, after = fl.state_dict(state), fl.state_dict(new_state)
    assert all(same(after[k], before[k]) for k in before if ".a" in k)
    assert all(int(after[k]) == 2 for k in before if k.endswith("step"))


def test_a_gradient_of_none_without_params():
    tx = fl.adam(0.1)
    state = tx.init({"a": _b(), "b": _b()})
    updates, new_state = tx.update({"a": None, "b": _b()}, state)
    assert updates["a"] is None
    assert torch.equal(new_state[0].mu["a"], torch.zeros(5))
    assert new_state[0].step == 1


def test_no_gradient_at_all():
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adam8bit(0.1))
    params = {"a": _w()}
    new, state = fl.compile(tx, backend="eager")({"a": None}, tx.init(params), params)
    assert torch.equal(new["a"], _w())
    assert state[1][0].step == 1


def _strided(kind: str) -> Tensor:
    """A tensor of more elements than a staging buffer of 2**18 would like to see, not contiguous."""
    if kind == "transposed":
        return random_like(torch.empty(600, 500), 0).t()
    if kind == "channels_last":
        return random_like(torch.empty(16, 40, 20, 24), 0).to(memory_format=torch.channels_last)
    if kind == "every other column":
        return random_like(torch.empty(100, 8000), 0)[:, ::2]
    if kind == "one row":
        return random_like(torch.empty(300000, 2), 0).t()[:1]
    return random_like(torch.empty(600001), 0)[::2]


@pytest.mark.parametrize("make_tx", [lambda: fl.adam8bit(0.1), lambda: fl.adam(0.1)], ids=["8 bits", "float32"])
@pytest.mark.parametrize(
    "kind", ["transposed", "channels_last", "every other column", "one row", "every other element"]
)
def test_tensors_that_are_not_contiguous(kind, make_tx):
    tx = make_tx()
    p, g = _strided(kind), _strided(kind)
    wanted = fl.apply_updates(p, tx.update(g.contiguous(), tx.init(p), p.contiguous())[0]).contiguous()
    assert torch.equal(fl.apply_updates(p, tx.update(g, tx.init(p), p)[0]), wanted)
    for params, grads in ((p.clone(), g.contiguous()), (p.contiguous(), g), (p, g)):
        stride = params.stride()
        new, _ = fl.compile(tx, backend="eager")(grads, tx.init(params), params)
        assert new is params
        assert new.stride() == stride
        assert torch.equal(new, wanted)


def test_an_expanded_gradient():
    tx, params = fl.adam8bit(0.1), _w()
    grads = torch.ones(1, 1).expand(64, 65)
    wanted = fl.apply_updates(params, tx.update(grads.clone(), tx.init(params), params)[0])
    assert torch.equal(fl.compile(tx, backend="eager")(grads, tx.init(params), params)[0], wanted)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
def test_every_pair_of_dtypes(param_dtype, grad_dtype):
    tx = fl.adamw8bit(0.1)
    params = random_like({"w": torch.empty(64, 65), "s": torch.empty(()), "e": torch.empty(0, 3)}, 0, param_dtype)
    grads = random_like(params, 1, grad_dtype)
    state = tx.init(params)
    updates, pure_state = tx.update(grads, state, params)
    assert all(u.dtype == grad_dtype for u in updates.values())
    new, new_state = fl.compile(tx, backend="eager", donate=False)(grads, state, params)
    assert all(p.dtype == param_dtype for p in new.values())
    assert same(new_state, pure_state)
    if grad_dtype in (torch.float32, torch.float64):  # else the pure update rounds to the gradient's dtype in between
        assert same(new, fl.apply_updates(params, updates))
    full = fl.apply_updates(params, fl.tree.cast(tx.update(fl.tree.cast(grads, torch.float32), state, params)[0], None))
    assert same(new, full)


def test_modules_parameters_with_grad():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 64), nn.Tanh(), nn.Linear(64, 1))
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01))
    params = dict(model.named_parameters())
    state, step = tx.init(params), fl.compile(tx)
    x = torch.randn(32, 70)
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        loss.backward()
        grads = {n: p.grad for n, p in params.items()}
        params, state = step(grads, state, params)
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in params.values())
        model.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert step.graphs <= 2
    assert not any(x.requires_grad for x in leaves(state))


@pytest.mark.parametrize("donate", [True, False])
def test_plain_tensors_that_require_grad(donate):
    tx = fl.adamw8bit(0.1)
    params = _w().requires_grad_()
    (grads,) = torch.autograd.grad(params.square().sum(), params)
    wanted, _ = fl.compile(tx, backend="eager", donate=False)(grads, tx.init(_w()), _w())
    new, state = fl.compile(tx, backend="eager", donate=donate)(grads, tx.init(params), params)
    assert torch.equal(new, wanted)
    assert not any(x.requires_grad for x in leaves(state))
    assert new.is_leaf


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_that_are_the_parameters(backend):
    tx = fl.adamw8bit(0.1)
    params = random_like(torch.empty(300, 512), 0)
    wanted = fl.apply_updates(params, tx.update(params, tx.init(params), params)[0])
    step = fl.compile(tx, backend=backend)
    given = params.clone()
    assert torch.equal(step(given, tx.init(params), given)[0], wanted)
    assert step.graphs == (1 if backend == "inductor" else 0)


def test_two_block_sizes_in_one_chain():
    parts = [fl.low_bit(fl.scale_by_adam(), block_size=n) for n in (256, 64)]
    tx = fl.chain(*parts, fl.low_bit(fl.trace(0.9), "dynamic8", block_size=64), fl.scale(-0.1))
    params, grads = {"w": _w(), "b": _b()}, {"w": _w(), "b": _b()}
    state = tx.init(params)
    assert [state[0].mu["w"].block_size, state[1].mu["w"].block_size] == [256, 64]
    updates, pure = tx.update(grads, state, params)
    new = fl.compile(tx, backend="eager", donate=False)(grads, state, params)
    assert same(new, (fl.apply_updates(params, updates), pure))


def test_a_quantized_tensor_is_a_node_of_both_pytrees():
    q = fl.quantize(_w(), "companded8")
    for flatten, unflatten in (
        (optree.tree_flatten, lambda spec, kids: optree.tree_unflatten(spec, kids)),
        (pytree.tree_flatten, lambda spec, kids: pytree.tree_unflatten(kids, spec)),
    ):
        kids, spec = flatten({"q": q})
        assert [k.shape for k in kids] == [q.codes.shape, q.scales.shape]
        again = unflatten(spec, [k + 0 for k in kids])["q"]
        assert type(again) is fl.QuantizedTensor
        assert (again.format, again.shape, again.block_size) == (q.format, q.shape, q.block_size)
        assert torch.equal(again.dequantize(), q.dequantize())
    assert optree.tree_paths({"q": q}) == [("q", "codes"), ("q", "scales")]
    doubled = pytree.tree_map(lambda x: x * 2 if x.dtype == torch.float32 else x, q)
    assert torch.equal(doubled.dequantize(), 2 * q.dequantize())


@pytest.mark.parametrize("format", fl.formats.names())
def test_init_on_meta_tensors(format):
    with torch.device("meta"):
        params = {"w": torch.empty(50000, 4096, dtype=torch.bfloat16), "b": torch.empty(4096)}
    state = fl.adamw8bit(0.1, format=format).init(params)
    tensors = leaves(state[0].mu) + leaves(state[0].nu)
    assert all(x.device.type == "meta" for x in tensors)
    real = fl.adamw8bit(0.1, format=format).init({"w": torch.empty(5, 4096), "b": torch.empty(4096)})
    assert [x.dtype for x in tensors] == [x.dtype for x in leaves(real[0].mu) + leaves(real[0].nu)]


def test_tree_functions():
    a, b = {"x": torch.tensor([1.0, 2.0]), "n": None}, {"x": torch.tensor([3.0, 5.0]), "n": None}
    assert same(fl.tree.add(a, b)["x"], torch.tensor([4.0, 7.0]))
    assert same(fl.tree.sub(b, a)["x"], torch.tensor([2.0, 3.0]))
    assert same(fl.tree.scale(0.1, fl.tree.cast(a, torch.bfloat16))["x"], torch.tensor([0.1, 0.2]).bfloat16())
    assert same(fl.tree.zeros_like(a, torch.float64)["x"], torch.zeros(2, dtype=torch.float64))
    assert fl.tree.norm({"x": torch.tensor([3.0, 4.0])}) == 5.0
    assert dataclasses.asdict(fl.tree.map(lambda x: x + 1, Own(1, 2))) == {"weight": 2, "bias": 3, "name": "layer"}
    assert (bits(clone(a)["x"]) == bits(a["x"])).all()
