"""`inspect`: files and folders that are damaged, not complete, or hold code."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_files import (
    command,
    inspected,
    state_of,
    torch_file,
)

import functional_lowbit as fl


def flipped(path, at):
    stored = bytearray(path.read_bytes())
    stored[at] ^= 4
    path.write_bytes(stored)


def test_flipped_bits_in_a_file_are_noticed(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of())
    flipped(tmp_path / "x.pt", 20_000)  # inside the parameters
    document = inspected(capsys, tmp_path / "x.pt", status=1)
    assert document["damaged"] == ["the bytes of 'x/data/0' are not those that were written (their checksum says)"]
    assert inspected(capsys, tmp_path / "x.pt", "--no-checksums")["broken"] == 0


def test_flipped_bits_in_a_folder_are_noticed(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (file,) = (tmp_path / "x").glob("*.distcp")
    places = dcp.FileSystemReader(tmp_path / "x").read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == "1.0.mu.w.codes")
    flipped(file, place.offset + place.length // 2)
    document = inspected(capsys, tmp_path / "x", status=1)
    assert document["damaged"] == [
        "the bytes of '1.0.mu.w.codes' are not those that were written (their checksum says)"
    ]


def test_a_damaged_directory_of_a_file_is_noticed(capsys, tmp_path):
    """Where torch reads more than Python's zipfile, and where neither reads it."""
    torch_file(tmp_path / "x.pt", state_of())
    stored = (tmp_path / "x.pt").read_bytes()
    end = stored.rindex(b"PK\x06\x07")  # of the directory: 4 bytes that name it, and 4 that number the disk
    (tmp_path / "x.pt").write_bytes(stored[: end + 4] + b"\x01" + stored[end + 5 :])
    (text,) = inspected(capsys, tmp_path / "x.pt", status=1)["damaged"]
    assert text.startswith(f"the directory of {str(tmp_path / 'x.pt')!r} is not as it was written: ")
    flags = stored.index(b"PK\x01\x02") + 8  # of the first record; the lowest one says that it is encrypted
    (tmp_path / "x.pt").write_bytes(stored[:flags] + bytes([stored[flags] | 1]) + stored[flags + 1 :])
    ran = command(capsys, "inspect", tmp_path / "x.pt")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"functional-lowbit inspect: cannot read {str(tmp_path / 'x.pt')!r} as a file of torch")


def test_files_that_cannot_be_read_at_all(capsys, tmp_path):
    def refused(path, status, text):
        assert command(capsys, "inspect", path) == (status, "", f"functional-lowbit inspect: {text}\n")

    whole = tmp_path / "whole.pt"
    torch_file(whole, state_of())
    for name, stored in (
        ("short.pt", whole.read_bytes()[:9_000]),
        ("empty.pt", b""),
        ("text.md", b"# Checkpoints\n"),
        ("old.pt", b"\x80\x02K"),
        ("short.safetensors", b"\xff\x01"),
        ("head.safetensors", (900).to_bytes(8, "little") + b"{}"),
        ("bad.safetensors", (2).to_bytes(8, "little") + b"{]"),
    ):
        (tmp_path / name).write_bytes(stored)

    def at(name):
        return repr(str(tmp_path / name))

    for name, status, text in (
        ("short.pt", 1, "is truncated: it begins as a file of torch.save, and has no end"),
        ("empty.pt", 1, "is empty"),
        ("text.md", 2, "is no file of torch.save, no safetensors file and no checkpoint folder"),
        ("short.safetensors", 1, "is truncated: its header alone needs 519 bytes of 2"),
        ("head.safetensors", 1, "is truncated: its header alone needs 908 bytes of 10"),
    ):
        refused(tmp_path / name, status, f"{at(name)} {text}")
    # What follows is json's and torch's.
    ran = command(capsys, "inspect", tmp_path / "bad.safetensors")
    text = f"functional-lowbit inspect: cannot read {at('bad.safetensors')}, its header is damaged: "
    assert (ran.status, ran.err.startswith(text)) == (1, True)
    ran = command(capsys, "inspect", tmp_path / "old.pt")
    text = f"functional-lowbit inspect: cannot read {at('old.pt')} as a file of torch.save: "
    assert (ran.status, ran.err.startswith(text)) == (1, True)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    refused(
        tmp_path / "model.pt",
        2,
        f"{str(tmp_path / 'model.pt')!r} holds no optimizer state: neither an entry 'schema' (fl.state_dict), nor "
        "'state' beside 'param_groups' (torch.optim)",
    )


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("F6_E3M2", "has 'w' of the dtype 'F6_E3M2', which torch does not have"),
        ("F32", "has 3 bytes for 'w' of shape (4,) and torch.float32"),
    ],
)
def test_a_safetensors_header_that_does_not_fit(capsys, tmp_path, dtype, text):
    file = tmp_path / "x.safetensors"
    header = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    assert command(capsys, "inspect", file) == (1, "", f"functional-lowbit inspect: {str(file)!r} {text}\n")


