"""What a job's helper decides before and after an attempt, against a SLURM that answers from files."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatfm.config import load_config, to_toml
from megatfm.launchers.prolog_epilog import find_failure_cause, main
from megatfm.launchers.record import UNFINISHED, Attempt, AttemptLog
from tests.support.fake_slurm import FakeSlurm

Commit = Callable[[int], None]
RUNNING = (
    "JobId=7 JobState=RUNNING Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00 Partition=main NumNodes=2\n"
)


@pytest.fixture
def run(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that job 7 trains on n1 to n3, one process on each."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "slurm").mkdir()
    config = load_config("quickstart", ["train.global_batch=24", "train.micro_batch=1", "train.steps=100"])
    (run / "slurm" / "config.toml").write_text(to_toml(config))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    fake_slurm.answer("scontrol-show", RUNNING)
    return run


def prolog(run: Path, *, least: int = 1, limit: int = 3) -> int:
    words = ["--min-nodes", str(least), "--processes-per-node", "1"]
    return main(["prolog", *common(run, limit), *words])


def epilog(run: Path, code: int, *words: str, limit: int = 3) -> int:
    requeue = [] if "--no-requeue" in words else ["--requeue"]
    return main(["epilog", *common(run, limit), "--code", str(code), *requeue, *words])


def common(run: Path, limit: int) -> list[str]:
    files = ["--log", str(run / "logs" / "slurm-7.log"), "--config", str(run / "slurm" / "config.toml")]
    return ["--run", str(run), *files, "--max-restarts", str(limit)]


def chain(run: Path, *jobs: int) -> None:
    (run / "launch.json").write_text(json.dumps({"launcher": "slurm", "jobs": [str(job) for job in jobs]}))


def log(run: Path, text: str) -> None:
    (run / "logs" / "slurm-7.log").write_text(text)


def event(run: Path, **facts: object) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **facts}) + "\n")


def finish(run: Path) -> None:
    """The run records that all of its steps are done."""
    event(run, event="finished", detail="step 100", step=100)


def failures(run: Path, count: int, host: str | None = None) -> None:
    for _ in range(count):
        begun = AttemptLog(run).begin(Attempt(time.time(), "7", job="7"))
        AttemptLog(run).end(replace(begun, ended=time.time(), code=1, reason="it broke", failed_host=host))


# ------------------------------------------------------------------------------------------------------- begin


def test_an_attempt_gets_all_nodes_and_is_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prolog(run) == 0
    captured = capsys.readouterr()
    assert captured.out == "3 n1 n1,n2,n3\n", "what the script reads"
    assert captured.err == "megatfm job: attempt 1: job 7, from step 0, on n1, n2, n3\n"
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.job, attempt.submission, attempt.nodes, attempt.ended) == (
        "7",
        "7",
        ["n1", "n2", "n3"],
        None,
    )


def test_with_fewer_nodes_the_layout_that_fits(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3,n4,n5")
    assert prolog(run, least=2) == 0
    captured = capsys.readouterr()
    assert captured.out == "4 n1 n1,n2,n3,n4\n"
    assert "trains on 4 of 5 nodes: train.global_batch = 24 is not a multiple of" in captured.err


def test_a_layout_that_fits_nowhere_is_a_usage_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3,n4,n5")
    assert prolog(run, least=5) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fits on none of 5 to 5 nodes: on the last, train.global_batch = 24" in captured.err
    assert AttemptLog(run).attempts[-1].code == 2


def test_a_finished_run_is_not_started(
    run: Path, checkpoint: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(100)
    finish(run)
    assert prolog(run) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the run is finished: all of its 100 steps are done" in captured.err
    assert AttemptLog(run).attempts == []


def test_an_offender_is_left_out_where_it_can_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures(run, 2, host="n1")
    assert prolog(run) == 0
    captured = capsys.readouterr()
    assert captured.out == "2 n2 n2,n3\n"
    assert "n1: left out, since the run failed there before" in captured.err


def test_an_offender_is_used_where_it_must_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures(run, 2, host="n1")
    assert prolog(run, least=3) == 0
    captured = capsys.readouterr()
    assert captured.out == "3 n1 n1,n2,n3\n"
    assert "failed before but used again: too few other nodes are left" in captured.err


def test_attempts_that_were_lost_with_their_script_are_counted_too(
    run: Path, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> None:
    """A node that dies takes the script along: nobody comes to `end`, and SLURM requeues by itself."""
    for _ in range(2):
        assert prolog(run, limit=1) == 0
    assert prolog(run, limit=1) == 76
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 2
    assert "no progress: 2 attempts in a row failed without a new checkpoint after step 0" in captured.err
    assert AttemptLog(run).attempts[-1].code == 76
    assert not any(call.startswith("scontrol requeue") for call in fake_slurm.calls)


@pytest.mark.parametrize(
    ("reason", "is_failure"), [("JOB REQUEUE", False), ("PREEMPTION", False), ("NODE FAILURE", True)]
)
def test_what_slurm_ended_is_no_failure_unless_a_node_was(run: Path, reason: str, is_failure: bool) -> None:
    prolog(run)
    log(
        run,
        "megatfm job: attempt 1: job 7\n"
        f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T15:13:06 DUE TO {reason}, SEE LOG ***\n"
        "srun: error: n2: task 1: Killed\n",
    )
    prolog(run)
    lost = AttemptLog(run).attempts[0]
    assert lost.reason == f"ended by SLURM: {reason.lower()}"
    assert (lost.is_failure, lost.failed_host) == (is_failure, None), "who is killed by SLURM is not to blame"


# --------------------------------------------------------------------------------------------------------- end


def test_stopped_ahead_of_its_time_it_is_requeued(
    run: Path, fake_slurm: FakeSlurm, checkpoint: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    prolog(run)
    checkpoint(40)
    assert epilog(run, 75, "--asked", "USR1") == 75
    assert fake_slurm.calls == ["scontrol -o show job 7", "scontrol requeue 7"]
    assert "stopped by USR1; the newest checkpoint is of step 40" in capsys.readouterr().err
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.step, attempt.code, attempt.asked, attempt.is_failure) == (40, 75, True, False)


def test_a_failure_is_tried_again_until_it_gains_nothing(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    while not codes or codes[-1] == 1:
        prolog(run)
        codes.append(epilog(run, 137))
    assert codes == [1, 1, 1, 76], "three restarts"
    assert fake_slurm.calls.count("scontrol requeue 7") == 3
    output = capsys.readouterr().err
    assert (
        "no progress: 4 attempts in a row failed without a new checkpoint after step 0; the last: exit code 137"
        in output
    )


@pytest.mark.parametrize("code", [0, 2, 76, 77])
def test_codes_that_say_the_same_again_end_it(run: Path, code: int, fake_slurm: FakeSlurm) -> None:
    prolog(run)
    finish(run)
    assert epilog(run, code) == code
    assert fake_slurm.calls == []
    assert AttemptLog(run).attempts[-1].code == code


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"event": "stopped", "step": 40},
        {"event": "failed", "step": 100},
        {"event": "finished", "step": 90},  # of a run that was made longer since
    ],
)
def test_an_exit_code_of_zero_is_not_believed(
    run: Path, record: dict[str, object] | None, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun leaves with 0 when SLURM takes its node away."""
    chain(run, 7, 8, 9)
    prolog(run)
    if record:
        event(run, detail="", **record)
    log(run, "megatfm job: attempt 1: job 7\nsrun: error: Node failure on n2\n")
    assert epilog(run, 0, "--no-requeue") == 1
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.code, attempt.is_failure) == (1, True)
    assert not any("scancel" in call for call in fake_slurm.calls), "the chain goes on"
    assert "the next link of the chain, job 8, goes on" in capsys.readouterr().err


