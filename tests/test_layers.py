"""The rooms: imports point down, each foreign library has one door, and every public name shows how it is used.

A room is a folder with an `__init__.py`, or a module beside the folders at the top. Its docstring ends with a line
`Imports: ...` that names the rooms it imports from; a new file in a room needs no entry anywhere.
"""

import ast
import doctest
import importlib
import inspect
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import functional_lowbit as fl

PACKAGE = Path(fl.__file__).parent
DOORS = {  # who may import what: a module, or all of a room
    "torch.distributed": {
        "_private",
        "sharding",
        "checkpoint",
        "_core.report.planned_mesh",
        "cli._folders",  # it reads a checkpoint one entry after the other
    },
    "safetensors": {"checkpoint._safetensors"},
    "optree": {"_optree", "_private"},
    "torch._dynamo": {"_private"},
    "torch.compile": {"_core.step.backends"},
}
# Private names of others than torch and optree: of namedtuples, of transformers.
NOT_TORCH = {"_replace", "_fields", "_asdict", "_from_config"}


def _files() -> dict[str, Path]:
    """Module name without the package's, to file. transforms/ is reached through its link, once."""
    found = {}
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "transforms").glob("*.py")}):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = _files()
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
FOLDERS = {name for name, path in FILES.items() if path.name == "__init__.py"}
EACH = pytest.mark.parametrize("name", TREES, ids=lambda name: name or "functional_lowbit")


def _room(name: str) -> str:
    """The room of a module; the names that users import are the room without a name."""
    return name if name in FOLDERS or "." not in name else name.rpartition(".")[0]


ROOMS = sorted({_room(name) for name in FILES})


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


def _used(room: str) -> set[str]:
    """The rooms that a room imports from."""
    return {_room(other) for name in FILES if _room(name) == room for other in _ours(name)} - {room}


def _named(room: str) -> set[str]:
    """The rooms that the last line of a room's docstring names."""
    _, mark, rooms = (ast.get_docstring(TREES[room]) or "").rpartition("\n\nImports: ")
    assert mark, f"the docstring of {room} must end with a line `Imports: ...`"
    return {"" if name == "functional_lowbit" else name for name in rooms.replace("\n", " ").split(", ")} - {"nothing"}


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("", "__main__")])
def test_a_room_says_what_it_imports(room):
    assert _named(room) == _used(room)


def test_imports_run_in_no_circle():
    order = list(TopologicalSorter({room: _used(room) for room in ROOMS}).static_order())  # raises for a circle
    assert len(order) == len(ROOMS)
    within = {name: {other for other in _ours(name) if _room(other) == _room(name)} for name in FILES}
    list(TopologicalSorter(within).static_order())


def test_the_house_stays_small():
    top = {name.split(".")[0] for name in FILES} - {"", "__main__"}
    folders = top & FOLDERS
    assert len(folders) <= 8
    assert len(top - folders) <= 6
    assert len(set(ROOMS) - {"", "__main__"}) <= 20
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in lines.items() if n > 250} == {}
    assert sorted(lines.values())[len(lines) // 2] <= 120


def test_the_tests_mirror_the_rooms():
    tests = Path(__file__).parent
    files = [path for path in tests.rglob("*.py") if "__pycache__" not in path.parts]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: n for name, n in lines.items() if n > 400} == {}
    rooms = {room.replace("_core", "core").replace(".", "/") for room in FOLDERS} | {".", "core"}
    beside = {"support", "hosts", "parity"}  # what tests share, and what needs an environment of its own
    assert {path.parent.relative_to(tests).as_posix() for path in files} <= rooms | beside


@EACH
def test_a_function_is_short(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            assert not body or body[-1].end_lineno - body[0].lineno < 60, f"{node.name} is too long"


def _may_use(name: str, library: str) -> bool:
    return any(name == door or name.startswith(door + ".") for door in DOORS[library])


@EACH
def test_each_foreign_library_has_its_doors(name):
    for imported in _imports(TREES[name]):
        for library in DOORS:
            if imported == library or imported.startswith(library + "."):
                assert _may_use(name, library), f"{name} must not import {imported}"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            for library in ("torch.compile", "torch.distributed", "torch._dynamo"):
                assert not (text == library or text.startswith(library + ".")) or _may_use(name, library)


def _is_private(word: str) -> bool:
    return word.startswith("_") and not (word.startswith("__") and word.endswith("__"))


def _defined(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


OURS = set().union(*map(_defined, TREES.values())) | NOT_TORCH


@EACH
def test_private_names_of_torch_and_optree_come_through_one_module(name):
    """`_private` has each with what it is for; `tests/test_private.py` tries them."""
    if name == "_private":
        return
    for node in ast.walk(TREES[name]):
        words: list[str] = []
        if isinstance(node, ast.ImportFrom):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
        if words and words[0] in ("torch", "optree"):
            assert not any(map(_is_private, words)), f"{ast.unparse(node)} must go through _private"
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in ("torch", "optree"):
            assert not _is_private(node.attr), f"{ast.unparse(node)} must go through _private"
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".")[-1] in ("getattr", "hasattr", "get"):
            words = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        else:
            words = [keyword.arg or "" for keyword in node.keywords] if isinstance(node, ast.Call) else []
        foreign = [word for word in words if _is_private(word) and word not in OURS]
        assert not foreign, f"{ast.unparse(node)} must go through _private"


@EACH
def test_a_name_comes_from_the_module_that_defines_it(name):
    """Or from the package that shows it: `formats`, `sharding` and `checkpoint` are names that users type."""
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("functional_lowbit"):
            continue
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            value = getattr(module, alias.name)
            where = str(getattr(value, "__module__", None))
            if where.startswith("functional_lowbit") and (inspect.isclass(value) or inspect.isfunction(value)):
                inside = where.startswith(f"{node.module}.") and _room(name) != _room(where.partition(".")[2])
                assert where == node.module or inside


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_an_init_file_exports_and_does_nothing_else(name):
    for node in TREES[name].body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant)  # the docstring
            continue
        if name == "formats" and not isinstance(node, ast.ImportFrom):
            continue  # the table of formats and its two functions
        assert isinstance(node, ast.ImportFrom)
        assert name == "formats" or all(alias.name == alias.asname for alias in node.names), "`X as X` only"


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
