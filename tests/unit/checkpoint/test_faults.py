"""A save that fails, is killed or loses power at any disk operation leaves the old checkpoint or the new one."""

import errno
import os
import random
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.checkpoint import Saver, ShardedTensor, file_format, file_io, remove_leftovers, save
from megatfm.errors import MegatfmError
from tests.support.power_loss import (
    CHOICES,
    Disk,
    Operation,
    find_newest_intact_step,
    record_operations,
    replace_operations,
    write_tree,
)
from tests.support.workers import WorkerFailure, Workers

HOST = socket.gethostname()

Hook = Callable[[str, tuple[Any, ...]], None]


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Call `hook(operation, arguments)` before each operation of this process on the disk."""

    def wrap(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            hook(name, args)
            return genuine(*args, **kwargs)

        return operation

    with replace_operations(wrap):
        yield


def save_step(folder: Path, step: int, keep: int | None = 1) -> Path:
    """A checkpoint whose every value is its step, sharded over the ranks there are."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = ShardedTensor(torch.full((3, 4), float(step)), (3 * world, 4), (3 * rank, 0))
    tensors = {"rows": rows, "wide": ShardedTensor(torch.full((3, 4), step), (3 * world, 4), (3 * rank, 0))}
    return save(folder, step, tensors, {"step": step}, keep=keep)


