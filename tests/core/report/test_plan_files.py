"""memory_plan of a checkpoint's headers, and of a model's config."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import refuses
from safetensors.torch import save_file

import functional_lowbit as fl

TX = fl.adamw8bit(1e-3)
PARAMS = {
    "layers.0.weight": torch.zeros(64, 256, dtype=torch.bfloat16),
    "layers.1.weight": torch.zeros(65, 256),
    "norm": torch.zeros(5, dtype=torch.float16),
}
PLAN = fl.memory_plan(TX, PARAMS)


def _sharded(folder: Path) -> Path:
    """A checkpoint in two files with an index, as Hugging Face writes it."""
    parts = {
        "model-00001-of-00002.safetensors": ["layers.0.weight"],
        "model-00002-of-00002.safetensors": ["layers.1.weight", "norm"],
    }
    for name, keys in parts.items():
        save_file({k: PARAMS[k] for k in keys}, folder / name, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {k: name for name, keys in parts.items() for k in keys}}))
    return index


def test_one_file(tmp_path):
    save_file(PARAMS, tmp_path / "model.safetensors")
    assert fl.memory_plan(TX, tmp_path / "model.safetensors") == PLAN
    assert fl.memory_plan(TX, str(tmp_path)) == PLAN
    assert fl.memory_plan(TX, tmp_path, mesh=2) == fl.memory_plan(TX, PARAMS, mesh=2)


def test_a_state_beside_the_model_is_no_part_of_it(tmp_path):
    fl.checkpoint.save_safetensors(TX.init({"w": torch.zeros(64, 64)}), tmp_path / "optimizer.safetensors")
    refuses(
        ValueError,
        f"memory_plan: the folder '{tmp_path}' holds states of optimizers, and no model",
        lambda: fl.memory_plan(TX, tmp_path),
    )
    save_file(PARAMS, tmp_path / "model.safetensors")
    assert fl.memory_plan(TX, tmp_path) == PLAN


def test_only_the_header_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(PARAMS, file)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[: 8 + length])  # no number is left
    assert fl.memory_plan(TX, file) == PLAN


def test_several_files(tmp_path):
    index = _sharded(tmp_path)
    save_file({"another": torch.zeros(3)}, tmp_path / "adapter.safetensors")  # the index does not name it
    assert fl.memory_plan(TX, index) == PLAN
    assert fl.memory_plan(TX, tmp_path) == PLAN
    index.unlink()
    (tmp_path / "adapter.safetensors").unlink()
    assert fl.memory_plan(TX, tmp_path) == PLAN


def test_tensors_that_cannot_be_trained(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({**PARAMS, "position_ids": torch.arange(4), "seen": torch.tensor(True)}, file)
    with pytest.warns(
        UserWarning,
        match=f"^memory_plan: 2 tensors of '{file}' are not floating-point and were left out, the first is "
        r"'position_ids' \(I64\)$",
    ) as seen:
        assert fl.memory_plan(TX, file) == PLAN
    assert seen[0].filename == __file__
    save_file({"w": torch.zeros(64, 64).to(torch.float8_e4m3fn)}, file)
    refuses(
        TypeError,
        "memory_plan: params['w'] must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn; leave it out "
        "of the tree or mask it with fl.masked",
        lambda: fl.memory_plan(TX, file),
    )
    assert fl.memory_plan(TX, file, dtype=torch.bfloat16).weight_bytes == 2 * 64 * 64


def test_what_is_refused(tmp_path):
    def plan(path):
        return lambda: fl.memory_plan(TX, path)

    here = str(tmp_path)
    refuses(FileNotFoundError, f"memory_plan: there is nothing at '{here}/none'", plan(tmp_path / "none"))
    refuses(
        ValueError,
        f"memory_plan: the folder '{here}' must hold safetensors files or a config.json",
        plan(tmp_path),
    )
    (tmp_path / "model.bin").touch()
    refuses(
        ValueError,
        "memory_plan: params must be a .safetensors file, an index of them, a config.json or a folder with these, got "
        f"'{here}/model.bin'",
        plan(tmp_path / "model.bin"),
    )
    file = tmp_path / "model.safetensors"
    for text in (b"", b"version https://git-lfs.github.com/spec/v1\n", (10).to_bytes(8, "little") + b"{}"):
        file.write_bytes(text)
        refuses(
            ValueError,
            f"memory_plan: '{file}' has no safetensors header; it is damaged, or of another kind",
            plan(file),
        )
    file.write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')
    refuses(ValueError, f"memory_plan: '{file}' is damaged: its header gives 'a' no dtype and shape", plan(file))
    for entry in (
        b'{"a": {"dtype": ["F32"], "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [-2]}}',
        b'{"a": {"dtype": "F32", "shape": [9999999999, 9999999999]}}',
    ):
        file.write_bytes(len(entry).to_bytes(8, "little") + entry)
        refuses(ValueError, f"memory_plan: '{file}' is damaged: its header gives 'a' no dtype and shape", plan(file))
    file.write_bytes((4).to_bytes(8, "little") + b"{,,}")
    refuses(
        ValueError,
        f"memory_plan: '{file}' is not JSON where it should be: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
        plan(file),
    )


def test_what_is_refused_of_several_files(tmp_path):
    def plan(path):
        return lambda: fl.memory_plan(TX, path)

    index = _sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refuses(
        FileNotFoundError,
        f"memory_plan: '{index}' names the file 'model-00002-of-00002.safetensors', which is not there",
        plan(tmp_path),
    )
    for text in ("{}", '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        refuses(
            ValueError,
            f"memory_plan: '{index}' has no 'weight_map' from tensors to files; it is no index of safetensors files",
            plan(index),
        )
    index.write_text("[]")
    refuses(ValueError, f"memory_plan: '{index}' must hold an object, got list", plan(index))
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    refuses(
        ValueError,
        f"memory_plan: '{tmp_path}' holds several indices (model.safetensors.index.json, "
        "other.safetensors.index.json); give the path of one",
        plan(tmp_path),
    )
    for old in tmp_path.glob("*.json"):
        old.unlink()
    for name in ("model-1", "model-2"):
        save_file({"same": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    refuses(
        ValueError,
        f"memory_plan: '{tmp_path}/model-2.safetensors' holds 'same', and so does another file; give the files of one "
        "model",
        plan(tmp_path),
    )


def test_a_config_needs_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # Python's own way to say that a package is not there
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, tmp_path / "config.json"):
        refuses(
            ImportError,
            "memory_plan: a model config needs the package transformers; pip install 'functional-lowbit[hosts]'",
            lambda path=path: fl.memory_plan(TX, path),
        )


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def test_a_config_is_the_model_that_transformers_builds(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra hosts")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = fl.memory_plan(TX, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    params = dict(model.named_parameters())
    assert not any("lm_head" in name for name in params)  # tied to the embedding
    assert plan == fl.describe(TX.init(params), params)
    assert plan == fl.memory_plan(TX, tmp_path / "config.json")
    assert plan == fl.memory_plan(TX, config)
    assert plan == fl.memory_plan(TX, model)
    assert plan.weight_bytes == 2 * plan.parameters
    assert fl.memory_plan(TX, config, dtype=torch.float32).weight_bytes == 4 * plan.parameters
    bare = transformers.AutoConfig.for_model("vit", num_hidden_layers=1)  # names no class, and is no language model
    assert fl.memory_plan(TX, bare).weight_bytes == 4 * sum(p.numel() for p in transformers.ViTModel(bare).parameters())


def test_a_config_of_no_model(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers, of the extra hosts")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ValueError, match=r"^memory_plan: transformers makes no model of '.*/config.json': "):
        fl.memory_plan(TX, tmp_path)


def test_code_beside_a_config_is_refused_and_not_asked_for(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers, of the extra hosts")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match=r"^memory_plan: transformers makes no model of '.*/config.json': "):
        fl.memory_plan(TX, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert sys.stdin.read(1) == "y"
