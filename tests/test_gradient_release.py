"""The example of gradient release: stepping inside the backward pass gives the bits of stepping after it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "gradient_release.py"


def test_losses_are_bit_equal_and_gradients_take_the_room_of_one_leaf():
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module, reason=f"{module}, which examples/byte_lm.py needs, is missing")
    small = ["--steps", "3", "--width", "32", "--layers", "1", "--bytes", "100000", "--backend", "eager"]
    command = [sys.executable, str(EXAMPLE), *small]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 of 3 losses are bit-equal; the parameters too" in run.stdout
    assert "16,448 bytes of gradients were there at once; the largest leaf has 16,448." in run.stdout  # 257 x 32
