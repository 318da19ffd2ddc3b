"""What attempts add up to: when a run is started again, and on which nodes it is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE
from megatfm.launchers.record import MAX_STOPS_WITHOUT_PROGRESS, RESTARTS, Attempt, AttemptLog

Commit = Callable[[int], None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def attempt(
    run: Path, code: int | None, *, submission: str = "7", requested: bool = False, host: str | None = None
) -> None:
    """One whole attempt, as the job's helper notes it: each time from the file."""
    now = 100.0 + len(AttemptLog(run).attempts)
    begun = AttemptLog(run).begin(Attempt(now, submission, job=submission))
    AttemptLog(run).end(
        replace(begun, ended=now, code=code, asked=requested, failed_host=host, reason=f"exit code {code}")
    )


def test_failures_without_a_new_checkpoint_are_bounded(run: Path) -> None:
    for failures in range(1, 4):
        attempt(run, EXIT_FAILED)
        assert AttemptLog(run).count_without_progress("7") == (failures, 0)
        assert AttemptLog(run).restart_limit_reason("7", max_restarts=3) is None
    attempt(run, 137)
    assert AttemptLog(run).restart_limit_reason("7", 3) == (
        "4 attempts in a row failed without a new checkpoint after step 0; the last: exit code 137"
    )
    assert AttemptLog(run).restart_limit_reason("7", 4) is None
    assert AttemptLog(run).restart_limit_reason("8", 3) is None, (
        "whoever mends the cause and launches again starts afresh"
    )


def test_zero_restarts_end_with_the_first_failure(run: Path) -> None:
    attempt(run, EXIT_FAILED)
    output = AttemptLog(run).restart_limit_reason("7", 0)
    assert output is not None
    assert output.startswith("it failed without")


def test_a_new_checkpoint_starts_the_count_afresh(run: Path, checkpoint: Commit) -> None:
    for _ in range(3):
        attempt(run, EXIT_FAILED)
    begun = AttemptLog(run).begin(Attempt(200.0, "7"))
    checkpoint(40)
    ended = AttemptLog(run).end(replace(begun, ended=201.0, code=EXIT_FAILED))
    assert (ended.first_step, ended.step, ended.made_progress) == (0, 40, True)
    assert AttemptLog(run).count_without_progress("7") == (0, 0)
    attempt(run, EXIT_FAILED)
    assert AttemptLog(run).count_without_progress("7") == (1, 0), (
        "that it gained something before is no gain of this one"
    )


def test_stops_are_no_failures_but_not_endless_either(run: Path) -> None:
    for _ in range(MAX_STOPS_WITHOUT_PROGRESS):
        attempt(run, EXIT_REQUEUE)
    attempt(run, EXIT_FAILED, requested=True)  # say, a rank that was killed while it saved
    failures, stops = AttemptLog(run).count_without_progress("7")
    assert (failures, stops) == (0, MAX_STOPS_WITHOUT_PROGRESS + 1)
    output = AttemptLog(run).restart_limit_reason("7", 0)
    assert output is not None
    assert "11 attempts in a row were stopped without a new checkpoint" in output


def test_an_attempt_that_was_lost_is_a_failure_and_one_that_runs_is_none(run: Path) -> None:
    begun = AttemptLog(run).begin(Attempt(100.0, "7", job="7"))
    assert AttemptLog(run).count_without_progress("7") == (0, 0)
    assert AttemptLog(run).unfinished_attempt("7") == begun
    assert AttemptLog(run).unfinished_attempt("8") is None
    AttemptLog(run).end(replace(begun, ended=101.0))
    assert AttemptLog(run).unfinished_attempt("7") is None
    assert AttemptLog(run).count_without_progress("7") == (1, 0)
    attempt(run, EXIT_OK, submission="9")
    assert AttemptLog(run).count_without_progress("9") == (0, 1)


def test_two_jobs_of_one_run_keep_their_own_lines(run: Path) -> None:
    first = AttemptLog(run).begin(Attempt(100.0, "7", job="7"))
    second = AttemptLog(run).begin(Attempt(101.0, "8", job="8"))
    AttemptLog(run).end(replace(second, ended=102.0, code=77, reason="locked"))
    AttemptLog(run).end(replace(first, ended=103.0, code=EXIT_OK, reason="done"))
    assert [(attempt.job, attempt.code, attempt.reason) for attempt in AttemptLog(run).attempts] == [
        ("7", EXIT_OK, "done"),
        ("8", 77, "locked"),
    ]


def test_hosts_that_failed_twice_of_late_are_offenders(run: Path) -> None:
    attempt(run, EXIT_FAILED, host="n2")
    attempt(run, EXIT_FAILED, host="n3")
    assert AttemptLog(run).faulty_hosts(now=200.0) == []
    attempt(run, EXIT_FAILED, host="n2", submission="8")
    assert AttemptLog(run).faulty_hosts(now=200.0) == ["n2"]
    assert AttemptLog(run).faulty_hosts(now=200.0 + 8 * 86400) == [], "by then it was repaired"


def test_a_damaged_or_newer_record_is_no_obstacle(run: Path) -> None:
    (run / RESTARTS).write_text(
        '[{"time": 1.0, "submission": "7", "code": 1, "ended": 2.0, "of_tomorrow": 3}]'
    )
    assert AttemptLog(run).count_without_progress("7") == (1, 0)
    (run / RESTARTS).write_text('[{"time": 1')
    attempt(run, EXIT_FAILED)
    (entry,) = json.loads((run / RESTARTS).read_text())
    assert {"time", "job", "restart", "nodes", "code", "step", "failed_host", "failed_rank"} <= entry.keys()