def needs_space(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a full or a read-only disk may refuse this operation: all but reading and removing."""
    return bool(args[1] & os.O_CREAT) if name == "open" else name in ("mkdir", "write", "fsync", "rename")


def assert_old_or_new(folder: Path, steps: tuple[int, ...]) -> int:
    """Assert that the next start finds one of these steps, and return it."""
    step = find_newest_intact_step(folder)
    assert step in steps
    return step


def get_path(file: Any) -> Path:
    """The path of an operation's first argument: a path or a file descriptor."""
    return Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(file)


def fail_at(folder: Path, rank: int, number: int, code: int, lasting: bool) -> tuple[str, list[tuple[str, str]]]:
    """Save step 2 over step 1 while one rank's disk fails; returns the outcome, and each operation with its file.

    What a full or a read-only disk refuses would have gone past the page cache.
    """
    operations = []

    def hook(name: str, args: tuple[Any, ...]) -> None:
        operations.append((name, get_path(args[0]).name))
        is_later = lasting and len(operations) > number and needs_space(name, args)
        if dist.get_rank() == rank and (len(operations) == number or is_later):
            raise OSError(code, os.strerror(code))

    save_step(folder, 1)
    file_format.DIRECT_BYTES, before = file_format.DIRECT_BYTES if code == errno.EIO else 0, file_format.DIRECT_BYTES
    with hooked(hook):
        try:
            return str(save_step(folder, 2)), operations
        except MegatfmError as error:
            return str(error), operations
        finally:
            file_format.DIRECT_BYTES = before


def fail_at_each(folder: Path, rank: int, operations: int, code: int, lasting: bool) -> list[str]:
    """Outcomes of failures at the first, the second, …, the last operation."""
    return [fail_at(folder / str(number), rank, number, code, lasting)[0] for number in range(1, operations + 1)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, pytest.param(errno.EROFS, marks=pytest.mark.extended)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_disk_at_each_operation(workers: Workers, tmp_path: Path, code: int, rank: int) -> None:
    lasting = code != errno.EIO
    _, operations = workers.run(fail_at, 2, tmp_path / "unbroken", rank, -1, code, False)[rank]
    assert len(operations) > 4
    harmless = set()
    if rank == 0:
        commit = operations.index(("fsync", "unbroken"))
        harmless = set(range(commit + 1, len(operations)))
        if not lasting:  # asks for the size that it sees of another rank's file, and asks again
            harmless.add(operations.index(("open", "rank-00001-000.safetensors")))
    count = len(operations)
    outcomes, other_outcomes = workers.run(fail_at_each, 2, tmp_path, rank, count, code, lasting, timeout=200)
    assert outcomes == other_outcomes
    assert {index for index, outcome in enumerate(outcomes) if outcome.startswith("/")} == harmless
    for number, outcome in enumerate(outcomes, 1):
        folder = tmp_path / str(number)
        if outcome.startswith("/"):
            assert_old_or_new(folder, (2,))
            continue
        assert outcome.startswith(f"checkpoint of step 2 not saved: rank {rank} on {HOST}: can't ")
        assert outcome.endswith(f": {os.strerror(code)}")
        step = assert_old_or_new(folder, (1, 2))
        expected = {1: ["step-00000001"], 2: ["step-00000001", "step-00000002"]}[step]
        assert sorted(path.name for path in folder.iterdir()) == expected


def die_at(folder: Path, rank: int, number: int) -> int:
    """Save step 2 over step 1, and SIGKILL one rank just before it changes the disk, or after half of a write.

    Where the rank lives on, return how many changes it made. (What was not synced survives a kill.)
    """
    save_step(folder, 1)
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += name in ("unlink", "rmdir") or (name != "fsync" and needs_space(name, args))
        if dist.get_rank() == rank and seen == number:
            if name == "write":
                with open(args[0], "wb", closefd=False, buffering=0) as file:
                    file.write(args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    with hooked(hook):
        save_step(folder, 2)
    return seen


def test_a_killed_rank_leaves_the_old_or_the_new_one(workers: Workers, tmp_path: Path) -> None:
    draw = random.Random(20)
    actual = []
    for world, rank, share in ((1, 0, 1.0), (2, 0, 0.25), (2, 1, 0.5)):
        changes = workers.run(die_at, world, tmp_path / f"{world}-{rank}", rank, -1)[rank]
        for number in draw.sample(range(1, changes + 1), round(share * changes)):
            folder = tmp_path / f"{world}-{rank}-{number}"
            with pytest.raises(WorkerFailure, match=f"(?s)rank {rank} .*killed by SIGKILL") as failure:
                workers.run(die_at, world, folder, rank, number)
            if rank == 1:  # rank 0 always waits for it
                lost = "MegatfmError: checkpoint of step 2 not saved: the ranks lost each other"
                assert lost in str(failure.value)
            step = assert_old_or_new(folder, (1, 2))
            actual.append(step)
            remove_leftovers(folder)
            assert {path.name for path in folder.iterdir()} <= {"step-00000001", "step-00000002"}
            assert_old_or_new(folder, (step,))
    assert {1, 2} == set(actual)


def test_nothing_gets_its_name_before_it_is_on_the_disk(tmp_path: Path) -> None:
    trace: list[tuple[str, str]] = []

    def hook(name: str, args: tuple[Any, ...]) -> None:
        trace.append((name, str(get_path(args[0]))))

    with hooked(hook):
        path = save_step(tmp_path / "run" / "checkpoints", 1)
    renames = [number for number, (name, _) in enumerate(trace) if name == "rename"]
    assert len(renames) == 1
    partial = trace[renames[0]][1]
    before, after = trace[: renames[0]], trace[renames[0] + 1 :]
    names = {file.name for file in path.iterdir()}
    assert names == {"metadata.json", "rank-00000-000.safetensors"}
    for name in names:
        operations = [operation for operation, where in before if where == f"{partial}/{name}"]
        assert operations[0] == "open"
        assert "write" in operations
        assert operations[-1] == "fsync"
    created = max(n for n, (name, where) in enumerate(before) if name == "open" and where.startswith(f"{partial}/"))
    assert ("fsync", partial) in before[created:]
    assert ("fsync", str(tmp_path / "run" / "checkpoints")) in after
    assert {("fsync", str(tmp_path)), ("fsync", str(tmp_path / "run"))} <= set(before)


def test_an_unexpected_error_reaches_every_rank(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(break_a_tensor, 2, tmp_path)
    assert first == second
    assert first.startswith(f"checkpoint of step 1 not saved: rank 1 on {HOST}: ")
    assert "\n" not in first
    assert list(tmp_path.iterdir()) == []


def break_a_tensor(folder: Path) -> str:
    tensor = torch.zeros(2)
    if dist.get_rank() == 1:
        tensor.untyped_storage().resize_(0)  # as FSDP frees a parameter that it gathered
    try:
        save(folder, 1, {"x": ShardedTensor(tensor, (4,), (2 * dist.get_rank(),))}, {})
    except MegatfmError as error:
        return str(error)
    return "saved"


# ------------------------------------------------------------------------------------------------- power loss


DRAWS = 6
"""Random subsets of unsynced operations, for each prefix, besides the four extremes."""


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
        with record_operations(operations):
            assert saved(folder, 2) is not None
    finally:
        file_format.DIRECT_BYTES = before
    return operations


def cut_everywhere(folder: Path, operations: list[Operation], scratch: Path) -> dict[tuple[int, str], str]:
    """(operations before the cut, what was lost) → step found, or what the reader says."""
    lossy, draw, steps, results = Disk(folder, operations), random.Random(7), dict[int, str](), {}
    for count in range(len(operations) + 1):
        for number, choice in enumerate((*CHOICES, *["some"] * DRAWS)):
            tree = lossy.tree_after_power_cut(count, choice, draw)
            key = hash(frozenset(tree.items()))
            if key not in steps:
                write_tree(tree, scratch)
                try:
                    steps[key] = str(find_newest_intact_step(scratch))
                except (MegatfmError, AssertionError) as error:
                    steps[key] = f"{type(error).__name__}: {error}"
                shutil.rmtree(scratch)
            results[count, f"{choice} {number}"] = steps[key]
    return results


@pytest.mark.parametrize(("world", "direct"), [(1, False), (2, False), (2, True)])
def test_a_power_cut_leaves_the_old_or_the_new_one(workers: Workers, tmp_path: Path, world: int, direct: bool) -> None:
    folder = tmp_path / "checkpoints"
    workers.run(saved, world, folder, 1)
    before = shutil.copytree(folder, tmp_path / "before")
    operations = [operation for rank in workers.run(recorded_save, world, folder, direct) for operation in rank]
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
    with record_operations(operations), monkeypatch.context() as patch:
        if fault == "file":
            real = os.fsync
            patch.setattr(os, "fsync", lambda fd: real(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None)
        else:
            sync, skipped = file_io.sync_folder, {"name": lambda path: path, "draft": lambda path: path.parent}
            patch.setattr(file_io, "sync_folder", lambda path: skipped[fault](path) == folder or sync(path))
        save(folder, 2, {"x": torch.full((3,), 2.0)}, {"step": 2}, keep=1)
    shutil.rmtree(folder)
    before.rename(folder)
    results = cut_everywhere(folder, operations, tmp_path / "scratch")
    returned = {step for (count, _), step in results.items() if count == len(operations)}
    assert returned != {"2"}
