"""The lock on a run directory: dies with its holder, on one machine and on filesystems without locks."""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatfm.errors import LOCKED, LockedError, MegatfmError
from megatfm.tracking import run_lock
from megatfm.tracking.run_lock import RunLock
from tests.support.forked_commands import ForkedCommand

HOLD = """
import sys, time
from pathlib import Path
from megatfm.tracking.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
held.acquire()
print("held", flush=True)
time.sleep(60)
"""


def start_program(folder: Path, text: str) -> ForkedCommand:
    """Run a program, which is given the lock's path, in another process."""
    program = folder / "hold.py"
    program.write_text(text)
    return ForkedCommand([folder / "lock"], folder / "said", program=str(program))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ForkedCommand]:
    command = start_program(tmp_path, HOLD)
    command.wait_for_lines(command.output_path, 1)
    assert command.output == "held\n"
    yield command
    command.end()


def test_the_holder_is_named_and_its_death_frees_the_lock(tmp_path: Path, holder: ForkedCommand) -> None:
    with pytest.raises(LockedError, match=rf"\(process {holder.pid} on .*\): wait for it") as caught:
        RunLock(tmp_path / "lock").acquire()
    assert caught.value.exit_code == LOCKED == 77
    holder.end()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid, "left over"
    after = RunLock(tmp_path / "lock")
    after.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    after.release()
    assert (tmp_path / "lock").read_text() == ""


def test_a_process_can_not_take_the_lock_twice(tmp_path: Path) -> None:
    """A refusal does not lose the lock."""
    first = RunLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path / "lock").acquire()
    other = start_program(tmp_path, HOLD)
    assert other.wait() == 1
    assert "LockedError" in other.output
    first.release()
    first.release()
    second = RunLock(tmp_path / "lock")
    second.acquire()
    second.release()


def test_a_file_that_was_removed_before_it_was_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removes it while another opens it: a third would lock the new file, and both would train."""
    path, genuine = tmp_path / "lock", run_lock._try_lock
    attempts = []

    def try_lock(file: int) -> bool:
        if not attempts:
            path.unlink()
        attempts.append(file)
        return genuine(file)

    monkeypatch.setattr(run_lock, "_try_lock", try_lock)
    lock = RunLock(path)
    lock.acquire()
    assert len(attempts) == 2
    with pytest.raises(LockedError):
        RunLock(path).acquire()
    lock.release()


def test_reading_the_lock_file_does_not_release_the_lock(tmp_path: Path) -> None:
    """A notebook, a plugin or a hook that opens and closes it: POSIX record locks would be gone."""
    lock = RunLock(tmp_path / "lock")
    lock.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with (tmp_path / "lock").open("r+b"):
        pass
    other = start_program(tmp_path, HOLD)
    assert other.wait() == 1
    assert "LockedError" in other.output
    lock.release()


def test_a_forked_process_that_outlives_the_holder_does_not_hold_it(tmp_path: Path) -> None:
    code = HOLD.replace("time.sleep(60)", "import os\nif os.fork() == 0: time.sleep(9)")
    command = start_program(tmp_path, code + "\nos._exit(0)")
    assert command.wait() == 0
    after = RunLock(tmp_path / "lock")
    after.acquire()
    after.release()
    command.end()


@pytest.mark.usefixtures("hasty")
def test_an_error_of_the_file_server_does_not_end_the_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.utime, []

    def stale_at_first(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "stale file handle")
        real(file)

    lock = RunLock(tmp_path / "lock")
    monkeypatch.setattr(os, "utime", stale_at_first)
    lock.acquire()
    before = (tmp_path / "lock").stat().st_mtime_ns
    deadline = time.monotonic() + 20
    while (tmp_path / "lock").stat().st_mtime_ns == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(calls) > 1
    lock.release()


@pytest.mark.usefixtures("hasty")
def test_a_waiting_process_opens_the_lock_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS clients remember the times of a file that they have open: here a descriptor's time never moves again."""
    path, known = tmp_path / "lock", {}
    elsewhere(path)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: known.setdefault(file, real(file)))
    real_close = os.close

    def close(file: int) -> None:
        known.pop(file, None)
        real_close(file)

    monkeypatch.setattr(os, "close", close)

    with touched(path), pytest.raises(LockedError, match=r"process 1 on another-machine"):
        RunLock(path).acquire()


def test_the_wait_is_longer_than_nfs_remembers_a_time() -> None:
    assert run_lock.STALE_SECONDS > 60 + 2 * run_lock.HEARTBEAT_SECONDS


def test_a_fifo_in_its_place_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(MegatfmError, match=r"lock is not a regular file, so it can't be locked: remove it"):
        RunLock(tmp_path / "lock").acquire()


def test_a_planted_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(MegatfmError, match=r"lock is a symbolic link, .*: remove it"):
        RunLock(tmp_path / "lock").acquire()
    assert (tmp_path / "precious").read_text() == "precious"


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """Within, a file's time moves on, as that of a lock whose owner lives."""
    finished = threading.Event()

    def touch() -> None:
        while not finished.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def elsewhere(path: Path) -> None:
    """Write the lock of a process on another machine."""
    path.write_text(json.dumps({"host": "another-machine", "pid": 1, "job": "7", "time": 0}))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)


@pytest.mark.usefixtures("hasty")
def test_a_lock_file_that_moves_is_held_where_locks_do_not_reach(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    elsewhere(path)

    with touched(path), pytest.raises(LockedError, match=r"process 1 on another-machine, job 7"):
        RunLock(path).acquire()
    start = time.monotonic()
    lock = RunLock(path)
    lock.acquire()
    assert time.monotonic() - start >= 0.5, "its death was waited for"
    before = path.stat().st_mtime_ns
    time.sleep(0.4)
    assert path.stat().st_mtime_ns > before, "ours moves"
    lock.release()


@pytest.mark.usefixtures("hasty")
def test_a_living_process_holds_the_run_where_there_are_no_locks(
    tmp_path: Path, holder: ForkedCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(LockedError, match=f"process {holder.pid}"):
        RunLock(tmp_path / "lock").acquire()
    holder.end()
    lock = RunLock(tmp_path / "lock")
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', '{"host": "a", "pid": "x"}', "\x00" * 50])
def test_a_torn_file_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    lock = RunLock(tmp_path / "lock")
    lock.acquire()
    lock.release()
