"""Build the wheel, install it elsewhere, and check that users get what the repository holds.

Run by `make wheel-check` with the Python of an environment that has torch, optree and `build`, and the repository
installed there with `pip install -e`. The wheel itself is tried in a new environment that sees those dependencies,
but not the editable install: a .pth line adds a folder without running the .pth files that lie in it.
"""

import ast
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = ROOT / "functional_lowbit" / "transforms"
DECLARED = {"torch", "optree", "functional_lowbit"}  # keep equal to `dependencies` in pyproject.toml
OPTIONAL = {  # imported inside a function only
    "functional_lowbit/checkpoint/_safetensors.py": {"safetensors"},
    "functional_lowbit/cli/_stores.py": {"torchao"},
}

ABSENT = """
try:
    import {name}
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("importable, but should not be: " + str({name}))
"""
NO_BARE_TRANSFORMS = ABSENT.format(name="transforms")

EVERY_MODULE = """
import importlib, pkgutil
import functional_lowbit as fl, functional_lowbit.transforms
for module in pkgutil.walk_packages(fl.__path__, "functional_lowbit."):
    importlib.import_module(module.name)
"""

ONE_STEP = """
import torch, functional_lowbit as fl
params = {"w": torch.ones(64, 128)}
tx = fl.chain(fl.clip_by_global_norm(1.0), fl.adamw8bit(1e-3))
updates, state = tx.update({"w": torch.ones(64, 128)}, tx.init(params), params)
assert bool((fl.apply_updates(params, updates)["w"] < 1).all())
"""


def run(*command: str | Path, cwd: Path, **env: str) -> None:
    """Run a command without the caller's PYTHONPATH; its output is shown only when it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=clean | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"wheel check: failed in {cwd}: {' '.join(map(str, command))}\n{done.stdout}")


def say(what: str) -> None:
    print(f"wheel check: {what}", flush=True)


def modules_of_the_tree() -> dict[str, Path]:
    """Name inside the wheel of each library file -> where it lies in the repository."""
    found = {}
    for package, folder in (("functional_lowbit", "functional_lowbit"), ("functional_lowbit/transforms", "transforms")):
        for path in (ROOT / folder).rglob("*.py"):
            if LINK not in path.parents:
                found[f"{package}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    return found


def check_imports_are_declared(sources: dict[str, Path]) -> None:
    allowed = DECLARED | sys.stdlib_module_names
    for name, path in sources.items():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    imported = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    imported = [node.module or "."]
                case _:
                    continue
            for module in imported:
                if module.partition(".")[0] not in allowed | OPTIONAL.get(name, set()):
                    sys.exit(f"wheel check: {name}:{node.lineno} imports {module}, not declared in pyproject.toml")


def check_contents(wheel: Path, sources: dict[str, Path]) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set(sources) | {"functional_lowbit/py.typed"}
    if names != expected:
        sys.exit(
            f"wheel check: {wheel.name} and the repository differ (see [tool.setuptools] packages in pyproject.toml)\n"
            f"  missing in the wheel: {sorted(expected - names)}\n  only in the wheel:    {sorted(names - expected)}"
        )


def main() -> None:
    if not LINK.is_symlink() or os.readlink(LINK) != "../transforms":
        sys.exit("wheel check: functional_lowbit/transforms has to be a symbolic link to ../transforms")

    sources = modules_of_the_tree()
    check_imports_are_declared(sources)
    say(f"{len(sources)} modules import only what pyproject.toml declares")

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # sdist first, wheel from the sdist: what a stale build/ folder holds cannot slip in.
        run(sys.executable, "-m", "build", "--outdir", work / "dist", ROOT, cwd=work)
        (wheel,) = (work / "dist").glob("*.whl")
        check_contents(wheel, sources)
        say(f"{wheel.name} holds these modules and py.typed, nothing else")

        run(sys.executable, "-m", "venv", "--without-pip", work / "env", cwd=work)
        python = work / "env" / "bin" / "python"
        site = Path(sysconfig.get_path("purelib", vars={"base": str(work / "env"), "platbase": str(work / "env")}))
        folders = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in folders))

        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        run(python, "-c", ABSENT.format(name="functional_lowbit"), cwd=elsewhere)
        run(python, "-c", EVERY_MODULE, cwd=ROOT)
        say("uninstalled, from the repository: imports work through the link")

        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=work)
        installed = f"assert fl.__file__.startswith({str(site)!r}), fl.__file__\n"
        here = f"assert functional_lowbit.transforms.__file__.startswith({str(site)!r}), functional_lowbit.transforms\n"
        run(python, "-c", EVERY_MODULE + installed + here + NO_BARE_TRANSFORMS, cwd=elsewhere)
        run(python, "-c", ONE_STEP, cwd=elsewhere)
        say("wheel: every module imports and a step runs; there is no bare `transforms`")

        run(work / "env" / "bin" / "functional-lowbit", "--version", cwd=elsewhere)
        run(python, "-m", "functional_lowbit", "--version", cwd=elsewhere)
        say("wheel: the command functional-lowbit and `python -m functional_lowbit` run")

        (elsewhere / "transforms.py").write_text("MINE = True\n")
        mine = "import transforms\nassert transforms.MINE\n"
        run(python, "-c", mine + EVERY_MODULE + here + ONE_STEP, cwd=elsewhere)
        run(python, "-c", EVERY_MODULE + here + mine, cwd=elsewhere)
        run(sys.executable, "-c", mine + EVERY_MODULE, cwd=elsewhere)
        (elsewhere / "transforms.py").unlink()
        say("wheel and editable install: a user's own transforms.py is left alone")

        tree = str(ROOT / "transforms")
        same = f"import os\nassert os.path.samefile(functional_lowbit.transforms.__path__[0], {tree!r})\n"
        run(sys.executable, "-c", EVERY_MODULE + same + NO_BARE_TRANSFORMS, cwd=elsewhere)
        say("editable install: transforms/ is functional_lowbit.transforms and nothing else")


if __name__ == "__main__":
    main()
