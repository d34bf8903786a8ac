"""The lines that docs/hosts.md shows are run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest
from launched import LIGHTNINGS, accelerated
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hosts.md"


@pytest.mark.filterwarnings(f"ignore:{LIGHTNINGS[0]}")
def test_the_code_in_the_docs_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what it writes
    name = OptimizerNames.ADAMW_TORCH_8BIT
    monkeypatch.setitem(_OPTIMIZER_HANDLERS, name, _OPTIMIZER_HANDLERS[name])  # what it replaces
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    names: dict[str, Any] = {"__name__": "docs_hosts"}
    with accelerated():
        exec(compile(code, PAGE.name, "exec"), names)
    optimizers = names["optimizers"].optimizers
    assert [type(x).__name__ for x in optimizers] == ["AdamW8bit"]
