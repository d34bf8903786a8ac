"""The contract of a transformation, as a table: every transformation against every promise.

A new optimizer is one row of `CASES`. It then proves that it writes to none of its inputs, keeps structure, shapes and
dtypes, compiles to the same bits in one or two graphs, donates, takes every format and survives a checkpoint.
"""

import io
from typing import Any

import pytest
import torch
from cases import CASES
from helpers import clone, leaves, random_like, run_pure, run_step, same
from tiers import slow_unless
from torch import Tensor

import functional_lowbit as fl

EVERY = pytest.mark.parametrize("name", CASES)

STEPS = 3


def make_params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    # w rests in few bits and is large enough to reach the kernel as it is, v is staged and padded, b stays in float32.
    shapes = {"w": torch.empty(256, 384), "v": torch.empty(33, 257), "b": torch.empty(3)}
    return random_like(shapes, seed=0, dtype=dtype)


def make_grads(params: Any, dtype: torch.dtype | None = None) -> list[Any]:
    return [random_like(params, seed=1 + t, dtype=dtype) for t in range(STEPS)]


@EVERY
def test_init_and_update_write_to_none_of_their_inputs(name):
    tx, params = CASES[name].make(), make_params()
    before = clone(params)
    state = tx.init(params)
    assert same(params, before)
    for grads in make_grads(params):
        given = (grads, state, params)
        before = clone(given)
        _, new_state = tx.update(*given)
        assert same(given, before)
        state = new_state


@EVERY
@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "fp32 params, bf16 gradients"],
)
def test_updates_and_state_keep_structure_shapes_and_dtypes(name, param_dtype, grad_dtype):
    tx, params = CASES[name].make(), make_params(param_dtype)
    schema = [(x.dtype, x.shape) for x in leaves(tx.init(make_params(torch.float32)))]
    state = tx.init(params)
    if name == "master_weights" and param_dtype != torch.float32:
        schema = [(x.dtype, x.shape) for x in leaves(state)]  # with an error; updates are float32
        grad_dtype = torch.float32
    if "own state" not in name:  # that one keeps raw gradients, in their dtype
        assert [(x.dtype, x.shape) for x in leaves(state)] == schema
    for grads in make_grads(params, grad_dtype):
        updates, new_state = tx.update(grads, state, params)
        assert updates.keys() == grads.keys()
        if "returns" not in name:  # those hand on other tensors than the gradients
            assert all(updates[k].dtype == grads[k].dtype for k in grads)
        assert all(updates[k].shape == grads[k].shape for k in grads)
        assert torch.utils._pytree.tree_structure(new_state) == torch.utils._pytree.tree_structure(state)
        if "own state" not in name:
            assert [(x.dtype, x.shape) for x in leaves(new_state)] == schema
        state = new_state


@EVERY
def test_compiled_equals_eager_equals_pure_and_is_compiled_once(name):
    tx, params = CASES[name].make(), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    given = (params, tx.init(params))
    before = clone((given, grads))
    assert same(run_step(fl.compile(tx, donate=False, backend="eager"), *_with(given, grads)), wanted)

    step = fl.compile(tx, donate=False)
    first = 2 if name == "multi_steps" else 1  # a mini-step has a kernel of its own
    params, state = run_step(step, given[0], grads[:first], given[1])
    graphs = step.graphs
    assert same(run_step(step, params, grads[first:], state), wanted)
    # One for leaves in blocks, one for the others; a mask or a call into a user's function cuts a step in two.
    assert 1 <= graphs <= (4 if any(x in name for x in ("mask", "user", "chain", "norm", "multi")) else 2)
    assert step.graphs == graphs
    assert same((given, grads), before)  # donate=False touches nothing


def _with(given: Any, grads: Any) -> tuple[Any, Any, Any]:
    return given[0], grads, given[1]


@slow_unless(lambda name: name == "adamw8bit")
@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit", "chain", "apply_if_finite", "adamw masked"])
def test_inductor_gives_the_same_bits(name):
    tx, params = CASES[name].make(), make_params()
    grads = make_grads(params)
    step = fl.compile(tx, donate=False, backend="inductor")
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))


