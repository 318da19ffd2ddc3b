"""Records that launchers keep of a run: under several of them at once, and on a full disk."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatfm.errors import EXIT_FAILED, EXIT_REQUEUE, LockedError
from megatfm.files import NewPaths
from megatfm.launchers.attempts import RESTARTS, Attempt, AttemptLog
from megatfm.launchers.local import LocalLauncher
from megatfm.launchers.record import lock_launch_record, write_launch_record
from megatfm.launchers.run_jobs import describe_process
from megatfm.launchers.status import get_run_status
from tests.support.launch_jobs import FakeSlurm, full_disk, make_job, run_epilog, run_prolog


def test_attempts_of_launchers_that_write_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_wait(self: AttemptLog, read: Callable[[AttemptLog], Any] = AttemptLog._read) -> Any:
        attempts = read(self)
        time.sleep(0.01)  # another launcher's turn, if it could
        return attempts

    monkeypatch.setattr(AttemptLog, "_read", read_and_wait)
    with ThreadPoolExecutor(8) as pool:
        begun = list(pool.map(lambda n: AttemptLog(tmp_path).begin(Attempt(float(n), str(n), job=str(n))), range(8)))
        list(pool.map(lambda attempt: AttemptLog(tmp_path).end(replace(attempt, ended=9.0)), begun))
    attempts = AttemptLog(tmp_path).attempts
    assert sorted(attempt.job for attempt in attempts) == sorted(map(str, range(8)))
    assert all(attempt.ended == 9.0 for attempt in attempts)
    assert [path.name for path in tmp_path.iterdir()] == [RESTARTS]


def test_of_two_launchers_that_begin_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run, ended = tmp_path / "runs" / "quickstart", list[object]()

    def launch() -> None:
        try:
            ended.append(LocalLauncher().run(make_job(), lambda is_new: 0, NewPaths()))
        except LockedError as error:
            ended.append(error)

    run.mkdir(parents=True)
    second = threading.Thread(target=launch)
    with lock_launch_record(run):  # by the first one, which has not recorded itself yet
        second.start()
        second.join(0.5)
        write_launch_record(run, launcher="local", host=socket.gethostname(), **describe_process(psutil.Process()))
    second.join(60)
    (error,) = ended
    assert isinstance(error, LockedError)
    assert get_run_status(run).state.name == "RUNNING"


@pytest.mark.parametrize("code", [EXIT_REQUEUE, EXIT_FAILED])
def test_a_full_disk_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    """Neither the end of the attempt nor that of the launcher can be recorded, nor can stderr be written."""
    monkeypatch.chdir(tmp_path)

    with ExitStack() as stack:

        def run_ranks(is_new: bool) -> int:
            stack.enter_context(full_disk())
            return code

        assert LocalLauncher().run(make_job(), run_ranks, NewPaths()) == code


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_job_that_ends_on_a_full_disk_is_requeued(run: Path, fake_slurm: FakeSlurm, is_recorded: bool) -> None:
    run_prolog(run)
    if not is_recorded:
        (run / RESTARTS).unlink()
    with full_disk():
        assert run_epilog(run, 75, "--asked", "USR1") == 75
        assert fake_slurm.calls[-1] == "scontrol requeue 7"
        assert run_epilog(run, 1, limit=0) == 76, "what isn't recorded counts nevertheless"


def test_a_job_does_not_begin_on_a_full_disk(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its attempts could not be counted, so that it might be requeued without end."""
    with full_disk():
        assert run_prolog(run) == 1
        with redirect_stderr(sys.stdout):
            assert run_prolog(run) == 1
    reason = f"can't write {run / RESTARTS}: No space left on device: make room, and launch again"
    assert capsys.readouterr().out == f"megatfm job: error: {reason}\n"
