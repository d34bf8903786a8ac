"""What goes wrong while a checkpoint is written or read: all ranks are told, none hangs, nothing is lost."""

import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import world as w
from tiers import slow_unless
from whole import bits
from world import World

import functional_lowbit as fl
from functional_lowbit._refused import kind_of
from functional_lowbit.checkpoint import _files, _save

two = pytest.mark.parametrize("world", [2], indirect=True, ids="W={}".format)


ROWS = 1025


def tree_of(seed: int, rows: int = ROWS) -> dict[str, Any]:
    params = {"w": w.shard(w.random((rows, 512), seed)), "b": w.shard(w.random((5,), seed + 1))}
    return {"params": params, "state": fl.adamw8bit(1e-2).init(params), "n": seed}


def partial(where: str) -> Path:
    """Where a checkpoint is written."""
    return Path(where).with_name(f".{Path(where).name}.checkpoint-partial")


def text_of(action: Callable[[], Any]) -> str:
    """What a call says when it fails."""
    try:
        action()
    except Exception as error:
        return f"{kind_of(error)}: {error}"
    return "no error"


def save(where: str, seed: int) -> Any:
    tree = tree_of(seed)
    fl.checkpoint.save(where, tree)
    return bits(tree)


def load(where: str) -> Any:
    return bits(fl.checkpoint.load(where, tree_of(77)))


def save_and_die(where: str, victim: int, asynchronous: bool) -> None:
    """One rank is killed as soon as its file is there; the other one writes down what it was told."""
    tree = tree_of(2, 40_000)  # 80 MB, and as much again of state, so that there is a middle
    local = [x.to_local().clone() for x in tree["params"].values()]
    if w.rank() == victim:
        threading.Thread(target=_die_at, args=(partial(where) / f"__{victim}_0.distcp",), daemon=True).start()
    if asynchronous:
        text = text_of(lambda: fl.checkpoint.async_save(where, tree).result())
    else:
        text = text_of(lambda: fl.checkpoint.save(where, tree))
    same = all(torch.equal(x.to_local(), y) for x, y in zip(tree["params"].values(), local, strict=True))
    Path(where + ".told").write_text(json.dumps([text, same]))


def _die_at(file: Path) -> None:
    while not (file.exists() and file.stat().st_size > 1_000_000):
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGKILL)


@slow_unless(lambda victim, asynchronous: victim and asynchronous)
@two
@pytest.mark.parametrize(("victim", "asynchronous"), [(1, False), (0, False), (1, True)], ids=str)
def test_a_rank_killed_in_the_middle_of_a_save(world: World, place: Path, victim: int, asynchronous: bool) -> None:
    where = str(place / f"killed-{victim}-{asynchronous}")
    saved = world.run(save, where, 1)
    with pytest.raises(AssertionError, match="the process ended with code -9"):
        world.run(save_and_die, where, victim, asynchronous)
    text, same = json.loads(Path(where + ".told").read_text())
    speaker = "async_save" if asynchronous else "save"
    assert text.startswith(
        f"RuntimeError: checkpoint.{speaker}: another rank ended, or did not come, while '{where}' was written: "
    )
    assert same
    assert world.run(load, where) == saved  # new processes
    for refused in world.run(refused_load, str(partial(where))):
        assert refused == (
            f"ValueError: checkpoint.load: '{partial(where)}' is no complete checkpoint: it has no .metadata, which is "
            "written last"
        )
    assert partial(where).exists()
    after = world.run(save, where, 3)  # the next save tidies up
    assert world.run(load, where) == after
    assert not partial(where).exists()


def refused_load(where: str) -> Any:
    """What a load says, and that the tree is as it was."""
    tree = tree_of(77)
    before = bits(tree)
    text = text_of(lambda: fl.checkpoint.load(where, tree))
    assert bits(tree) == before
    return text


def save_without_a_group(where: str, asynchronous: bool) -> str:
    """The process group is destroyed before a save, or while it waits for its turn."""
    tree = tree_of(2)
    if asynchronous:
        started = threading.Event()
        fl.checkpoint.async_save(where + "-first", {"n": 1}).result()
        _save._writer[0].submit(started.wait)
        saving = fl.checkpoint.async_save(where, tree)
        dist.destroy_process_group()
        started.set()
        return text_of(saving.result)
    dist.destroy_process_group()
    return text_of(lambda: fl.checkpoint.save(where, tree))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_no_process_group_any_more(place: Path, asynchronous: bool) -> None:
    """No rank takes itself for the only one: what it wrote would lack the others' parts."""
    where = str(place / f"destroyed-{asynchronous}")
    world = World(2, place)
    try:
        saved = world.run(save, where, 1)
        texts = world.run(save_without_a_group, where, asynchronous)
    finally:
        world.close(at_once=True)
    for text in texts:
        assert text == (
            f"RuntimeError: checkpoint.{'async_save' if asynchronous else 'save'}: '{where}' was not written, its "
            "ranks have no process group any more; destroy it when the checkpoint is in place"
        )
    again = World(2, place)
    try:
        assert again.run(load, where) == saved
    finally:
        again.close()


