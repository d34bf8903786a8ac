"""The floors: imports point down, each foreign library has one door, and every public name shows how it is used."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import functional_lowbit as fl

PACKAGE = Path(fl.__file__).parent
# Floor, and the modules on it, each one above the highest that it imports.
FLOORS = """
 0  _base _chunks _cpp_library _cpp_ops _cpp_text _error_report _grid _guard _headers _lanes _lock _model_config
    _numerics _ranks _report _split _stream_plan _version cli._arguments cli._machine cli._mistakes cli._output
    cli._pending cli._progress convert._saved formats._format optim._orphans optim._same_groups rounding
    transforms
 1  _cpp_norm _cpp_source _folder _recipe _staging _tree cli._same convert._match convert._place
    formats.companded formats.dynamic formats.floats formats.fp8 formats.root4
 2  _interrupted _parts _per_leaf _streamed cli._folders formats sharding
 3  _check _collectives _current _index _plan_params _planned_mesh _quantized _task convert._blocks
 4  _describe _exact_sum _like_params _noise _norm _schema _statistics _whole cli._numbers optim._hyper
    schedules
 5  _apply _donate _low_bit _memory_plan _observing _reading _rule cli._foreign cli._listed optim._groups reduce
    transforms._finite transforms._masked transforms._master tree
 6  _checkpoint _kernel _leafwise _program cli._leaves cli._sections convert._kept convert._slots optim._options
    transforms._inject transforms._multi_steps transforms._partition
 7  _native _quantization_error _renewal _run _safetensors convert._read optim._entries transforms._centralize
    transforms._chain transforms._clip transforms._decay transforms._factored transforms._freeze
    transforms._scale transforms._trust_ratio
 8  _backends _begin _finish _offload checkpoint cli._safetensors_file convert._bitsandbytes convert._flashoptim
    convert._masters convert._own convert._torchao transforms._adam transforms._lion transforms._orthogonalize
    transforms._record_error transforms._sgd
 9  _launch cli._stores convert._fill convert._library optim._rules plot
10  _compile cli._inspect cli._parameters
11  optim._param_tree
12  optim._saved
13  optim._optimizer
14  convert._shell optim._ready
15  convert._into convert._to_torch optim._adam optim._lion optim._sgd
16  convert._from optim
17  convert
18  functional_lowbit
19  cli._contenders cli._recipes cli._reformat cli._rewritten
20  cli._conversions cli._plan cli._timing
21  cli._bench cli._convert
22  cli._main
23  __main__ cli
"""


def _floor_of() -> dict[str, int]:
    """Module name without the package's, to floor. What users import is the empty name."""
    found: dict[str, int] = {}
    floor = 0
    for word in FLOORS.split():
        if word.isdigit():
            floor = int(word)
        else:
            found[word if word != "functional_lowbit" else ""] = floor
    return found


FLOOR_OF = _floor_of()
DOORS = {  # who may use what
    "torch.distributed": {
        "sharding",
        "_planned_mesh",
        "_collectives",
        "_reading",
        "_ranks",
        "_folder",
        "_safetensors",
        "checkpoint",
        "cli._folders",  # it reads a checkpoint one entry after the other
    },
    "safetensors": {"_safetensors"},
    "optree": {"_tree"},
    "torch._dynamo": {"_backends"},
    "torch.utils._pytree": {"_tree"},
}


def _files() -> dict[str, Path]:
    """Module name without the package's, to file. transforms/ is reached through its link, once."""
    found = {}
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "transforms").glob("*.py")}):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = _files()
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
EACH = pytest.mark.parametrize("name", TREES, ids=lambda name: name or "functional_lowbit")


