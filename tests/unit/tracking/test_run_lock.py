"""Locks of paths and of run directories: they end with their holder, also on file systems without locks."""

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatfm.errors import LOCKED, LockedError, MegatfmError
from megatfm.files import lock_path
from megatfm.tracking import run_lock
from megatfm.tracking.run_lock import RunLock
from tests.support.forked_commands import ForkedCommand, wait_until
from tests.support.workers import start_fork_server

HOLD_PROGRAM = """
import sys, time
from pathlib import Path
from megatfm.tracking.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
held.acquire()
print("held", flush=True)
time.sleep(60)
"""


def take_and_release(path: Path) -> None:
    lock = RunLock(path)
    lock.acquire()
    lock.release()


def start_program(folder: Path, text: str) -> ForkedCommand:
    """Run a program, which is given the lock's path, in another process."""
    program = folder / "hold.py"
    program.write_text(text)
    return ForkedCommand([folder / "lock"], folder / "output", program=str(program))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ForkedCommand]:
    command = start_program(tmp_path, HOLD_PROGRAM)
    command.wait_for_lines(command.output_path, 1)
    assert command.output == "held\n"
    yield command
    command.end()


def test_a_held_lock_names_its_holder_and_ends_with_it(tmp_path: Path, holder: ForkedCommand) -> None:
    with pytest.raises(LockedError, match=rf"\(process {holder.pid} on .*\): wait for it") as caught:
        RunLock(tmp_path / "lock").acquire()
    assert caught.value.exit_code == LOCKED == 77
    holder.end()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid, "left over"
    next_lock = RunLock(tmp_path / "lock")
    next_lock.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    next_lock.release()
    assert (tmp_path / "lock").read_text() == ""


def test_a_process_cannot_take_the_lock_twice(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path / "lock").acquire()
    command = start_program(tmp_path, HOLD_PROGRAM)
    assert command.wait() == 1
    assert "LockedError" in command.output
    first.release()
    first.release()
    take_and_release(tmp_path / "lock")


def test_a_lock_file_removed_before_locking_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder removes it while another opens it: a third would lock the new file, and both would train."""
    path, genuine = tmp_path / "lock", run_lock._try_lock
    attempts = []

    def try_lock(file: int, holder: Mapping[str, Any]) -> bool:
        if not attempts:
            path.unlink()
        attempts.append(file)
        return genuine(file, holder)

    monkeypatch.setattr(run_lock, "_try_lock", try_lock)
    held = RunLock(path)
    held.acquire()
    assert len(attempts) == 2
    with pytest.raises(LockedError):
        RunLock(path).acquire()
    held.release()


def test_reading_the_lock_file_does_not_release_the_lock(tmp_path: Path) -> None:
    """A POSIX record lock would be released when any descriptor of the file is closed."""
    held = RunLock(tmp_path / "lock")
    held.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with (tmp_path / "lock").open("r+b"):
        pass
    command = start_program(tmp_path, HOLD_PROGRAM)
    assert command.wait() == 1
    assert "LockedError" in command.output
    held.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = HOLD_PROGRAM.replace("time.sleep(60)", "import os\nif os.fork() == 0: time.sleep(9)")
    command = start_program(tmp_path, code + "\nos._exit(0)")
    assert command.wait() == 0
    take_and_release(tmp_path / "lock")
    command.end()


@pytest.mark.usefixtures("short_waits")
def test_heartbeats_continue_after_an_error_of_the_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.utime, []

    def stale_at_first(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "stale file handle")
        real(file)

    held = RunLock(tmp_path / "lock")
    monkeypatch.setattr(os, "utime", stale_at_first)
    held.acquire()
    before = (tmp_path / "lock").stat().st_mtime_ns
    wait_until(lambda: (tmp_path / "lock").stat().st_mtime_ns > before)
    assert len(calls) > 1
    held.release()


@pytest.mark.usefixtures("short_waits")
def test_a_waiting_process_reopens_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS clients remember the times of a file that they have open: here a descriptor's time never moves again."""
    path, known = tmp_path / "lock", {}
    write_foreign_lock(path)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: known.setdefault(file, real(file)))
    real_close = os.close

    def close(file: int) -> None:
        known.pop(file, None)
        real_close(file)

    monkeypatch.setattr(os, "close", close)

    with keep_touching(path), pytest.raises(LockedError, match=r"process 1 on another-machine"):
        RunLock(path).acquire()


def test_the_wait_is_longer_than_nfs_caches_times() -> None:
    assert run_lock.STALE_SECONDS > 60 + 2 * run_lock.HEARTBEAT_SECONDS


def test_a_fifo_or_a_symbolic_link_as_lock_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(MegatfmError, match=r"lock is not a regular file, so it can't be locked: remove it"):
        RunLock(tmp_path / "lock").acquire()
    (tmp_path / "lock").unlink()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(MegatfmError, match=r"lock is a symbolic link, .*: remove it"):
        RunLock(tmp_path / "lock").acquire()
    assert (tmp_path / "precious").read_text() == "precious"


