"""Cases that broke other libraries (single process), each with the kind of input that it stands for."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import bits, clone, leaves, random_like, run_pure, run_step, same
from tiers import slow_unless
from torch import Tensor, nn

import functional_lowbit as fl

FORMATS = pytest.mark.parametrize("format", fl.formats.names())


# 6: a position whose gradient is always 0 must not move, however live its neighbours are


@slow_unless(lambda backend, format: backend != "inductor" or format == "companded8")
@FORMATS
@pytest.mark.parametrize(
    ("shape", "steps", "backend"), [((4096,), 500, "inductor"), ((64, 64), 20, "eager"), ((33, 257), 20, "eager")]
)
def test_case_6_zero_gradients_beside_live_ones(shape, steps, backend, format):
    tx = fl.adamw8bit(1e-3, eps=1e-8, weight_decay=0.0, format=format)
    grads = (1.0 - torch.arange(math.prod(shape)) % 2).reshape(shape)
    params = torch.ones(shape)
    params, state = run_step(fl.compile(tx, backend=backend), params, [grads] * steps, tx.init(params))
    assert (params[grads == 0] == 1.0).all()
    assert all(x.isfinite().all() for x in leaves(state) if x.is_floating_point())
    # Adam's step on a constant gradient is the learning rate, and each sum rounds the parameter by 2**-25. A constant
    # moment is its block's largest, which scaled formats keep to 20 bits or exactly. In bfloat16, b2 = 0.999 is below
    # the resolution: the second moment stands still at 0.4 to 1 of what it should be, and the steps grow.
    wanted, moved = 1 - 1e-3 * steps, params[grads == 1]
    if format == "bfloat16":
        assert ((moved <= wanted + 1e-5) & (moved >= wanted - 0.05)).all()
    else:
        assert torch.allclose(moved, torch.tensor(wanted), atol=steps * 2**-24, rtol=0)


@FORMATS
@pytest.mark.parametrize("make", [fl.adam8bit, fl.adamw8bit, fl.sgd8bit, fl.lion8bit])
def test_case_6_all_zero_gradients(make, format):
    tx = make(1e-3, format=format, **({"weight_decay": 0.0} if "w" in make.__name__ or "lion" in make.__name__ else {}))
    before = random_like(torch.empty(4096), 0)
    params, state = run_step(fl.compile(tx, backend="eager"), before.clone(), [torch.zeros(4096)] * 5, tx.init(before))
    assert torch.equal(params, before)
    assert all(not x.isnan().any() for x in leaves(state) if x.is_floating_point())


# 7: hyperparameters that change at each step are neither compiled again nor kept as they were


def _values(t: int) -> dict[str, float]:
    return {
        "max_norm": 0.1 + 0.05 * t,
        "learning_rate": 0.1 / (1 + t),
        "b1": 0.95 - 0.01 * t,
        "b2": 0.99 + 0.0005 * t,
        "eps": (1e-8, 1e-3, 1e-2)[t % 3],
        "eps_root": (0.0, 1e-6)[t % 2],
        "weight_decay": 0.01 * t,
    }


def _chain(max_norm: Any, **adamw: Any) -> fl.GradientTransformation:
    return fl.chain(fl.clip_by_global_norm(max_norm), fl.adamw8bit(**adamw))


def _floats(t: int) -> fl.GradientTransformation:
    return _chain(**_values(t))


@pytest.mark.parametrize("kind", ["tensors", "tensors of float64", "schedules", "schedules of floats"])
def test_case_7_every_hyperparameter_changes_at_every_step(kind):
    params = random_like({"a": torch.empty(2, 3), "b": torch.empty(4096)}, seed=0)
    grads = [random_like(params, seed=1 + t) for t in range(12)]
    boxes: dict[str, Tensor] = {}
    if kind.startswith("tensors"):
        dtype = torch.float64 if "64" in kind else torch.float32
        boxes = {k: torch.tensor(v, dtype=dtype) for k, v in _values(0).items()}
        tx = _chain(**boxes)
    elif kind == "schedules":
        tx = _chain(
            **{k: lambda step, k=k: torch.tensor(_values(int(step))[k], dtype=torch.float64) for k in _values(0)}
        )
    else:
        tx = _chain(**{k: lambda step, k=k: _values(int(step))[k] for k in _values(0)})
    step = fl.compile(tx)
    pure = clone((params, tx.init(params)))
    fresh = clone(pure)
    state, graphs = tx.init(params), None
    for t, g in enumerate(grads):
        for k, box in boxes.items():
            box.fill_(_values(t)[k])
        pure = run_pure(tx, pure[0], [g], pure[1])
        params, state = step(g, state, params)
        assert same((params, state), pure)
        graphs = step.graphs if graphs is None else graphs
        assert step.graphs == graphs
        if kind != "tensors":  # float32 tensors hold other numbers
            # the oracle: at each step another transformation, made of floats
            now, moved = _floats(t), fresh[1]
            updates, moved = now.update(g, _step_fields(moved, now.init(params)), fresh[0])
            fresh = fl.apply_updates(fresh[0], updates), moved
            assert same(leaves(fresh[0]), leaves(params))
    assert graphs is not None
    assert graphs <= 2


def _step_fields(state: Any, like: Any) -> Any:
    """A state made of floats has no counters beside Adam's."""
    return (like[0], (state[1][0], *like[1][1:]))


