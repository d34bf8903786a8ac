"""The study of the formats runs to its end, and writes its tables where they belong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import slow

from functional_lowbit import formats

ROOT = Path(__file__).resolve().parents[1]


@slow
def test_study_fills_the_marked_places(tmp_path: Path):
    for library in ("matplotlib", "tqdm"):
        pytest.importorskip(library)
    page = tmp_path / "formats.md"
    page.write_text("before\n<!-- study:pareto -->\nto be replaced\n<!-- /study -->\nafter\n")
    settings = "--sizes tiny --steps 2 --seeds 1 --batch 2 --no-timing --formats companded8"
    command = [sys.executable, str(ROOT / "benchmarks" / "format_study.py"), *settings.split(), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    text = page.read_text()
    assert text.startswith("before\n<!-- study:pareto -->\n`python benchmarks/format_study.py")
    assert text.endswith("<!-- /study -->\nafter\n")
    assert "to be replaced" not in text
    assert all(f"| `{name}` |" in text for name in formats.names())
    assert "| `companded8` |" in (tmp_path / "formats-curves.md").read_text()
    assert (tmp_path / "formats_pareto.png").exists()
    assert (tmp_path / "formats_curves.png").exists()

    rows = {
        (row["name"], row["block"]): row
        for row in json.loads((tmp_path / "formats.json").read_text())["errors"]["rows"]
    }
    assert rows["float32", None]["both"] == 0
    assert rows["bfloat16", None]["bytes_per_param"] == 4
    assert 0 < rows["companded8", 256]["both"] < rows["root4", 128]["both"]
    assert all(row["zeros"] == 0 for row in rows.values())  # a live second moment never reads as 0