def test_without_a_word_of_why_a_zero_is_told_as_what_it_is(run: Path) -> None:
    prolog(run)
    epilog(run, 0)
    assert AttemptLog(run).attempts[-1].reason == UNFINISHED


def test_what_fails_while_it_is_asked_to_stop_was_stopped(run: Path) -> None:
    prolog(run)
    assert epilog(run, 143, "--asked", "TERM") == 75
    assert not AttemptLog(run).attempts[-1].is_failure


def test_a_rank_that_died_of_usr1_while_it_started_was_stopped(run: Path) -> None:
    prolog(run)
    assert epilog(run, 138) == 75
    (attempt,) = AttemptLog(run).attempts
    assert (attempt.reason, attempt.is_failure, attempt.state_name) == ("stopped by USR1", False, "STOPPED")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("JobState=COMPLETING Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00", "was cancelled"),
        ("JobState=CANCELLED Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00", "was cancelled"),
        ("JobState=COMPLETING Restarts=1 RunTime=00:00:00 TimeLimit=01:00:00", "SLURM has requeued job 7"),
        ("JobState=PENDING Restarts=1 RunTime=00:00:00 TimeLimit=01:00:00", "SLURM has requeued job 7"),
    ],
)
def test_what_was_cancelled_or_requeued_already_is_left_alone(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], record: str, message: str
) -> None:
    """A running job that is cancelled and one that is requeued both look COMPLETING; only one was restarted."""
    prolog(run)
    fake_slurm.answer("scontrol-show", f"JobId=7 {record} Partition=main NumNodes=2\n")
    assert epilog(run, 75, "--asked", "TERM") == 75
    assert message in capsys.readouterr().err
    assert "scontrol requeue 7" not in fake_slurm.calls