@pytest.mark.parametrize(
    "make",
    [fl.clip, fl.scale, fl.trace, fl.scale_by_learning_rate, fl.add_decayed_weights, lambda x: fl.scale_by_lion(x, x)],
    ids=["clip", "scale", "trace", "scale_by_learning_rate", "add_decayed_weights", "scale_by_lion"],
)
def test_case_7_a_tensor_is_read_anew_by_everything(make):
    box, params, grads = torch.tensor(0.0), torch.ones(5), torch.full((5,), 0.9)
    step = fl.compile(make(box), donate=False, backend="eager")
    for value in (0.25, 0.5, 0.125):
        box.fill_(value)
        fixed = make(value)
        wanted = run_pure(fixed, params, [grads, grads])[0]
        assert torch.equal(run_step(step, params, [grads, grads], make(box).init(params))[0], wanted)
        assert torch.equal(run_pure(make(box), params, [grads, grads])[0], wanted)


# 9: the default dtype is nobody's business


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def other_default(request) -> Iterator[Callable[[], None]]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


@FORMATS
@pytest.mark.parametrize("when", ["before init", "before step"])
def test_case_9_default_dtype(other_default, when, format):
    def schedule(step: Tensor) -> float:
        return 0.1 / (1 + int(step))

    warm = fl.schedules.join_schedules([lambda step: 0.1, fl.schedules.constant_schedule(0.3)], [1])
    tx = fl.apply_if_finite(fl.chain(fl.clip_by_global_norm(warm), fl.adamw8bit(schedule, format=format)))
    params = random_like({"w": torch.empty(64, 65), "b": torch.empty(3)}, seed=0, dtype=torch.float32)
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    wanted = run_pure(tx, params, grads)
    state = tx.init(params)
    other_default()
    if when == "before init":
        state = tx.init(params)
    assert same(run_pure(tx, params, grads, state), wanted)
    assert same(run_step(fl.compile(tx, donate=False, backend="eager"), params, grads, state), wanted)


# 10: masks of all shapes, inside each other


def test_case_10_decay_masked_to_weights():
    model = nn.Linear(8, 8)
    params = dict(model.named_parameters())
    grads = fl.tree.zeros_like(params)
    before = clone(params)
    tx = fl.adamw(0.1, weight_decay=0.5, mask=lambda p: fl.tree.map(lambda x: x.ndim > 1, p))
    fl.compile(tx, backend="eager")(grads, tx.init(params), params)
    assert torch.equal(model.bias, before["bias"])
    assert torch.allclose(model.weight, before["weight"] * 0.95, rtol=2**-23)  # one product, one sum


