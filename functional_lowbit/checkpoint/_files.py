"""Entries in the files of torch.distributed.checkpoint: written by all ranks together, read by each by itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as save_on_ranks


def write_on_ranks(folder: Path, flat: dict[str, Any], group: Any) -> None:
    """Write this rank's part of the entries; every rank of the group must call this."""
    save_on_ranks(flat, storage_writer=_Writer(folder), process_group=group)


def write_alone(folder: Path, flat: dict[str, Any]) -> None:
    """The steps of dcp.save for one process, which it takes with a warning that there are no ranks."""
    writer, planner = _Writer(folder), DefaultSavePlanner()
    planner.set_up_planner(flat, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _Writer(FileSystemWriter):
    """Tells of a full disk, which torch hides behind an error of its own about positions in a file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def copied(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with memory of their own, on the CPU."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged = stager.stage(dict(flat))
        assert isinstance(staged, dict)  # and no future, as the options say
        return staged
    finally:
        stager.close()


def read(folder: Path, metadata: Any, wanted: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> None:
    """Fill `wanted`. A rank reads what it needs by itself, so that none waits for another that cannot read.

    Args:
        folder: The checkpoint.
        metadata: Its account of its files.
        wanted: Tensors to read into, or anything for what is no tensor, by the entries' names.
        planner: How an entry is unpickled, if not as torch does it.
    """
    reader, planner = FileSystemReader(folder), planner or DefaultLoadPlanner(allow_partial_load=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