@two
def test_a_rank_killed_in_the_first_save(world: World, place: Path) -> None:
    where = str(place / "killed-first")
    with pytest.raises(AssertionError, match="the process ended with code -9"):
        world.run(save_and_die, where, 1, False)
    for text in world.run(refused_load, where):
        assert text == (
            f"FileNotFoundError: checkpoint.load: there is no checkpoint at '{where}'; "
            "'.killed-first.checkpoint-partial' beside it is what an interrupted save left, and not complete"
        )


@two
def test_damaged_files(world: World, place: Path) -> None:
    """A rank that needs nothing of the damaged file is told as well."""
    path = place / "damaged"
    world.run(save, str(path), 1)
    for file in (path / "__0_0.distcp", path / "__1_0.distcp"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-7])
        for text in world.run(refused_load, str(path)):
            assert text == (
                f"ValueError: checkpoint.load: the file '{file}' is truncated: it has {len(whole) - 7} bytes of "
                f"{len(whole)}"
            )
        file.unlink()
        for text in world.run(refused_load, str(path)):
            assert text == f"ValueError: checkpoint.load: the file '{file}' of the checkpoint is missing"
        file.write_bytes(b"\0" * len(whole))
        for text in world.run(refused_load, str(path)):
            assert text.startswith(f"ValueError: checkpoint.load: cannot read '{path}', a file is damaged: ")
        file.write_bytes(whole)
    assert world.run(load, str(path)) == world.run(save, str(path), 1)


def on_one_rank_only(where: str) -> Any:
    """Failures of rank 1 that rank 0 cannot see."""
    tree = tree_of(1)
    odd = {**tree, "n": object() if w.rank() == 1 else 1}
    wrong = {**tree, "n": 1.5} if w.rank() == 1 else tree
    return [
        text_of(lambda: fl.checkpoint.save(where + "-new", odd)),
        text_of(lambda: fl.checkpoint.async_save(where + "-new", odd)),
        text_of(lambda: fl.checkpoint.load(where, wrong)),
    ]


@two
def test_a_failure_on_one_rank_is_one_of_all(world: World, place: Path) -> None:
    where = str(place / "one")
    world.run(save, where, 1)
    wanted = [
        "TypeError: state_dict: leaf 'n' must be a tensor, a bool, a number or a string, got object",
        "TypeError: state_dict: leaf 'n' must be a tensor, a bool, a number or a string, got object",
        "ValueError: checkpoint.load: leaf 'n' was saved with kind 'int', but the state has 'float'",
    ]
    assert world.run(on_one_rank_only, where) == [[f"{text} (on rank 1)" for text in wanted], wanted]
    assert not Path(where + "-new").exists()


def different_trees(where: str) -> Any:
    """A structure, a number and a path that differ between the ranks."""
    tree = tree_of(1)
    me = w.rank()
    other = {**tree, "more": 1} if me else tree
    return [
        text_of(lambda: fl.checkpoint.save(where, other)),
        text_of(lambda: fl.checkpoint.async_save(where, other)),
        text_of(lambda: fl.checkpoint.save(where, {**tree, "n": me})),
        text_of(lambda: fl.checkpoint.save(f"{where}-{me}", tree)),
        text_of(lambda: fl.checkpoint.load(f"{where}-{me}", tree)),
    ]


@two
def test_ranks_that_do_not_save_the_same(world: World, place: Path) -> None:
    where = str(place / "different")
    for texts in world.run(different_trees, where):
        assert texts == [
            f"ValueError: checkpoint.{speaker}: {what} must be the same on all ranks, but differs on ranks 0 and 1"
            for speaker, what in (
                ("save", "the tree's structure"),
                ("async_save", "the tree's structure"),
                ("save", "a number in the tree"),
                ("save", "path"),
                ("load", "path"),
            )
        ]
    assert not list(place.glob("different*"))


def odd_numbers(where: str) -> Any:
    fl.checkpoint.save(where, {"best": float("nan"), "worst": -math.inf, "rate": np.float64(0.1)})
    return repr(fl.checkpoint.load(where, {"best": 0.0, "worst": 0.0, "rate": 0.0}))