@pytest.mark.parametrize(
    "mask",
    [
        {"enc": {"w": True, "b": False}, "dec": [True, False]},
        {"enc": True, "dec": [True, False]},
        {"enc": {"w": True, "b": False}, "dec": False},
        True,
        False,
        lambda params: {"enc": {"w": True, "b": False}, "dec": True},
        lambda params: fl.tree.map(lambda p: p.ndim > 1, params),
    ],
    ids=["whole", "prefix", "prefix False", "one True", "one False", "function, prefix", "function, whole"],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_case_10_masks(mask, depth):
    shapes = {"enc": {"w": torch.empty(4, 3), "b": torch.empty(3)}, "dec": [torch.empty(2, 2), torch.empty(5)]}
    params = random_like(shapes, seed=0)
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    tx = fl.adam(0.1)
    whole = run_pure(fl.chain(tx), params, grads)[0]
    plain = run_pure(fl.identity(), params, grads)[0]
    for _ in range(depth):
        tx = fl.masked(tx, mask)
    wanted_mask = _spread(mask(params) if callable(mask) else mask, params)
    wanted = fl.tree.map(lambda keep, a, b: a if keep else b, wanted_mask, whole, plain)
    got = run_pure(tx, params, grads)
    assert same(got[0], wanted)
    assert same(run_step(fl.compile(tx, backend="eager"), clone(params), grads, tx.init(params)), got)


def test_case_10_a_mask_of_path_and_leaf_inside_others():
    """Paths and leaves are those of the whole tree, however many masks are around."""
    params = random_like({"enc": {"w": torch.empty(4, 3), "b": torch.empty(3)}, "dec": [torch.empty(2, 2)]}, seed=0)
    grads = [random_like(params, seed=1 + t) for t in range(3)]
    seen: set[tuple[str, int]] = set()

    def mask(path: str, leaf: torch.Tensor) -> bool:
        seen.add((path, leaf.ndim))
        return path == "enc.w"

    around = {"enc": True, "dec": False}
    wanted = run_pure(fl.masked(fl.adam(0.1), {"enc": {"w": True, "b": False}, "dec": False}), params, grads)
    tx = fl.masked(fl.masked(fl.adam(0.1), mask), around)
    assert same(run_pure(tx, params, grads)[0], wanted[0])
    assert same(run_step(fl.compile(tx, backend="eager"), clone(params), grads, tx.init(params))[0], wanted[0])
    assert seen == {("enc.w", 2), ("enc.b", 1)}


def _spread(mask: Any, tree: Any) -> Any:
    if isinstance(mask, bool):
        return fl.tree.map(lambda _: mask, tree)
    if isinstance(mask, dict):
        return {k: _spread(mask[k], tree[k]) for k in tree}
    return [_spread(m, t) for m, t in zip(mask, tree, strict=True)]


def test_case_10_different_masks_inside_each_other():
    params = {k: torch.zeros(2) for k in "abc"}
    grads = {k: torch.ones(2) for k in "abc"}
    inner = fl.masked(fl.scale(2.0), {"a": True, "b": False, "c": True})
    tx = fl.masked(fl.chain(fl.scale(10.0), inner), lambda p: {"a": True, "b": True, "c": False})
    updates, _ = tx.update(grads, tx.init(params), params)
    assert {k: u[0].item() for k, u in updates.items()} == {"a": 20.0, "b": 10.0, "c": 1.0}
    new, _ = fl.compile(tx, backend="eager")(grads, tx.init(params), params)
    assert {k: p[0].item() for k, p in new.items()} == {"a": 20.0, "b": 10.0, "c": 1.0}


# 11: many shapes, few graphs

SHAPES = [
    (), (1,), (5,), (255,), (4097,), (70000,), (0,),
    (1, 300007), (300007, 1), (1, 1), (7, 4099), (33, 512), (512, 33), (0, 7), (640, 640),
    (3, 5, 7), (16, 3, 257), (8, 4, 3, 3), (2, 2, 2, 2, 300), (1, 1, 1, 1, 5000),
]  # fmt: skip
LATER = [(2,), (6000,), (9, 1031), (100, 100), (4, 4, 4, 70), (1, 300043), (1, 2, 150001), (2, 1, 3, 1, 999)]


def test_case_11_twenty_shapes_two_graphs():
    tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(0.01, weight_decay=0.1))
    step = fl.compile(tx)
    graphs = None
    for shapes in (SHAPES, LATER, LATER[:1], SHAPES[7:8]):
        params = random_like([torch.empty(shape) for shape in shapes], seed=0)
        grads = [random_like(params, seed=1 + t) for t in range(2)]
        wanted = run_pure(tx, params, grads)
        assert same(run_step(step, params, grads, tx.init(params)), wanted)
        graphs = step.graphs if graphs is None else graphs
        assert step.graphs == graphs <= 2


