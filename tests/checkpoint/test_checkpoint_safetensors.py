"""Checkpoints in one file of safetensors."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from checkpoint_states import after_two_steps, make_params
from helpers import refuses, same
from tiers import slow

import functional_lowbit as fl


def test_safetensors(tmp_path):
    tx = fl.apply_if_finite(fl.chain(fl.masked(fl.adam8bit(0.1), {"w": True, "b": False}), fl.trace(0.9)))
    for format in fl.formats.names():
        state = {"opt": after_two_steps(tx), "m": fl.quantize(torch.randn(5, 70), format), "n": 3, "name": "a"}
        file = tmp_path / f"{format}.safetensors"
        fl.checkpoint.save_safetensors(state, file)
        fresh = {**state, "opt": tx.init(make_params()), "n": 0, "name": ""}
        assert same(fl.checkpoint.load_safetensors(fresh, file), state)
    with safetensors.safe_open(file, "pt") as opened:  # what others see
        assert "opt.inner_state.0.inner_state.0.mu.w.codes" in opened.keys()  # noqa: SIM118
        assert json.loads(opened.metadata()["schema"])["library"] == fl.__version__
    assert sorted(x.suffix for x in tmp_path.iterdir()) == [".safetensors"] * len(fl.formats.names())


def test_safetensors_convert_and_refuse(tmp_path):
    file = tmp_path / "a.safetensors"
    state = after_two_steps(fl.adam8bit(0.1))
    fl.checkpoint.save_safetensors(state, file)
    other = fl.adam4bit(0.1).init(make_params())
    speaker = "checkpoint.load_safetensors"
    refuses(
        ValueError,
        f"{speaker}: leaf '0.mu.w' was saved with format 'companded8', but the state has 'root4'; "
        "pass convert=True to convert it",
        lambda: fl.checkpoint.load_safetensors(other, file),
    )
    converted = fl.checkpoint.load_safetensors(other, file, convert=True)
    assert same(converted, fl.load_state_dict(other, fl.state_dict(state), convert=True))
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=rf"^{speaker}: cannot read '{file}', the file is damaged: .*"):
        fl.checkpoint.load_safetensors(state, file)
    safetensors.torch.save_file({"w": torch.ones(2)}, file)
    message = f"{speaker}: '{file}' has no metadata 'schema'; it must come from checkpoint.save_safetensors"
    refuses(ValueError, message, lambda: fl.checkpoint.load_safetensors(state, file))
    missing = tmp_path / "none"
    message = f"{speaker}: there is no file '{missing}'"
    refuses(FileNotFoundError, message, lambda: fl.checkpoint.load_safetensors(state, missing))
    with pytest.raises(OSError, match=r"^checkpoint.save_safetensors: could not write '/proc/a': "):
        fl.checkpoint.save_safetensors(state, "/proc/a")


def test_several_write_one_safetensors_file(tmp_path):
    """Whoever comes last has the file, whole; none is in another's way."""
    file = tmp_path / "a.safetensors"
    states = [{"w": torch.full((100_000,), float(n))} for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: fl.checkpoint.save_safetensors(states[k % 4], file), range(40)))
    loaded = fl.checkpoint.load_safetensors(states[0], file)["w"]
    assert loaded.eq(loaded[0]).all()
    assert [x.name for x in tmp_path.iterdir()] == ["a.safetensors"]


@slow
def test_without_safetensors():
    """In a process that cannot import it."""
    script = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import functional_lowbit as fl\n"
        "try:\n    fl.checkpoint.save_safetensors({}, 'x')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "checkpoint.save_safetensors: needs the package safetensors; pip install 'functional-lowbit[safetensors]'\n"
    )
