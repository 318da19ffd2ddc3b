"""Small files are there whole or not at all, and on the disk when the call returns."""

import errno
import multiprocessing
import os
import secrets
import stat
from pathlib import Path

import pytest

from megatfm.checkpoint import file_io
from megatfm.files import atomic_write, temporary_path


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    for content, expected in (("ä", "ä".encode()), (b"\0", b"\0")):
        atomic_write(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    atomic_write(tmp_path / "a", "old")

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fails)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(tmp_path / "a", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_file_and_name_are_forced_to_the_disk_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[bool](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        assert (tmp_path / "a").exists() == synced[-1]
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    atomic_write(tmp_path / "a", "new")
    assert synced == [False, True]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_can_not_sync_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sync = os.fsync

    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)
    atomic_write(tmp_path / "a", "new")
    file_io.sync_folder(tmp_path)
    assert (tmp_path / "a").read_text() == "new"


def test_no_two_drafts_have_one_name(tmp_path: Path) -> None:
    """Two containers may have the same host name, and in them two processes the same number."""
    assert len({temporary_path(tmp_path / "a") for _ in range(20)}) == 20


def test_a_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 8)
    (tmp_path / "precious").write_text("precious")
    for place in (temporary_path(tmp_path / "a"), tmp_path / "a"):
        place.symlink_to(tmp_path / "precious")
        atomic_write(tmp_path / "a", "new")
        assert (tmp_path / "precious").read_text() == "precious"
        assert (tmp_path / "a").read_text() == "new"
        (tmp_path / "a").unlink()


def write_often(path: Path, letter: str) -> None:
    for _ in range(50):
        atomic_write(path, letter * 1000)


def test_several_processes_may_write_the_same_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(tmp_path / "a", letter)) for letter in "xyz"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert (tmp_path / "a").read_text() in {letter * 1000 for letter in "xyz"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