@FORMATS
def test_case_11_every_format(format):
    tx = fl.adam8bit(0.01, format=format)
    params = random_like([torch.empty(shape) for shape in SHAPES + LATER], seed=0)
    grads = [random_like(params, seed=1 + t) for t in range(2)]
    wanted = run_pure(tx, params, grads)
    assert same(run_step(fl.compile(tx, backend="eager"), params, grads, tx.init(params)), wanted)


# 13: one NaN


@FORMATS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_case_13_one_bad_element_spoils_only_itself(value, format):
    tx = fl.adamw8bit(0.01, format=format)
    params = random_like({"w": torch.empty(1024, 256)}, seed=0)
    clean = [random_like(params, seed=1 + t) for t in range(3)]
    dirty = clone(clean)
    dirty[0]["w"][17, 3] = value
    step = fl.compile(tx, backend="eager")
    good, _ = run_step(step, clone(params), clean, tx.init(params))
    bad, _ = run_step(step, clone(params), dirty, tx.init(params))
    assert not bad["w"][17, 3].isfinite()
    others = torch.ones(1024, 256, dtype=torch.bool)
    others[17, 3] = False
    if not fl.formats.get(format).scaled:
        assert torch.equal(bad["w"][others], good["w"][others])
    # With a scale: the bad element is left out of its block's scale, which the others then feel as a finer grid.
    others[17] = False
    assert torch.equal(bad["w"][others], good["w"][others])
    assert bad["w"][17, :3].isfinite().all()
    assert bad["w"][17, 4:].isfinite().all()


@FORMATS
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_case_13_apply_if_finite_leaves_the_step_out(where, value, format):
    tx = fl.adamw(0.01)
    tx = (
        fl.apply_if_finite(fl.low_bit(tx, format)) if where == "outside" else fl.low_bit(fl.apply_if_finite(tx), format)
    )
    params = random_like({"w": torch.empty(1024, 256), "b": torch.empty(3)}, seed=0)
    clean = [random_like(params, seed=1 + t) for t in range(2)]
    dirty = clone(clean[1])
    dirty["w"][17, 3] = value
    step = fl.compile(tx, donate=False, backend="eager")
    params, state = step(clean[0], tx.init(params), params)
    new_params, new_state = step(dirty, state, params)
    assert same(new_params, params)
    assert same(new_state.inner_state, state.inner_state)
    assert (int(new_state.notfinite_count), bool(new_state.last_finite), int(new_state.total_notfinite)) == (
        1,
        False,
        1,
    )
    pure = tx.update(dirty, state, params)
    assert all((bits(u) == 0).all() for u in leaves(pure[0]))
    assert same(pure[1], new_state)
    new_params, new_state = step(clean[1], new_state, new_params)
    assert (int(new_state.notfinite_count), bool(new_state.last_finite), int(new_state.total_notfinite)) == (0, True, 1)
    assert int(new_state.inner_state[0].step) == 2


def test_case_13_after_too_many_errors_in_a_row_the_step_is_made():
    tx = fl.apply_if_finite(fl.sgd(0.1), max_consecutive_errors=2)
    step = fl.compile(tx, backend="eager")
    params, state = torch.ones(2), tx.init(torch.ones(2))
    bad = torch.tensor([math.nan, 1.0])
    for _ in range(2):
        params, state = step(bad, state, params)
        assert torch.equal(params, torch.ones(2))
    params, state = step(bad, state, params)
    assert params[0].isnan()
    assert params[1] == torch.tensor(1.0) - torch.tensor(0.1)
    assert int(state.notfinite_count) == 3