@contextmanager
def keep_touching(path: Path) -> Iterator[None]:
    """Context manager in which a file's mtime advances whenever a process has waited, as if the lock's holder lived."""

    def touch() -> None:
        modified = path.stat().st_mtime_ns + 10**9
        os.utime(path, ns=(modified, modified))

    with patch.object(run_lock, "note_progress", touch):
        yield


def write_foreign_lock(path: Path) -> None:
    """Write the lock of a process on another machine."""
    path.write_text(json.dumps({"host": "another-machine", "pid": 1, "job": "7", "time": 0}))


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)


@pytest.mark.usefixtures("short_waits")
def test_a_lock_of_another_machine_is_held_while_its_time_advances(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write_foreign_lock(path)

    with keep_touching(path), pytest.raises(LockedError, match=r"process 1 on another-machine, job 7"):
        RunLock(path).acquire()
    start = time.monotonic()
    lock = RunLock(path)
    lock.acquire()
    assert time.monotonic() - start >= 0.5, "waited for a heartbeat"
    before = path.stat().st_mtime_ns
    wait_until(lambda: path.stat().st_mtime_ns > before)  # this lock has a heartbeat
    lock.release()


@pytest.mark.usefixtures("short_waits")
def test_a_lock_that_its_holder_releases_during_the_wait_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release changes the file's time, as a heartbeat does."""
    path, read_mtime = tmp_path / "lock", run_lock._read_mtime
    write_foreign_lock(path)

    def release_and_read(lock: Path) -> int | None:
        mtime = read_mtime(lock)
        os.truncate(path, 0)
        return mtime

    monkeypatch.setattr(run_lock, "_read_mtime", release_and_read)
    take_and_release(path)


def test_the_lock_of_a_copied_run_is_not_waited_for(tmp_path: Path) -> None:
    """Its holder trains in another folder; one that was moved may be in use from another machine."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    for folder in (run, copy):
        folder.mkdir()
        (folder / "lock").write_text(json.dumps({"host": "another-machine", "pid": 1, "time": 0, "run": str(run)}))
    lock = RunLock(copy / "lock")
    with keep_touching(copy / "lock"):
        lock.acquire()
    assert json.loads((copy / "lock").read_text())["run"] == str(copy)
    lock.release()
    run.rename(tmp_path / "moved")
    with keep_touching(tmp_path / "moved/lock"), pytest.raises(LockedError, match="another-machine"):
        RunLock(tmp_path / "moved/lock").acquire()


@pytest.mark.usefixtures("short_waits")
def test_a_live_process_holds_the_lock_without_kernel_locks(
    tmp_path: Path, holder: ForkedCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LockedError, match=f"process {holder.pid}"):
        RunLock(tmp_path / "lock").acquire()
    holder.end()
    take_and_release(tmp_path / "lock")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', '{"host": "a", "pid": "x"}', "\x00" * 50])
def test_a_damaged_lock_file_has_no_holder(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    take_and_release(tmp_path / "lock")


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


@pytest.mark.usefixtures("short_waits")
def test_a_job_waits_for_the_processes_of_a_job_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next job of a chain starts when a node is lost, while the other ranks of the last job save."""
    path = tmp_path / "lock"
    monkeypatch.setenv("SLURM_JOB_ID", "14")
    last_job = RunLock(path)
    last_job.acquire()
    monkeypatch.setenv("SLURM_JOB_ID", "15")
    timer = threading.Timer(1.0, last_job.release)
    timer.start()
    take_and_release(path)
    timer.join()
    assert re.search(r"another process is training .*, job 14\): .* Waiting up to \d+ s", caplog.text)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("refusals", "job"), [(1, None), (1, "15"), (1000, None), (1000, "15")])
def test_a_lock_whose_holder_is_about_to_let_it_go_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, job: str | None
) -> None:
    """The holder empties the file, then closes it, and another writes its name after it has the lock."""
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    genuine, answers = run_lock._try_lock, iter([False] * refusals)
    monkeypatch.setattr(run_lock, "_try_lock", lambda *words: next(answers, True) and genuine(*words))
    if refusals == 1:
        take_and_release(tmp_path / "lock")
    else:
        with pytest.raises(LockedError):
            RunLock(tmp_path / "lock").acquire()


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("holder_job", "job", "waits"), [("14", "15", True), ("14", None, False), (None, "15", False)])
def test_a_lock_that_is_kept_is_refused_after_the_wait_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder_job: str | None, job: str | None, waits: bool
) -> None:
    monkeypatch.setattr(run_lock, "HANDOVER_SECONDS", 1.0)
    genuine, tried = run_lock._try_lock, list[int]()
    monkeypatch.setattr(run_lock, "_try_lock", lambda *words: tried.append(words[0]) or genuine(*words))

    def set_job(number: str | None) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", number) if number else monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    set_job(holder_job)
    held = RunLock(tmp_path / "lock")
    held.acquire()
    set_job(job)
    with pytest.raises(LockedError, match="wait for it"):
        RunLock(tmp_path / "lock").acquire()
    assert (len(tried) > 2) == waits, "the holder tries once"
    held.release()
