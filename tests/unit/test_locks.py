"""Locks of paths: one process at a time, by a file that is removed at the end."""

import errno
import fcntl
import time
from pathlib import Path

import pytest

from megatfm.files import lock_path
from tests.support.workers import start_fork_server


def count_up(path: Path, times: int) -> None:
    for _ in range(times):
        with lock_path(path):
            count = int(path.read_text())
            time.sleep(0.001)  # another one's turn, if it could
            path.write_text(str(count + 1))


def test_one_process_at_a_time_has_the_lock_of_a_path(tmp_path: Path) -> None:
    path, context = tmp_path / "count", start_fork_server()
    path.write_text("0")
    processes = [context.Process(target=count_up, args=(path, 25)) for _ in range(2)]
    for process in processes:
        process.start()
    count_up(path, 25)
    for process in processes:
        process.join()
    assert path.read_text() == "75"
    assert [file.name for file in tmp_path.iterdir()] == ["count"]


def test_a_lock_that_can_not_be_had_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds it and was stopped, its file is a link, or the file system has no locks."""
    entered = []
    with lock_path(tmp_path / "a"), lock_path(tmp_path / "a", timeout=0.0):
        entered.append("held")
        assert (tmp_path / ".a.lock").exists()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".a.lock").symlink_to(tmp_path / "precious")
    with lock_path(tmp_path / "a"), lock_path(tmp_path / "nowhere" / "a"):
        entered.append("a link")
    assert (tmp_path / "precious").read_text() == "precious"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_path(tmp_path / "b"):
        entered.append("no locks")
    assert entered == ["held", "a link", "no locks"]