def _imports(tree: ast.AST) -> list[str]:
    """Modules that a file imports, of a name of ours the module where it is found: `a.b` for `from a import b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner.removeprefix("functional_lowbit.") in FILES else node.module)
    return found


def _ours(name: str) -> list[str]:
    prefix = "functional_lowbit"
    return [
        x.removeprefix(prefix).lstrip(".") for x in _imports(TREES[name]) if x == prefix or x.startswith(prefix + ".")
    ]


def test_every_file_has_a_floor():
    assert sorted(FILES) == sorted(FLOOR_OF)
    assert len(FILES) > 20


@EACH
def test_imports_point_down(name):
    for other in _ours(name):
        assert FLOOR_OF[other] < FLOOR_OF[name], f"{name} must not import {other}"


@EACH
def test_each_foreign_library_has_its_doors(name):
    for imported in _imports(TREES[name]):
        for library, doors in DOORS.items():
            if imported == library or imported.startswith(library + "."):
                assert name in doors, f"{name} must not import {imported}"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert not (text == "torch.compile" and name != "_backends")
            assert not (text.startswith("torch.distributed") and name not in DOORS["torch.distributed"])
            assert not (text.startswith("torch._dynamo") and name != "_backends")


@EACH
def test_a_name_comes_from_the_module_that_defines_it(name):
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("functional_lowbit"):
            continue
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            value = getattr(module, alias.name)
            where = getattr(value, "__module__", None)
            is_ours = str(where).startswith("functional_lowbit")
            if is_ours and (inspect.isclass(value) or inspect.isfunction(value)) and name != "formats":
                # formats is a package that users see: Format and Codec are its names, wherever they are written.
                assert where == node.module or (node.module, where) == (
                    "functional_lowbit.formats",
                    "functional_lowbit.formats._format",
                )


@pytest.mark.parametrize("name", ["", "convert", "optim", "transforms"])
def test_an_init_file_exports_and_does_nothing_else(name):
    for node in TREES[name].body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant)  # the docstring
            continue
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.name == alias.asname for alias in node.names), "`X as X` only"


@EACH
def test_a_dtensor_is_rebuilt_from_its_global_shape_and_stride(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("DTensor.from_local"):
            assert {"shape", "stride"} <= {k.arg for k in node.keywords}


def _public() -> dict[str, object]:
    found: dict[str, object] = {}
    for space in (
        fl,
        fl.checkpoint,
        fl.convert,
        fl.formats,
        fl.optim,
        fl.plot,
        fl.reduce,
        fl.rounding,
        fl.schedules,
        fl.sharding,
        fl.tree,
    ):
        for name, value in vars(space).items():
            ours = str(getattr(value, "__module__", "")).startswith("functional_lowbit")
            if not name.startswith("_") and ours and (inspect.isclass(value) or inspect.isfunction(value)):
                found[f"{space.__name__}.{name}"] = value
    return found


PUBLIC = _public()
# Described by what makes them, or internal to a format or to sharding; a docstring is enough.
WITHOUT_EXAMPLE = (
    "State",
    "MaskedNode",
    "QuantizedTensor",
    "formats.Codec",
    "formats.Format",
    "formats.get",
    "part_of",
    "rounding.Words",
    "rounding.check_key",
    "sharding.check_shard",
    "sharding.contiguous_stride",
    "sharding.local_of",
    "sharding.wrap",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example_that_runs(name):
    value = PUBLIC[name]
    assert inspect.getdoc(value)
    if not name.endswith(WITHOUT_EXAMPLE):
        assert doctest.DocTestFinder(recurse=False).find(value)[0].examples, f"{name} needs an Example"


def test_the_names_of_the_contract_are_there():
    names = (
        "GradientTransformation apply_updates leafwise chain named_chain identity stateless masked apply_if_finite "
        "scale partition multi_transform freeze selective_transform set_to_zero "
        "scale_by_schedule scale_by_learning_rate add_decayed_weights clip clip_by_global_norm trace scale_by_adam "
        "adam adamw adam8bit adamw8bit adam4bit adamw4bit adamfp8 adamwfp8 sgd sgd8bit lion lion8bit scale_by_lion "
        "master_weights master_params inject_hyperparams multi_steps "
        "partition multi_transform named_chain freeze set_to_zero "
        "low_bit offload quantize QuantizedTensor describe compile global_norm state_dict load_state_dict checkpoint "
        "formats rounding schedules sharding tree optim convert memory_plan "
        "quantization_error record_quantization_error plot"
    )
    assert [name for name in names.split() if not hasattr(fl, name)] == []