@EVERY
def test_donation_writes_in_place(name):
    tx, params = CASES[name].make(), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    before = clone(grads)
    state = tx.init(params)
    places = [x.data_ptr() for x in leaves((params, state))]
    new = run_step(fl.compile(tx, backend="eager"), params, grads, state)
    assert [x.data_ptr() for x in leaves(new)] == places
    assert all(new[0][k] is params[k] for k in params)
    assert same((params, state), wanted)
    assert same(grads, before)


@pytest.mark.parametrize("format", fl.formats.names())
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.every_format])
def test_every_format(name, format):
    tx, params = fl.low_bit(CASES[name].make(), format), make_params()
    grads = make_grads(params)
    state = tx.init(params)
    assert {x.format.name for x in _stored(state)} == (set() if format == "float32" else {format})
    wanted = run_pure(tx, params, grads)
    assert [(x.dtype, x.shape) for x in leaves(wanted[1])] == [(x.dtype, x.shape) for x in leaves(state)]
    assert same(run_step(fl.compile(tx, backend="eager"), params, grads, state), wanted)


def _stored(state: Any) -> list[fl.QuantizedTensor]:
    nodes = torch.utils._pytree.tree_leaves(state, is_leaf=lambda x: isinstance(x, fl.QuantizedTensor))
    return [x for x in nodes if isinstance(x, fl.QuantizedTensor)]


@slow_unless(lambda backend, format: backend == "native" or format == "root4")
@pytest.mark.parametrize("backend", ["native", "inductor"])
@pytest.mark.parametrize("format", fl.formats.names())
def test_every_format_compiled(format, backend):
    tx, params = fl.adamw8bit(0.01, format=format), make_params()
    grads = make_grads(params)
    step = fl.compile(tx, donate=False, backend=backend)
    assert same(run_step(step, params, grads, tx.init(params)), run_pure(tx, params, grads))


@EVERY
def test_state_survives_a_file_and_continues_bit_equal(name):
    tx, params = CASES[name].make(), make_params()
    grads = make_grads(params)
    wanted = run_pure(tx, params, grads)
    params, state = run_pure(tx, params, grads[:1])
    file = io.BytesIO()
    torch.save(fl.state_dict(state), file)
    file.seek(0)
    loaded = fl.load_state_dict(tx.init(params), torch.load(file, weights_only=True))
    assert same(loaded, state)
    assert same(run_pure(tx, params, grads[1:], loaded), wanted)


@slow_unless(lambda format: format in ("companded8", "root4", "e4m3"))
@pytest.mark.parametrize("format", fl.formats.names())
def test_a_coordinate_without_gradient_never_moves(format):
    """Zero is a code of every block, so what never had a gradient has no momentum, however large its neighbours are."""
    tx = fl.low_bit(fl.chain(fl.scale_by_adam(), fl.scale(-0.1)), format)
    params = random_like({"w": torch.empty(64, 257)}, seed=0)
    before = clone(params)
    still = torch.rand(64, 257, generator=torch.Generator().manual_seed(1)) < 0.3
    step, state = fl.compile(tx, backend="native"), tx.init(params)
    for t in range(5):
        grads = {"w": torch.where(still, 0.0, random_like(params, seed=2 + t)["w"] * 10.0 ** (3 * t - 6))}
        params, state = step(grads, state, params)
    assert torch.equal(params["w"][still], before["w"][still])
    assert (params["w"][~still] != before["w"][~still]).all()


@EVERY
def test_a_plan_on_meta_tensors_is_what_the_state_takes(name):
    tx, params = CASES[name].make(), make_params(torch.bfloat16)
    plan = fl.memory_plan(tx, params, mesh=1)
    assert plan.ranks[0] == fl.memory_plan(tx, params) == fl.describe(tx.init(params), params)
    assert plan.total_bytes == sum(x.nbytes for x in leaves(tx.init(params)))
