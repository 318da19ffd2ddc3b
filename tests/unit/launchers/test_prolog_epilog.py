"""Decisions of a job's helper before and after an attempt, against a SLURM that answers from files."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatfm.launchers import prolog_epilog
from megatfm.launchers.attempts import RESTARTS, UNFINISHED, Attempt, AttemptLog
from megatfm.launchers.prolog_epilog import main
from tests.support.launch_jobs import (
    RUNNING,
    FakeSlurm,
    finish_run,
    full_disk,
    run_epilog,
    run_prolog,
    write_chain,
    write_event,
    write_log,
)

Commit = Callable[[int], None]


def write_failures(run: Path, count: int, host: str | None) -> None:
    """Record failed attempts, which a host is blamed for."""
    for _ in range(count):
        begun = AttemptLog(run).begin(Attempt(time.time(), "7", job="7"))
        AttemptLog(run).end(replace(begun, ended=time.time(), code=1, reason="it broke", failed_host=host))


def test_an_attempt_gets_all_nodes_and_is_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_prolog(run) == 0
    output = capsys.readouterr()
    assert output.out == "3 n1 n1,n2,n3\n", "what the script reads"
    assert output.err == "megatfm job: attempt 1: job 7, from step 0, on n1, n2, n3\n"
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.job, attempt.submission, attempt.nodes, attempt.ended) == ("7", "7", ["n1", "n2", "n3"], None)


@pytest.mark.parametrize(("least", "code", "nodes", "message"), [
    (2, None, "4 n1 n1,n2,n3,n4\n", "trains on 4 of 5 nodes: train.global_batch = 24 is not a multiple of"),
    (5, 2, "", "fits on none of 5 to 5 nodes: on 5, train.global_batch = 24"),
])  # fmt: skip
def test_a_run_gets_as_many_nodes_as_its_layout_fits(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], least: int, code: int | None,
    nodes: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3,n4,n5")
    assert run_prolog(run, least=least) == (code or 0)
    output = capsys.readouterr()
    assert output.out == nodes
    assert message in output.err
    assert AttemptLog(run).attempts[-1].code == code


def test_a_finished_run_is_not_started(run: Path, checkpoint: Commit, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(100)
    finish_run(run)
    assert run_prolog(run) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "the run is finished: all of its 100 steps are done" in output.err
    assert AttemptLog(run).attempts == []


@pytest.mark.parametrize(("least", "nodes", "message"), [
    (1, "2 n2 n2,n3\n", "n1: not used, since the run failed there before"),
    (3, "3 n1 n1,n2,n3\n", "failed before but used again: too few other nodes are left"),
])  # fmt: skip
def test_a_host_that_failed_twice_is_used_only_where_it_must_be(
    run: Path, capsys: pytest.CaptureFixture[str], least: int, nodes: str, message: str
) -> None:
    write_failures(run, 2, host="n1")
    assert run_prolog(run, least=least) == 0
    output = capsys.readouterr()
    assert output.out == nodes
    assert message in output.err


def test_attempts_without_an_epilog_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> None:
    """A node that dies takes the script along, and SLURM requeues by itself."""
    for _ in range(2):
        assert run_prolog(run, limit=1) == 0
    assert run_prolog(run, limit=1) == 76
    output = capsys.readouterr()
    assert output.out.count("\n") == 2
    assert "no progress: 2 attempts in a row failed without a new checkpoint after step 0" in output.err
    assert AttemptLog(run).attempts[-1].code == 76
    assert not any(call.startswith("scontrol requeue") for call in fake_slurm.calls)


@pytest.mark.parametrize(
    ("reason", "is_failure"), [("JOB REQUEUE", False), ("PREEMPTION", False), ("NODE FAILURE", True)]
)
def test_an_end_by_slurm_is_a_failure_of_nodes_alone(run: Path, reason: str, is_failure: bool) -> None:
    run_prolog(run)
    write_log(
        run,
        "megatfm job: attempt 1: job 7\n"
        f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T15:13:06 DUE TO {reason}, SEE LOG ***\n"
        "srun: error: n2: task 1: Killed\n",
    )
    run_prolog(run)
    lost = AttemptLog(run).attempts[0]
    assert lost.reason == f"ended by SLURM: {reason.lower()}"
    assert (lost.is_failure, lost.failed_host) == (is_failure, None), "who is killed by SLURM is not to blame"


def test_stopped_ahead_of_its_time_it_is_requeued(
    run: Path, fake_slurm: FakeSlurm, checkpoint: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    run_prolog(run)
    checkpoint(40)
    assert run_epilog(run, 75, "--asked", "USR1") == 75
    assert fake_slurm.calls == ["scontrol -o show job 7", "scontrol requeue 7"]
    assert "stopped by USR1; the newest checkpoint is of step 40" in capsys.readouterr().err
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.step, attempt.code, attempt.asked, attempt.is_failure) == (40, 75, True, False)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_attempt_that_is_no_longer_recorded_is_requeued_all_the_same(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    run_prolog(run)
    (run / RESTARTS).unlink()
    if content is not None:
        (run / RESTARTS).write_text(content)
    assert run_epilog(run, 75, "--asked", "USR1") == 75
    assert fake_slurm.calls[-1] == "scontrol requeue 7"
    assert "restarts.json lacks this attempt: recorded anew\n" in capsys.readouterr().err
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.job, attempt.submission, attempt.code, attempt.asked) == ("7", "7", 75, True)


def test_failures_are_tried_until_no_gain(run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    codes = []
    while not codes or codes[-1] == 1:
        run_prolog(run)
        codes.append(run_epilog(run, 137))
    assert codes == [1, 1, 1, 76], "three restarts"
    assert fake_slurm.calls.count("scontrol requeue 7") == 3
    reason = "4 attempts in a row failed without a new checkpoint after step 0; the last: exit code 137"
    assert f"no progress: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 2, 76, 77])
def test_codes_that_say_the_same_again_end_it(run: Path, code: int, fake_slurm: FakeSlurm) -> None:
    run_prolog(run)
    finish_run(run)
    assert run_epilog(run, code) == code
    assert fake_slurm.calls == []
    assert AttemptLog(run).attempts[-1].code == code


@pytest.mark.parametrize("record", [
    None,
    {"event": "stopped", "step": 40},
    {"event": "failed", "step": 100},
    {"event": "finished", "step": 90},  # of a run that was made longer since
])  # fmt: skip
def test_an_exit_code_of_zero_is_not_believed(
    run: Path, record: dict[str, object] | None, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun leaves with 0 when SLURM takes its node away."""
    write_chain(run, 7, 8, 9)
    run_prolog(run)
    if record:
        write_event(run, detail="", **record)
    write_log(run, "megatfm job: attempt 1: job 7\nsrun: error: Node failure on n2\n")
    assert run_epilog(run, 0, "--no-requeue") == 1
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.code, attempt.is_failure) == (1, True)
    assert not any("scancel" in call for call in fake_slurm.calls), "the chain goes on"
    assert "the next job of the chain, 8, will resume" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "stop_signal", "epilog_code", "reason", "state"), [
    (0, "", 1, UNFINISHED, "FAILED"),
    (143, "TERM", 75, "stopped by TERM", "STOPPED"),
    (138, "", 75, "stopped by USR1", "STOPPED"),  # a rank died of USR1 while it started
])  # fmt: skip
def test_an_exit_code_is_recorded_with_its_reason(
    run: Path, code: int, stop_signal: str, epilog_code: int, reason: str, state: str
) -> None:
    run_prolog(run)
    assert run_epilog(run, code, "--asked", stop_signal) == epilog_code
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.reason, attempt.state_name, attempt.is_failure) == (reason, state, state == "FAILED")


