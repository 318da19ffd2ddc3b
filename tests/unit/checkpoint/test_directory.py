"""Which checkpoint is the newest, which may go, and what is swept up; also where a shared disk shows files late."""

import errno
import logging
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.checkpoint import (
    ShardedTensor,
    check_all_bytes,
    file_format,
    file_io,
    find_checkpoint,
    find_latest,
    find_latest_intact,
    load,
    metadata,
    remove_leftovers,
    save,
    write_checkpoint_from_iterator,
)
from megatfm.checkpoint.directory import list_checkpoints, purge_old_checkpoints
from megatfm.errors import MegatfmError, UsageError
from tests.support.files import edit_metadata, read_metadata, write_metadata
from tests.support.workers import Workers


def save_step(folder: Path, step: int, keep: int | None = None) -> Path:
    return save(folder, step, {"x": torch.full((4,), float(step))}, {"step": step}, keep=keep)


def steps(folder: Path) -> list[int]:
    """The steps that are there; nothing else may be."""
    names = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") for name in names)
    return [int(name[5:]) for name in names]


def damage(path: Path) -> None:
    (path / "rank-00000-000.safetensors").unlink()


def test_latest_is_the_highest_step_in_any_order(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None
    numbers = [1, 99_999_999, 100_000_000, 20, 3]
    random.Random(0).shuffle(numbers)
    for step in numbers:
        save_step(tmp_path, step)
    for name in (".step-20000000.partial-0123abcd", "step-2", "step-20000000.bak", "step-2000000x"):
        (tmp_path / name).mkdir()
    assert find_latest(tmp_path) == tmp_path / "step-100000000", "other names are no checkpoints"
    assert [path.name for path in list_checkpoints(tmp_path)][:2] == ["step-00000001", "step-00000003"]


def test_save_keeps_the_newest_steps(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_step(tmp_path, step, keep=2)
    assert steps(tmp_path) == [4, 5]
    save_step(tmp_path, 6)
    save_step(tmp_path, 7, keep=3)
    assert steps(tmp_path) == [5, 6, 7]
    save_step(tmp_path, 8, keep=1)
    assert steps(tmp_path) == [8]


def test_a_damaged_one_is_not_counted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    damage(tmp_path / "step-00000004")
    save_step(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [3, 4, 5]
    check_all_bytes(tmp_path / "step-00000003")


def test_later_checkpoints_neither_go_nor_count(tmp_path: Path) -> None:
    for step in (1, 2, 8, 9):
        save_step(tmp_path, step)
    save_step(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3, 8, 9]


def test_an_old_checkpoint_that_can_not_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise MegatfmError(f"can't remove {path}: Permission denied")

    save_step(tmp_path, 1)
    monkeypatch.setattr(file_io, "remove_tree", refuse)
    path = save_step(tmp_path, 2, keep=1)
    assert find_latest(tmp_path) == path
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("an old checkpoint could not be removed: can't remove ")


def test_clean_removes_leftovers_only(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    leftovers = [tmp_path / f".step-00000002.{kind}-0123abcd" for kind in ("partial", "removed")]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "rank-00000-000.safetensors").touch()
    (leftovers[0] / "link").symlink_to(outside)
    remaining = [tmp_path / name for name in (".step-00000002.damaged-0123abcd", ".step-2", "notes.txt")]
    for other in remaining:
        other.mkdir()
    assert remove_leftovers(tmp_path) == leftovers
    assert sorted(tmp_path.iterdir()) == sorted([path, outside, *remaining])
    assert (outside / "file").exists()
    assert remove_leftovers(tmp_path) == []
    assert remove_leftovers(tmp_path / "absent") == []


def test_leftovers_that_can_not_be_removed_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = (tmp_path / f".step-00000002.partial-{letter * 8}" for letter in "ab")
    for leftover in (stuck, other):
        leftover.mkdir()
    genuine = file_io.remove_tree

    def refuse(path: Path) -> None:
        if path == stuck:
            raise MegatfmError(f"can't remove {path}: Permission denied")
        genuine(path)

    monkeypatch.setattr(file_io, "remove_tree", refuse)
    assert remove_leftovers(tmp_path) == [other]
    (message,) = caplog.messages
    assert message == f"a leftover of a killed save could not be removed: can't remove {stuck}: Permission denied"


def test_a_leftover_that_can_not_be_removed_does_not_hide_why_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise MegatfmError(f"can't remove {path}: Permission denied")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError("no tensors")
        yield

    monkeypatch.setattr(file_io, "remove_tree", refuse)
    with pytest.raises(RuntimeError, match="no tensors") as caught:
        write_checkpoint_from_iterator(tmp_path, 1, broken(), {})
    (note,) = caught.value.__notes__
    assert re.fullmatch(r".*\.step-00000001\.partial-.* is left over: can't remove .*: Permission denied", note)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for use in (find_latest, remove_leftovers):
        with pytest.raises(MegatfmError, match=r"can't list .*file: Not a directory"):
            use(file)
    with pytest.raises(MegatfmError, match=r"not saved: can't create .*file: File exists"):
        save_step(file, 1)


def look_together(folder: Path) -> tuple[str | None, list[str]]:
    read = file_format.read_safetensors
    files: list[str] = []
    file_format.read_safetensors = lambda file, *remaining: (
        files.append(f"{file.parent.name}/{file.name}") or read(file, *remaining)
    )
    try:
        path = find_latest_intact(folder)
    except MegatfmError as error:
        return str(error), files
    finally:
        file_format.read_safetensors = read
    return path.name if path else None, files


def save_on_two(folder: Path, step: int) -> None:
    rank = dist.get_rank()
    save(folder, step, {"x": ShardedTensor(torch.full((2,), step), (4,), (2 * rank,))}, {})


def test_the_ranks_share_the_reading(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(look_together, 2, tmp_path / "absent") == [(None, [])] * 2
    for step in (1, 2):
        workers.run(save_on_two, 2, tmp_path, step)
    names = [f"rank-0000{rank}-000.safetensors" for rank in range(2)]
    results = workers.run(look_together, 2, tmp_path)
    assert results == [("step-00000002", [f"step-00000002/{name}"]) for name in names]
    (file,) = (tmp_path / "step-00000002").glob(names[1])
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    results = workers.run(look_together, 2, tmp_path)
    assert [name for name, _ in results] == ["step-00000001"] * 2
    (tmp_path / "step-00000001" / names[0]).unlink()
    (first, _), (second, _) = workers.run(look_together, 2, tmp_path)
    assert first == second
    assert "none of its 2 checkpoints is intact" in str(first)


def test_a_damaged_checkpoint_is_removed_once_a_later_one_is_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_step(tmp_path, 5)
    damage(path)
    save_step(tmp_path, 5)
    (aside,) = tmp_path.glob(".step-00000005.damaged-*")
    remove_leftovers(tmp_path)
    assert f"{aside} is a damaged checkpoint, kept until a later one is verified" in caplog.text
    newest = save_step(tmp_path, 6)
    for verified in (None, save_step(tmp_path, 4)):
        purge_old_checkpoints(newest, 9, verified=verified)
        assert aside.exists()
    purge_old_checkpoints(newest, 9, verified=newest)
    assert not list(tmp_path.glob(".*"))
    assert steps(tmp_path) == [4, 5, 6]


def rewrite_as_newer(path: Path) -> None:
    """Rewrite a checkpoint as a later version would."""
    edit_metadata(path, lambda body: body.update(schema_version=3, state=body["state"] | {"megatfm": "9.1.0"}))


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    for step in (3, 5):
        save_step(tmp_path, step)
    rewrite_as_newer(tmp_path / "step-00000005")
    reason = r"written by a newer megatfm \(9\.1\.0, schema version 3\); this is .*, which reads 1 to 2: use"
    for use in (find_latest, find_latest_intact, lambda folder: save_step(folder, 5)):
        with pytest.raises(MegatfmError, match=reason):
            use(tmp_path)
    assert steps(tmp_path) == [3, 5]


def test_quotes_of_damaged_metadata_are_short(tmp_path: Path) -> None:
    path, other = save_step(tmp_path, 3), tmp_path / "other"
    other.mkdir()
    for key, value in (("x" * 10**6, 1), ("step", "y" * 10**6), ("schema_version", "z" * 10**6)):
        write_metadata(other, read_metadata(path) | {key: value})
        with pytest.raises(MegatfmError) as caught:
            metadata.read_metadata(other)
        assert len(str(caught.value)) < 1000


LAG = 0.3
LOOKS = ("stat", "lstat", "open", "listdir", "scandir")


@contextmanager
def lagging(root: Path) -> Iterator[None]:
    """Files that others write under `root` become visible to this process only a while after its first look."""
    local_paths: set[str] = set()
    first: dict[str, float] = {}
    real = {name: getattr(os, name) for name in (*LOOKS, "mkdir", "rename")}

    def hidden(path: str) -> bool:
        names = [name for name in (path, *map(str, Path(path).parents)) if name.startswith(f"{root}/")]
        return any(
            name not in local_paths and time.monotonic() - first.setdefault(name, time.monotonic()) < LAG
            for name in names
            if os.path.basename(name)  # noqa: PTH119
        )

    def look(name: str) -> Any:
        def operation(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            text = os.fspath(path) if not isinstance(path, int) else ""
            makes = name == "open" and args and args[0] & os.O_CREAT
            if text.startswith(f"{root}/") and hidden(str(Path(text).parent) if makes else text):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            if makes:
                local_paths.add(text)
            return real[name](path, *args, **kwargs)

        return operation

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        real["mkdir"](path, *args, **kwargs)
        local_paths.add(os.fspath(path))

    def rename(old: Any, new: Any) -> None:
        real["rename"](old, new)
        local_paths.add(os.fspath(new))
        local_paths.update(f"{new}{path[len(str(old)) :]}" for path in list(local_paths) if path.startswith(f"{old}/"))

    for name in LOOKS:
        setattr(os, name, look(name))
    os.mkdir, os.rename = mkdir, rename
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def save_and_load(folder: Path, patience: float) -> tuple[str, list[float]]:
    file_io.NFS_VISIBILITY_SECONDS = patience
    rank = dist.get_rank()
    try:
        with lagging(folder):
            rows = ShardedTensor(torch.full((2, 2), float(rank)), (4, 2), (2 * rank, 0))
            path = save(folder, 1, {"rows": rows}, {"step": 1})
            other = ShardedTensor(torch.full((2, 2), 9.0), (4, 2), (2 - 2 * rank, 0))
            assert load(path, {"rows": other}) == {"step": 1}
            return path.name, other.tensor.flatten().tolist()
    except MegatfmError as error:
        return str(error), []
    finally:
        file_io.NFS_VISIBILITY_SECONDS = 10.0


def test_a_file_that_is_visible_late_is_waited_for(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(save_and_load, 2, tmp_path, 10.0) == [("step-00000001", [1.0] * 4), ("step-00000001", [0.0] * 4)]
    assert find_latest(tmp_path, hashes=True) == tmp_path / "step-00000001"


def test_the_wait_for_a_late_file_ends(workers: Workers, tmp_path: Path) -> None:
    (output, _), (other, _) = workers.run(save_and_load, 2, tmp_path, 0.0)
    assert output == other
    assert "No such file or directory" in output


@pytest.mark.parametrize("patience", [0.0, 0.2])
def test_a_missing_name(tmp_path: Path, patience: float) -> None:
    start = time.monotonic()
    file_io.wait_until_visible(tmp_path / "absent", start + patience)
    assert patience <= time.monotonic() - start < patience + 20
    file_io.wait_until_size(tmp_path, 1, start + patience)


def test_a_damaged_adapter_is_refused_as_one_without_a_base(tmp_path: Path) -> None:
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        (tmp_path / "adapter_config.json").write_bytes(content)
        with pytest.raises(UsageError, match="holds an adapter in PEFT's format, and not its model: join them"):
            find_checkpoint(tmp_path)


def test_retention_counts_checkpoints_of_a_later_version(tmp_path: Path) -> None:
    """Retention used to stop at the first of them, so that older ones were never removed."""
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    rewrite_as_newer(tmp_path / "step-00000002")
    purge_old_checkpoints(tmp_path / "step-00000003", 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    purge_old_checkpoints(tmp_path / "step-00000004", 1)  # removed by someone else in the meantime
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]