@two
def test_a_number_that_is_none_is_the_same_on_all_ranks(world: World, place: Path) -> None:
    assert world.run(odd_numbers, str(place / "nan")) == ["{'best': nan, 'worst': -inf, 'rate': 0.1}"] * 2


def load_while_it_is_replaced(where: str) -> Any:
    """Rank 1 reads the numbers when rank 0 has read them, and another checkpoint has taken the place."""
    read, done = _files.read, Path(where + ".done")

    def later(folder: Path, metadata: Any, wanted: dict[str, Any]) -> None:
        if "n" not in wanted or done.exists():
            return read(folder, metadata, wanted)
        if w.rank() == 0:
            read(folder, metadata, wanted)
            os.rename(where, where + "-old")
            os.rename(where + "-new", where)
            done.touch()
            return None
        while not done.exists():
            time.sleep(0.001)
        return read(folder, metadata, wanted)

    _files.read = later
    try:
        return load(where)
    finally:
        _files.read = read


@two
def test_all_ranks_load_one_checkpoint(world: World, place: Path) -> None:
    where = str(place / "replaced")
    world.run(save, where, 1)
    saved = world.run(save, where + "-new", 2)
    assert world.run(load_while_it_is_replaced, where) == saved


def lost_on_the_way(where: str) -> Any:
    """Rank 1 writes to a disk that rank 0 does not see."""
    write = _files._Writer.write_data

    def elsewhere(self: Any, *args: Any) -> Any:
        written = write(self, *args)
        for file in Path(self.path).glob("__1_*"):
            file.unlink()
        return written

    _files._Writer.write_data = elsewhere if w.rank() == 1 else write  # type: ignore[method-assign]
    try:
        return text_of(lambda: fl.checkpoint.save(where, tree_of(3)))
    finally:
        _files._Writer.write_data = write  # type: ignore[method-assign]


@two
def test_ranks_without_a_disk_in_common(world: World, place: Path) -> None:
    """The older checkpoint is not replaced by one that lacks a rank's file."""
    where = str(place / "lost")
    saved = world.run(save, where, 1)
    file = partial(where) / "__1_0.distcp"
    texts = world.run(lost_on_the_way, where)
    assert texts[0] == f"ValueError: checkpoint.save: the file '{file}' of the checkpoint is missing"
    assert texts[1] == texts[0] + " (on rank 0)"
    assert world.run(load, where) == saved


def meta_tree(where: str) -> Any:
    """A state on the meta device is a template; the result is real, and sharded as the template is."""
    tree = tree_of(1)
    meta = {name: torch.empty_like(x, device="meta") for name, x in tree["params"].items()}
    state = fl.adamw8bit(1e-2).init(meta)
    loaded = fl.checkpoint.load(where, {"params": meta, "state": state, "n": 0})
    return bits(loaded)


@two
def test_into_a_tree_without_memory(world: World, place: Path) -> None:
    where = str(place / "meta")
    assert world.run(save, where, 1) == world.run(meta_tree, where)


def nowhere(where: str) -> Any:
    tree = tree_of(1)
    before = bits(tree)
    texts = [
        text_of(lambda: fl.checkpoint.save(where, tree)),
        text_of(lambda: fl.checkpoint.async_save(where, tree).result()),
    ]
    assert bits(tree) == before
    return texts


@two
@pytest.mark.parametrize("where", ["/proc/a", "/sys/a"])
def test_a_read_only_place(world: World, where: str) -> None:
    """Not even root makes folders there."""
    for texts in world.run(nowhere, where):
        for text, speaker in zip(texts, ("save", "async_save"), strict=True):
            assert text.startswith(f"OSError: checkpoint.{speaker}: cannot write at '{where}': [Errno ")


def with_small_files(where: str) -> Any:
    """Rank 1 may write no file of more than 100 kB, as if a quota or a disk of its own were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if w.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        return nowhere(where)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@two
def test_no_room_on_one_rank(world: World, place: Path) -> None:
    where = place / "room" / "a"
    saved = world.run(save, str(where), 2)
    for texts in world.run(with_small_files, str(where)):
        assert texts == [
            f"OSError: checkpoint.{speaker}: could not write '{where}' on rank 1: [Errno 27] File too large; what was "
            "saved there before is untouched"
            for speaker in ("save", "async_save")
        ]
        assert [x.name for x in where.parent.iterdir()] == ["a"]
    assert world.run(load, str(where)) == saved