@pytest.mark.parametrize(("record", "message"), [
    ("JobState=COMPLETING Restarts=0 RunTime=00:05:00", "was cancelled"),
    ("JobState=CANCELLED Restarts=0 RunTime=00:05:00", "was cancelled"),
    ("JobState=COMPLETING Restarts=1 RunTime=00:00:00", "SLURM has requeued job 7"),
    ("JobState=PENDING Restarts=1 RunTime=00:00:00", "SLURM has requeued job 7"),
])  # fmt: skip
def test_jobs_that_were_cancelled_or_requeued_are_left_alone(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], record: str, message: str
) -> None:
    """A running job that is cancelled and one that is requeued both look COMPLETING; only one was restarted."""
    run_prolog(run)
    fake_slurm.answer("scontrol-show", f"JobId=7 {record} TimeLimit=01:00:00 Partition=main NumNodes=2\n")
    assert run_epilog(run, 75, "--asked", "TERM") == 75
    assert message in capsys.readouterr().err
    assert "scontrol requeue 7" not in fake_slurm.calls


def test_out_of_time_while_it_saved_it_is_requeued_nonetheless(run: Path, fake_slurm: FakeSlurm) -> None:
    run_prolog(run)
    fake_slurm.answer("scontrol-show", RUNNING.replace("RUNNING", "COMPLETING").replace("00:05:00", "01:00:04"))
    run_epilog(run, 75, "--asked", "USR1")
    assert "scontrol requeue 7" in fake_slurm.calls


