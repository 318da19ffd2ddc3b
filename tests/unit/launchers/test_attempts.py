"""Attempts and records of a run: when it starts again, which hosts its log blames, under several launchers at once."""

import json
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

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, LockedError
from megatfm.files import NewPaths
from megatfm.launchers.attempts import MAX_STOPS_WITHOUT_PROGRESS, RESTARTS, Attempt, AttemptLog
from megatfm.launchers.local import LocalLauncher
from megatfm.launchers.prolog_epilog import find_failure_cause
from megatfm.launchers.record import EVENTS, lock_launch_record, tail_jsonl, write_launch_record
from megatfm.launchers.run_jobs import describe_process
from megatfm.launchers.status import get_run_status
from megatfm.tracking.metrics import log_event
from tests.support.launch_jobs import (
    FakeSlurm,
    finish_run,
    full_disk,
    make_job,
    run_epilog,
    run_prolog,
    write_chain,
    write_event,
    write_log,
)

Commit = Callable[[int], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def record_attempt(folder: Path, code: int | None, *, submission: str = "7", **outcome: Any) -> None:
    """Begin and end an attempt as prolog and epilog do, each of which reads the file anew."""
    now = 100.0 + len(AttemptLog(folder).attempts)
    begun = AttemptLog(folder).begin(Attempt(now, submission, job=submission))
    AttemptLog(folder).end(replace(begun, ended=now, code=code, reason=f"exit code {code}", **outcome))


def test_failures_without_a_new_checkpoint_are_bounded(folder: Path) -> None:
    for failures in range(1, 4):
        record_attempt(folder, EXIT_FAILED)
        assert AttemptLog(folder).count_without_progress("7") == (failures, 0)
        assert AttemptLog(folder).explain_restart_limit("7", max_restarts=3) is None
        if failures == 1:
            assert (AttemptLog(folder).explain_restart_limit("7", 0) or "").startswith("it failed without")
    record_attempt(folder, 137)
    reason = "4 attempts in a row failed without a new checkpoint after step 0; the last: exit code 137"
    assert AttemptLog(folder).explain_restart_limit("7", 3) == reason
    assert AttemptLog(folder).explain_restart_limit("7", 4) is None
    assert AttemptLog(folder).explain_restart_limit("8", 3) is None, "another submission counts anew"


def test_a_new_checkpoint_starts_the_count_afresh(folder: Path, checkpoint: Commit) -> None:
    for _ in range(3):
        record_attempt(folder, EXIT_FAILED)
    begun = AttemptLog(folder).begin(Attempt(200.0, "7"))
    checkpoint(40)
    ended = AttemptLog(folder).end(replace(begun, ended=201.0, code=EXIT_FAILED))
    assert (ended.first_step, ended.step, ended.made_progress) == (0, 40, True)
    assert AttemptLog(folder).count_without_progress("7") == (0, 0)
    record_attempt(folder, EXIT_FAILED)
    assert AttemptLog(folder).count_without_progress("7") == (1, 0), "an earlier attempt's checkpoint is no progress"


def test_stops_are_no_failures_but_not_endless_either(folder: Path) -> None:
    for _ in range(MAX_STOPS_WITHOUT_PROGRESS):
        record_attempt(folder, EXIT_REQUEUE)
    record_attempt(folder, EXIT_FAILED, asked=True)  # say, a rank that was killed while it saved
    assert AttemptLog(folder).count_without_progress("7") == (0, MAX_STOPS_WITHOUT_PROGRESS + 1)
    reason = AttemptLog(folder).explain_restart_limit("7", 0)
    assert "11 attempts in a row were stopped without a new checkpoint" in (reason or "")


def test_an_attempt_that_was_lost_is_a_failure_and_one_that_runs_is_none(folder: Path) -> None:
    begun = AttemptLog(folder).begin(Attempt(100.0, "7", job="7"))
    assert AttemptLog(folder).count_without_progress("7") == (0, 0)
    assert AttemptLog(folder).find_unfinished_attempt("7") == begun
    assert AttemptLog(folder).find_unfinished_attempt("8") is None
    AttemptLog(folder).end(replace(begun, ended=101.0))
    assert AttemptLog(folder).find_unfinished_attempt("7") is None
    assert AttemptLog(folder).count_without_progress("7") == (1, 0)
    record_attempt(folder, EXIT_OK, submission="9")
    assert AttemptLog(folder).count_without_progress("9") == (0, 1)


def test_two_jobs_of_one_run_keep_their_own_lines(folder: Path) -> None:
    first = AttemptLog(folder).begin(Attempt(100.0, "7", job="7"))
    second = AttemptLog(folder).begin(Attempt(101.0, "8", job="8"))
    AttemptLog(folder).end(replace(second, ended=102.0, code=77, reason="locked"))
    AttemptLog(folder).end(replace(first, ended=103.0, code=EXIT_OK, reason="done"))
    attempts = [(attempt.job, attempt.code, attempt.reason) for attempt in AttemptLog(folder).attempts]
    assert attempts == [("7", EXIT_OK, "done"), ("8", 77, "locked")]


def test_hosts_that_failed_twice_within_a_week_are_faulty(folder: Path) -> None:
    record_attempt(folder, EXIT_FAILED, failed_host="n2")
    record_attempt(folder, EXIT_FAILED, failed_host="n3")
    assert AttemptLog(folder).find_faulty_hosts(now=200.0) == []
    record_attempt(folder, EXIT_FAILED, failed_host="n2", submission="8")
    assert AttemptLog(folder).find_faulty_hosts(now=200.0) == ["n2"]
    assert AttemptLog(folder).find_faulty_hosts(now=200.0 + 8 * 86400) == [], "by then it was repaired"


def test_an_event_may_hold_any_line_break(folder: Path) -> None:
    """JSON leaves Unicode's own as they are, such as of a file's name in an error."""
    log_event(folder, "failed", "a\u2028b\x85c\x0bd\n")
    assert [event["detail"] for event in tail_jsonl(folder / EVENTS, 2)] == ["a\u2028b\x85c\x0bd\n"]


def test_a_damaged_or_newer_record_is_no_obstacle(folder: Path) -> None:
    (folder / RESTARTS).write_text('[{"time": 1.0, "submission": "7", "code": 1, "ended": 2.0, "of_tomorrow": 3}]')
    assert AttemptLog(folder).count_without_progress("7") == (1, 0)
    (folder / RESTARTS).write_text('[{"time": 1')
    record_attempt(folder, EXIT_FAILED)
    (entry,) = json.loads((folder / RESTARTS).read_text())
    assert {"time", "job", "restart", "nodes", "code", "step", "failed_host", "failed_rank"} <= entry.keys()


@pytest.mark.parametrize("damaged", ['[{"time": 1', "{}", '[{"time": 1.0, "submission": "7"}, {"time": "soon"}]'])
def test_a_damaged_record_is_kept(folder: Path, damaged: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The file is moved once; later attempts are recorded in a new file."""
    (folder / RESTARTS).write_text(damaged)
    record_attempt(folder, EXIT_FAILED)
    (moved,) = folder.glob(f"{RESTARTS}.damaged-*")
    assert moved.read_text() == damaged
    assert capfd.readouterr().err.count(f"kept as {moved.name}") == 1
    assert json.loads((folder / RESTARTS).read_text())[-1]["code"] == EXIT_FAILED


DIED_BEFORE_LAUNCH = """\
srun: error: Task launch for StepId=2.0 failed on node n4: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n3: error: *** STEP 2.0 ON n3 CANCELLED AT 2026-11-24T11:44:38 ***
srun: error: n3: task 0: Killed
"""
"""From SLURM 22.05, where n4 had lost power when srun began."""


@pytest.mark.parametrize(("lines", "host", "rank"), [
    (["n2: task 3: Killed", "n1: tasks 0-1: Exited with exit code 1"], "n2", 3),
    (["n1: tasks 0-1: Exited with exit code 1", "n2: task 2: Aborted"], "n2", 2),
    (["n1: tasks 0,3: Segmentation fault (core dumped)"], "n1", 0),
    (["n1: task 0: Exited with exit code 1", "n2: task 1: Exited with exit code 1"], None, None),
    (["Node failure on n3", "n1: task 0: Killed"], "n3", None),
    (["nothing of interest"], None, None),
    (["Task launch for StepId=1.0 failed on node n2: Communication connection failure",
      "Task launch for StepId=1.0 failed on node n3: Socket timed out on send/recv operation",
      "n1: task 0: Killed"], None, None),
])  # fmt: skip
def test_srun_s_messages_name_host_and_rank(run: Path, lines: list[str], host: str | None, rank: int | None) -> None:
    check_cause(run, "".join(f"srun: error: {line}\n" for line in lines), host, rank)


@pytest.mark.parametrize("end", ["Killed", "Exited with exit code 1"])
def test_a_node_that_died_before_the_launch_is_named(run: Path, end: str) -> None:
    check_cause(run, DIED_BEFORE_LAUNCH.replace("Killed", end), "n4", None)


def check_cause(run: Path, text: str, host: str | None, rank: int | None) -> None:
    """Nobody of an earlier attempt is named."""
    write_log(run, f"srun: error: n9: task 9: Killed\nmegatfm job: attempt 2: job 7\n{text}")
    cause = find_failure_cause(run / "logs" / "slurm-7.log", run, 0.0)
    assert (cause.host, cause.rank) == (host, rank)


def test_the_runs_events_count_more_than_the_log(run: Path) -> None:
    now = time.time()
    write_log(run, "srun: error: n1: task 0: Aborted\n")
    for event, host in (
        ({"detail": "long ago", "ranks": [9], "hosts": ["n9"], "time": now - 100}, "n1"),
        ({"detail": "rank 2 on n2 hangs", "ranks": [2], "hosts": ["n2"]}, "n2"),
        ({"detail": "all failed alike", "ranks": [], "hosts": []}, None),
    ):
        write_event(run, event="failed", **event)
        assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host == host


def test_the_next_link_of_a_chain_resumes(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chain(run, 7, 8, 9)
    run_prolog(run)
    assert run_epilog(run, 75, "--asked", "USR1", "--no-requeue") == 75
    assert "the next job of the chain, 8, will resume" in capsys.readouterr().err
    assert "scontrol requeue 7" not in fake_slurm.calls
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    run_prolog(run)
    assert AttemptLog(run).attempts[-1].submission == "7", "the links of a chain are counted together"
    finish_run(run)
    assert run_epilog(run, 0, "--no-requeue") == 0
    assert fake_slurm.calls[-1] == "scancel 9", "a finished run needs no further link"


def test_a_link_that_outlives_the_next_s_begin_notes_its_own_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM starts the next link while the script of the one before has some seconds (KillWait) left."""
    write_chain(run, 7, 8)
    run_prolog(run)
    first = AttemptLog(run)  # as the first link's helper read it
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    run_prolog(run)
    write_event(run, event="failed", detail="rank 1 on n2 hangs", ranks=[1], hosts=["n2"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_epilog(run, 143, "--asked", "TERM", "--no-requeue")
    seventh, eighth = AttemptLog(run).attempts
    assert (seventh.job, seventh.code, seventh.reason) == ("7", 143, "stopped by TERM")
    assert seventh.failed_host is None
    assert (eighth.job, eighth.ended) == ("8", None), "it goes on"
    run_epilog(run, 1, "--no-requeue")
    assert AttemptLog(run).attempts[0].failed_host is None, "what the next one met is not its own"
    first.end(replace(first.attempts[0], ended=1.0))
    assert len(AttemptLog(run).attempts) == 2, "nor does what it read before the next began overwrite that"


def test_a_requeued_job_notes_the_end_of_each_start(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_prolog(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_prolog(run)
    ended = "the attempt before: its job script on n1 was killed; the newest checkpoint is of step 0\n"
    assert ended in capsys.readouterr().err
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    run_epilog(run, 143, "--asked", "TERM")
    assert [attempt.ended is None for attempt in AttemptLog(run).attempts] == [False, True]


def test_a_chain_that_gains_nothing_is_taken_out_of_the_queue(run: Path, fake_slurm: FakeSlurm) -> None:
    write_chain(run, 7, 8, 9)
    run_prolog(run, limit=0)
    assert run_epilog(run, 1, "--no-requeue", limit=0) == 76
    assert fake_slurm.calls[-1] == "scancel 8 9"


def test_a_chain_that_could_not_be_cancelled_is_not_said_to_be(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chain(run, 7, 8, 9)
    run_prolog(run, limit=0)
    fake_slurm.fail("scancel", "Unable to contact slurm controller")
    assert run_epilog(run, 1, "--no-requeue", limit=0) == 76
    output = capsys.readouterr().err
    assert "could not cancel the later jobs of the chain, 8, 9: scancel 8 9: Unable to contact slurm" in output
    assert "cancelled" not in output


@pytest.mark.parametrize(("code", "stop_signal"), [(75, "USR1"), (138, "USR1"), (138, ""), (75, "")])
def test_a_run_that_is_told_to_stop_after_its_last_step_is_done(
    run: Path, fake_slurm: FakeSlurm, code: int, stop_signal: str
) -> None:
    run_prolog(run)
    finish_run(run)
    assert run_epilog(run, code, "--asked", stop_signal) == 0
    assert AttemptLog(run).attempts[-1].state_name == "DONE"
    assert not [call for call in fake_slurm.calls if "requeue" in call]


def test_the_last_link_prints_how_to_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chain(run, 5, 6, 7)
    run_prolog(run)
    run_epilog(run, 75, "--no-requeue")
    assert "the chain has no further job: start the same command again" in capsys.readouterr().err


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
