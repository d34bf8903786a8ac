"""What README and the docs show is run as it stands there."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(path: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, path: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run code as a module of its own: the compiler looks a function's globals up in its module."""
    module = ModuleType("code_" + re.sub(r"\W", "_", path))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, path, "exec"), vars(module))
    return vars(module)


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "docs/checkpoints.md",
        "docs/planning.md",
        "docs/conversion.md",
        "docs/sharding.md",
        "docs/torch_optim.md",
        "docs/transformations.md",
    ],
)
def test_the_code_in_the_docs_runs(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)  # what it writes
    code = "\n".join(blocks(path))
    assert "import functional_lowbit as fl" in code
    run(code, path, monkeypatch)


def test_the_first_example_trains_and_is_twelve_lines(monkeypatch: pytest.MonkeyPatch):
    first = blocks("README.md")[0]
    assert len([line for line in first.splitlines() if line.strip()]) == 12
    names = run(first, "README.md", monkeypatch)
    model, torch = names["model"], names["torch"]
    untrained = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    loss = lambda m: (m(torch.ones(8, 64)) - 1).square().mean().item()  # noqa: E731
    assert loss(model) < 0.1 * loss(untrained)
    assert names["step"].graphs == 2
    assert names["state"][1][0].step == 20


def test_links_in_the_docs_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