def test_a_host_failing_twice_is_excluded(run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    fake_slurm.answer("sinfo", "n1 idle\nn2 idle\nn3 idle\n")
    for _ in range(2):
        run_prolog(run)
        write_event(run, event="failed", detail="rank 1 on n2 hangs", ranks=[1], hosts=["n2"])
        run_epilog(run, 1)
    assert fake_slurm.calls[-2:] == ["sinfo -h -N -p main -o %N\\ %t", "scontrol update JobId=7 ExcNodeList=n2"]
    assert fake_slurm.calls.count("scontrol update JobId=7 ExcNodeList=n2") == 1, "the first time may be chance"
    assert "n2: failed twice, so excluded from now on" in capsys.readouterr().err
    last = AttemptLog(run).attempts[-1]
    assert (last.failed_host, last.failed_rank, last.reason) == ("n2", 1, "rank 1 on n2 hangs")


@pytest.mark.parametrize(("excluded", "nodes", "updates", "message"), [
    (" ExcNodeList=gpu9", "n1 idle\nn2 idle\nn3 idle\ngpu9 idle\n",
     ["scontrol update JobId=7 ExcNodeList=gpu9\\,n2"], "n2: failed twice, so excluded"),
    ("", "n1 idle\nn2 idle\nn3 down*\n", [], "only 1 other nodes are usable: not excluded"),
])  # fmt: skip
def test_a_host_is_excluded_beside_the_site_s_nodes_unless_too_few_are_left(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], excluded: str, nodes: str,
    updates: list[str], message: str,
) -> None:  # fmt: skip
    fake_slurm.answer("scontrol-show", RUNNING.rstrip("\n") + excluded + "\n")
    fake_slurm.answer("sinfo", nodes)
    write_failures(run, 1, host="n2")
    run_prolog(run)
    write_event(run, event="failed", detail="it hangs", ranks=[1], hosts=["n2"])
    run_epilog(run, 1)
    assert [call for call in fake_slurm.calls if "ExcNodeList" in call] == updates
    assert message in capsys.readouterr().err


def test_a_refusing_scheduler_is_one_line(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prolog_epilog, "RETRY_SECONDS", (0.0,))
    run_prolog(run)
    fake_slurm.fail("scontrol-requeue", "Job has\nno requeue\n")
    assert run_epilog(run, 75) == 1
    assert "megatfm job: error: scontrol requeue 7: Job has no requeue\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["scontrol-show", "scontrol-requeue"])
def test_a_scheduler_that_is_busy_is_asked_again(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            (fake_slurm.folder / f"{command}.fails").unlink()

    monkeypatch.setattr(prolog_epilog, "time", SimpleNamespace(time=time.time, sleep=wait))
    run_prolog(run)
    fake_slurm.fail(command, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    assert run_epilog(run, 75, "--asked", "USR1") == 75
    assert fake_slurm.calls[-1] == "scontrol requeue 7"
    assert waits == [5.0, 15.0]
    output = capsys.readouterr().err
    assert output.count("Unable to contact slurm controller (connect failure): asking again in") == 2
    assert "job 7 is requeued" in output


def test_a_task_that_is_stopped_without_progress_is_given_up(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time limit is shorter than one part. What any task finishes in any stage is progress of all."""
    run, work = tmp_path / "made.jobs", tmp_path / "made" / ".work"
    (run / "slurm").mkdir(parents=True)
    work.mkdir(parents=True)
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    for part in ("clean.00000", "exact_dedup-sort.00001", "dedup-0-minhash-buckets.00002"):
        (work / f"{part}.json").touch()
        assert [main(["requeue", "--run", str(run)]) for _ in range(10)] == [75] * 10
    assert [call for call in fake_slurm.calls if "requeue" in call] == ["scontrol requeue 9"] * 30
    assert main(["requeue", "--run", str(run)]) == 76
    assert "task 2 was stopped 11 times in a row, and no task finished a part" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    with full_disk():
        assert main(["requeue", "--run", str(run)]) == 75
    assert fake_slurm.calls[-1] == "scontrol requeue 9", "on a full disk, too"
    monkeypatch.setattr(prolog_epilog, "RETRY_SECONDS", (0.0,))
    fake_slurm.fail("squeue", "slurm_load_jobs error: Socket timed out\n")
    assert main(["requeue", "--run", str(run)]) == 1, "it may have been cancelled, and may not"
    assert "error: squeue -h -a: slurm_load_jobs error: Socket timed out\n" in capsys.readouterr().err
    (fake_slurm.folder / "squeue.fails").unlink()
    fake_slurm.answer("squeue", "COMPLETING|None|n1\n")
    assert main(["requeue", "--run", str(run)]) == 75, "another submission counts anew"
    assert len([call for call in fake_slurm.calls if "requeue" in call]) == 31, "one that was cancelled stays so"
