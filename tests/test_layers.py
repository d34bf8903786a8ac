"""The floors: imports point down, each foreign library has one door, and every public name shows how it is used."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import functional_lowbit as fl

PACKAGE = Path(fl.__file__).parent
FLOORS = {
    0: {
        "_base",
        "_numerics",
        "_split",
        "rounding",
        "_cpp_ops",
        "_cpp_library",
        "_cpp_text",
        "_version",
        "_ranks",
        "_lock",
        "_chunks",
        "_headers",
        "_model_config",
        "_report",
        "_error_report",
    },
    1: {"_folder", "_tree", "_grid", "formats._format", "_cpp_source", "_cpp_norm"},
    2: {"_guard", "_interrupted", "sharding"}
    | {f"formats.{x}" for x in ("companded", "dynamic", "floats", "fp8", "root4")},
    3: {"_check", "formats", "_collectives", "_current", "_index", "_parts", "_plan_params", "_planned_mesh", "_task"},
    4: {"_quantized", "_exact_sum", "_like_params", "_norm", "_statistics", "_whole", "schedules"},
    5: {"_observing", "_rule", "reduce", "tree"},
    6: {
        "_leafwise",
        "_low_bit",
        "_recipe",
        "_apply",
        "_noise",
        "_program",
        "_kernel",
        "_staging",
        "_schema",
        "_describe",
    },
    7: {
        "_memory_plan",
        "_quantization_error",
        "_native",
        "_reading",
        "_renewal",
        "transforms._chain",
        "transforms._clip",
        "transforms._masked",
        "transforms._scale",
    }
    | {"transforms._centralize", "transforms._factored", "transforms._trust_ratio"},
    8: {"_backends", "_checkpoint", "transforms._decay", "transforms._finite", "transforms._master", "transforms._sgd"}
    | {"transforms._orthogonalize", "transforms._record_error"},
    9: {"_run", "_donate", "_safetensors", "plot", "transforms._adam", "transforms._lion"},
    10: {"_compile", "checkpoint", "optim._entries", "optim._hyper", "optim._same_groups"},
    11: {"optim._groups", "optim._param_tree"},
    12: {"optim._optimizer"},
    13: {"optim"},
    14: {"", "transforms"},  # what users import
}
TOP = max(FLOORS)
CONVERT = {  # whose last modules stand between the shells and what users import
    0: {"_saved"},
    1: {"_match", "_place"},
    4: {"_blocks"},
    8: {"_kept", "_slots"},
    9: {"_read"},
    10: {"_bitsandbytes", "_flashoptim", "_masters", "_own", "_torchao"},
    11: {"_fill", "_library"},
    TOP: {"_shell"},
    TOP + 1: {"_into", "_to_torch"},
    TOP + 2: {"_from"},
}
FLOORS |= {TOP: set(), TOP + 1: set(), TOP + 2: set(), TOP + 3: {"convert"}, TOP + 4: FLOORS[TOP]}
for floor, names in CONVERT.items():
    FLOORS[floor] = FLOORS[floor] | {f"convert.{name}" for name in names}
CLI = [  # the floors of the command line, which uses the library as users do
    {"arguments", "mistakes", "output", "pending", "progress", "numbers", "contenders", "machine"},
    {"folders", "foreign", "listed", "recipes", "safetensors_file", "same", "timing"},
    {"leaves", "reformat", "sections", "stores", "bench"},
    {"conversions", "inspect", "parameters", "rewritten"},
    {"convert", "plan"},
    {"main"},
]
FLOORS |= {100 + n: {f"cli._{x}" for x in names} for n, names in enumerate(CLI)} | {199: {"cli", "__main__"}}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules}
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
    },
    "safetensors": {"_safetensors"},
    "optree": {"_tree"},
    "torch._dynamo": {"_backends"},
    "torch.utils._pytree": {"_tree"},
}
DOORS["torch.distributed"].add("cli._folders")  # it reads a checkpoint one entry after the other


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
        "GradientTransformation apply_updates leafwise chain identity stateless masked apply_if_finite scale "
        "scale_by_schedule scale_by_learning_rate add_decayed_weights clip clip_by_global_norm trace scale_by_adam "
        "adam adamw adam8bit adamw8bit adam4bit adamw4bit adamfp8 adamwfp8 sgd sgd8bit lion lion8bit scale_by_lion "
        "master_weights master_params "
        "low_bit quantize QuantizedTensor describe compile global_norm state_dict load_state_dict checkpoint formats "
        "rounding schedules sharding tree optim memory_plan quantization_error record_quantization_error plot convert"
    )
    assert [name for name in names.split() if not hasattr(fl, name)] == []