def test_out_of_time_while_it_saved_it_is_requeued_nonetheless(run: Path, fake_slurm: FakeSlurm) -> None:
    prolog(run)
    fake_slurm.answer(
        "scontrol-show", RUNNING.replace("RUNNING", "COMPLETING").replace("00:05:00", "01:00:04")
    )
    epilog(run, 75, "--asked", "USR1")
    assert "scontrol requeue 7" in fake_slurm.calls


def test_a_host_that_failed_twice_is_excluded(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sinfo", "n1 idle\nn2 idle\nn3 idle\n")
    for _ in range(2):
        prolog(run)
        event(run, event="failed", detail="rank 1 on n2 hangs", ranks=[1], hosts=["n2"])
        epilog(run, 1)
    assert fake_slurm.calls[-2:] == [
        "sinfo -h -N -p main -o %N\\ %t",
        "scontrol update JobId=7 ExcNodeList=n2",
    ]
    assert fake_slurm.calls.count("scontrol update JobId=7 ExcNodeList=n2") == 1, (
        "the first time may be chance"
    )
    assert "n2: failed twice, so excluded from now on" in capsys.readouterr().err
    last = AttemptLog(run).attempts[-1]
    assert (last.failed_host, last.failed_rank, last.reason) == ("n2", 1, "rank 1 on n2 hangs")


def test_what_the_site_leaves_out_stays_excluded(run: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol-show", RUNNING.rstrip("\n") + " ExcNodeList=gpu9\n")
    fake_slurm.answer("sinfo", "n1 idle\nn2 idle\nn3 idle\ngpu9 idle\n")
    failures(run, 1, host="n2")
    prolog(run)
    event(run, event="failed", detail="it hangs", ranks=[1], hosts=["n2"])
    epilog(run, 1)
    assert "scontrol update JobId=7 ExcNodeList=gpu9\\,n2" in fake_slurm.calls


def test_a_host_is_not_excluded_when_the_job_could_then_never_start(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sinfo", "n1 idle\nn2 idle\nn3 down*\n")
    failures(run, 1, host="n2")
    prolog(run)
    event(run, event="failed", detail="it hangs", ranks=[1], hosts=["n2"])
    epilog(run, 1)
    assert not any("ExcNodeList" in call for call in fake_slurm.calls)
    assert "only 1 other nodes are usable: not excluded" in capsys.readouterr().err


def test_a_scheduler_that_refuses_is_said_in_one_line(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    prolog(run)
    fake_slurm.fail("scontrol-requeue", "Job has\nno requeue\n")
    assert epilog(run, 75) == 1
    assert "megatfm job: error: scontrol requeue 7: Job has no requeue\n" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ chains


def test_in_a_chain_the_next_link_goes_on(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(run, 7, 8, 9)
    prolog(run)
    assert epilog(run, 75, "--asked", "USR1", "--no-requeue") == 75
    assert "the next link of the chain, job 8, goes on" in capsys.readouterr().err
    assert "scontrol requeue 7" not in fake_slurm.calls
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    prolog(run)
    assert AttemptLog(run).attempts[-1].submission == "7", "the links of a chain are counted together"
    finish(run)
    assert epilog(run, 0, "--no-requeue") == 0
    assert fake_slurm.calls[-1] == "scancel 9", "a finished run needs no further link"


def test_a_link_that_outlives_the_begin_of_the_next_notes_its_own_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM starts the next link while the script of the one before has some seconds (KillWait) left."""
    chain(run, 7, 8)
    prolog(run)
    first = AttemptLog(run)  # as the first link's helper read it
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    prolog(run)
    event(run, event="failed", detail="rank 1 on n2 hangs", ranks=[1], hosts=["n2"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    epilog(run, 143, "--asked", "TERM", "--no-requeue")
    one, other = AttemptLog(run).attempts
    assert (one.job, one.code, one.reason, one.failed_host) == ("7", 143, "stopped by TERM", None)
    assert (other.job, other.ended) == ("8", None), "it goes on"
    epilog(run, 1, "--no-requeue")
    assert AttemptLog(run).attempts[0].failed_host is None, "what the next one met is not its own"
    first.end(replace(first.attempts[0], ended=1.0))
    assert len(AttemptLog(run).attempts) == 2, "nor does what it read before the next began overwrite that"


def test_a_requeued_job_notes_the_end_of_each_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prolog(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    prolog(run)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    epilog(run, 143, "--asked", "TERM")
    assert [attempt.ended is None for attempt in AttemptLog(run).attempts] == [False, True]


def test_a_chain_that_gains_nothing_is_taken_out_of_the_queue(run: Path, fake_slurm: FakeSlurm) -> None:
    chain(run, 7, 8, 9)
    prolog(run, limit=0)
    assert epilog(run, 1, "--no-requeue", limit=0) == 76
    assert fake_slurm.calls[-1] == "scancel 8 9"


@pytest.mark.parametrize(("code", "asked"), [(75, "USR1"), (138, "USR1"), (138, ""), (75, "")])
def test_a_run_that_is_asked_to_stop_after_its_last_step_is_done(
    run: Path, fake_slurm: FakeSlurm, code: int, asked: str
) -> None:
    prolog(run)
    finish(run)
    assert epilog(run, code, *(["--asked", asked] if asked else [])) == 0
    assert AttemptLog(run).attempts[-1].state_name == "DONE"
    assert not [call for call in fake_slurm.calls if "requeue" in call]


def test_the_last_link_says_how_to_go_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain(run, 5, 6, 7)
    prolog(run)
    epilog(run, 75, "--no-requeue")
    assert "the chain has no further link: start the same command again" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- a preparation's task


def test_a_task_that_is_stopped_without_progress_is_given_up(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task that is stopped again and again finishes nothing.

    A time limit shorter than one part. What any task finishes is progress of all.
    """
    run, work = tmp_path / "made.jobs", tmp_path / "made" / ".work"
    (run / "slurm").mkdir(parents=True)
    work.mkdir(parents=True)
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    for part in range(3):
        (work / f"clean.{part:05}.json").touch()
        assert [main(["requeue", "--run", str(run)]) for _ in range(10)] == [75] * 10
    assert [call for call in fake_slurm.calls if "requeue" in call] == ["scontrol requeue 9"] * 30
    assert main(["requeue", "--run", str(run)]) == 76
    assert "task 2 was stopped 11 times in a row, and no part was finished" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    fake_slurm.answer("squeue", "COMPLETING|None|n1\n")
    assert main(["requeue", "--run", str(run)]) == 75, "another submission counts anew"
    assert len([call for call in fake_slurm.calls if "requeue" in call]) == 30, (
        "one that was cancelled stays so"
    )


# ------------------------------------------------------------------------------------------------------- blame

DIED_BEFORE_LAUNCH = """\
srun: error: Task launch for StepId=2.0 failed on node n4: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n3: error: *** STEP 2.0 ON n3 CANCELLED AT 2026-11-24T11:44:38 ***
srun: error: n3: task 0: Killed
"""
"""Of SLURM 22.05, where n4 had lost power when srun began."""


@pytest.mark.parametrize(
    ("text", "host", "rank"),
    [
        ("srun: error: n2: task 3: Killed\nsrun: error: n1: tasks 0-1: Exited with exit code 1\n", "n2", 3),
        ("srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: error: n2: task 2: Aborted\n", "n2", 2),
        ("srun: error: n1: tasks 0,3: Segmentation fault (core dumped)\n", "n1", 0),
        (
            "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Exited with exit code 1\n",
            None,
            None,
        ),
        ("srun: error: Node failure on n3\nsrun: error: n1: task 0: Killed\n", "n3", None),
        ("nothing of interest\n", None, None),
        (DIED_BEFORE_LAUNCH, "n4", None),
        (DIED_BEFORE_LAUNCH.replace("Killed", "Exited with exit code 1"), "n4", None),
        (
            "srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure\n"
            "srun: error: Task launch for StepId=1.0 failed on node n3: Socket timed out on send/recv operation\n"
            "srun: error: n1: task 0: Killed\n",
            None,
            None,
        ),
    ],
)
def test_whom_the_log_names(run: Path, text: str, host: str | None, rank: int | None) -> None:
    log(run, f"srun: error: n9: task 9: Killed\nmegatfm job: attempt 2: job 7\n{text}")
    cause = find_failure_cause(run / "logs" / "slurm-7.log", run, 0.0)
    assert (cause.host, cause.rank) == (host, rank), "and nobody of an earlier attempt"


def test_the_runs_own_word_counts_more_than_the_logs(run: Path) -> None:
    now = time.time()
    event(run, event="failed", detail="long ago", ranks=[9], hosts=["n9"], time=now - 100)
    log(run, "srun: error: n1: task 0: Aborted\n")
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host == "n1"
    event(run, event="failed", detail="rank 2 on n2 hangs", ranks=[2], hosts=["n2"])
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host == "n2"
    event(run, event="failed", detail="all failed alike", ranks=[], hosts=[])
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host is None
