"""A power cut after any operation of a save: the reader finds the old checkpoint or the new one, whole."""

import os
import random
import shutil
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatfm.checkpoint import (
    Saver,
    ShardedTensor,
    file_format,
    file_io,
    save,
)
from megatfm.errors import MegatfmError
from tests.support.power_loss import CHOICES, Disk, Operation, build, newest_whole_step, recorded
from tests.support.workers import Workers

DRAWS = 6
"""Of what was not synced, for each prefix, besides the four extremes."""


def saved(folder: Path, step: int) -> Path | None:
    """A checkpoint whose every value is its step, written in the background, the one before it removed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ShardedTensor(torch.full((2, 3), float(step)), (2 * world, 3), (2 * rank, 0))
    with Saver(folder, keep=1) as saver:
        saver.save(step, {"rows": rows, "all": torch.full((4,), step)}, {"step": step})
        return saver.wait_for_save()


def recorded_save(folder: Path, direct: bool) -> list[Operation]:
    operations: list[Operation] = []
    file_format.DIRECT_BYTES, before = 0 if direct else file_format.DIRECT_BYTES, file_format.DIRECT_BYTES
    try:
        with recorded(operations):
            assert saved(folder, 2) is not None
    finally:
        file_format.DIRECT_BYTES = before
    return operations


def cut_everywhere(folder: Path, operations: list[Operation], scratch: Path) -> dict[tuple[int, str], str]:
    """(operations before the cut, what was lost) → step found, or what the reader says."""
    lossy, draw, seen, results = Disk(folder, operations), random.Random(7), dict[int, str](), {}
    for count in range(len(operations) + 1):
        for number, choice in enumerate((*CHOICES, *["some"] * DRAWS)):
            tree = lossy.after(count, choice, draw)
            key = hash(frozenset(tree.items()))
            if key not in seen:
                build(tree, scratch)
                try:
                    seen[key] = str(newest_whole_step(scratch))
                except (MegatfmError, AssertionError) as error:
                    seen[key] = f"{type(error).__name__}: {error}"
                shutil.rmtree(scratch)
            results[count, f"{choice} {number}"] = seen[key]
    return results


@pytest.mark.parametrize(("world", "direct"), [(1, False), (2, False), (2, True)])
def test_a_power_cut_leaves_the_old_or_the_new_one(
    workers: Workers, tmp_path: Path, world: int, direct: bool
) -> None:
    folder = tmp_path / "checkpoints"
    workers.run(saved, world, folder, 1)
    before = shutil.copytree(folder, tmp_path / "before")
    operations = [
        operation for rank in workers.run(recorded_save, world, folder, direct) for operation in rank
    ]
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    shutil.rmtree(folder)
    before.rename(folder)
    results = cut_everywhere(folder, operations, tmp_path / "scratch")
    assert set(results.values()) == {"1", "2"}, {k: v for k, v in results.items() if v not in ("1", "2")}
    # Once the save has returned, it is the new one, whatever was lost.
    assert {step for (count, _), step in results.items() if count == len(operations)} == {"2"}
    kinds = {operation.kind for operation in operations}
    assert kinds == {"mkdir", "create", "write", "fsync", "rename", "unlink", "rmdir"}


@pytest.mark.parametrize("fault", ["file", "draft", "name"])
def test_a_missing_sync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The test above sees each kind of sync that could be left out."""
    folder = tmp_path / "checkpoints"
    tensors = {"x": torch.ones(3)}
    save(folder, 1, tensors, {"step": 1}, keep=1)
    before = shutil.copytree(folder, tmp_path / "before")
    operations: list[Operation] = []
    with recorded(operations), monkeypatch.context() as patch:
        if fault == "file":
            real = os.fsync
            patch.setattr(os, "fsync", lambda fd: real(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None)
        else:
            sync, skipped = (
                file_io.sync_folder,
                {"name": lambda path: path, "draft": lambda path: path.parent},
            )
            patch.setattr(file_io, "sync_folder", lambda path: skipped[fault](path) == folder or sync(path))
        save(folder, 2, {"x": torch.full((3,), 2.0)}, {"step": 2}, keep=1)
    shutil.rmtree(folder)
    before.rename(folder)
    results = cut_everywhere(folder, operations, tmp_path / "scratch")
    returned = {step for (count, _), step in results.items() if count == len(operations)}
    assert returned != {"2"}