def test_an_entry_of_a_folder_that_cannot_be_read(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (file,) = (tmp_path / "x").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    ran = command(capsys, "inspect", tmp_path / "x")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("functional-lowbit inspect: cannot read ")
    assert f" of {str(tmp_path / 'x')!r}, a file is damaged: " in ran.err  # and what torch says
    assert ran.err.count("\n") == 1


def test_a_truncated_safetensors_file(capsys, tmp_path):
    file = tmp_path / "x.safetensors"
    fl.checkpoint.save_safetensors(state_of(), file)
    stored = file.read_bytes()
    file.write_bytes(stored[:-100])
    ran = command(capsys, "inspect", file)
    assert ran.status == 1
    assert ran.err == (
        f"functional-lowbit inspect: {str(file)!r} is truncated: it has {len(stored) - 100} bytes of {len(stored)}, "
        "which '1.0.nu.w.codes' needs\n"
    )
    file.write_bytes(stored[:3_000] + b"12345678" + stored[3_000:])
    ran = command(capsys, "inspect", file)
    text = f"{str(file)!r} has {len(stored) + 8} bytes, and its header tells of {len(stored)}"
    assert ran == (1, "", f"functional-lowbit inspect: {text}\n")


def test_folders_that_are_not_complete(capsys, tmp_path):
    folder = tmp_path / "x"
    fl.checkpoint.save(folder, state_of())
    (file,) = folder.glob("*.distcp")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    assert command(capsys, "inspect", folder) == (
        1,
        "",
        f"functional-lowbit inspect: the file {str(file)!r} is truncated: it has {size - 10} bytes of {size}\n",
    )
    stored = file.read_bytes()
    file.unlink()
    assert command(capsys, "inspect", folder).err == (
        f"functional-lowbit inspect: the file {str(file)!r} of the checkpoint is missing\n"
    )
    (folder / ".metadata").write_bytes(b"\x80")
    ran = command(capsys, "inspect", folder)
    assert ran.status == 1
    assert ran.err.startswith(
        f"functional-lowbit inspect: cannot read {str(folder / '.metadata')!r}, the file is damaged: "
    )
    (folder / ".metadata").unlink()
    file.write_bytes(stored)
    assert command(capsys, "inspect", folder) == (
        1,
        "",
        f"functional-lowbit inspect: {str(folder)!r} is no complete checkpoint: it has no .metadata, which is written "
        "last\n",
    )
    file.rename(folder / "optimizer.pt")
    assert command(capsys, "inspect", folder) == (
        2,
        "",
        f"functional-lowbit inspect: {str(folder)!r} is a folder without a checkpoint; give one of the files in it\n",
    )
    shutil.rmtree(folder)
    folder.mkdir()
    assert command(capsys, "inspect", folder) == (
        2,
        "",
        f"functional-lowbit inspect: there is no checkpoint at {str(folder)!r}\n",
    )


class Code:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("it ran",)


def test_code_in_a_file_runs_only_if_it_is_trusted(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of(), extra=Code())
    ran = command(capsys, "inspect", tmp_path / "x.pt")
    assert ran == (
        2,
        "",
        f"functional-lowbit inspect: {str(tmp_path / 'x.pt')!r} holds more than tensors and numbers: builtins.print; "
        "loading that can run any code, so use --unsafe if you trust whoever wrote it\n",
    )
    ran = command(capsys, "inspect", "--unsafe", tmp_path / "x.pt")
    assert ran.status == 0
    assert ran.out.startswith("it ran\n")
    torch.save({"extra": Code()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    ran = command(capsys, "inspect", tmp_path / "old.pt")
    assert (ran.status, ran.out) == (2, "")
    assert " holds more than tensors and numbers: print; " in ran.err  # torch leaves out whose it is


def test_code_in_a_folder_runs_only_if_it_is_trusted(capsys, tmp_path):
    fl.checkpoint.save(tmp_path / "x", state_of())
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Code()))
    assert command(capsys, "inspect", tmp_path / "x") == (
        2,
        "",
        f"functional-lowbit inspect: {str(tmp_path / 'x' / '.metadata')!r} holds more than an account of tensors: "
        "builtins.print; loading that can run any code, so use --unsafe if you trust whoever wrote it\n",
    )
    assert command(capsys, "inspect", "--unsafe", tmp_path / "x").out == "it ran\n"  # and then it is no checkpoint


def test_a_class_of_another_library_is_named(capsys, tmp_path):
    torch_file(tmp_path / "x.pt", state_of(), extra=Code)
    assert command(capsys, "inspect", tmp_path / "x.pt").err == (
        f"functional-lowbit inspect: {str(tmp_path / 'x.pt')!r} holds more than tensors and numbers: "
        f"{Code.__module__}.Code; loading that can run any code, so use --unsafe if you trust whoever wrote it\n"
    )
