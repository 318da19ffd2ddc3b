"""What attempts add up to: when a run is started again, and on which nodes it is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatfm.errors import DONE, FAILED, REQUEUE
from megatfm.launchers.restarts import FRUITLESS_STOPS, RESTARTS, Attempt, Restarts

Commit = Callable[[int], None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def attempt(
    run: Path, code: int | None, *, submission: str = "7", asked: bool = False, host: str | None = None
) -> None:
    """One whole attempt, as the job's helper notes it: each time from the file."""
    now = 100.0 + len(Restarts(run).attempts)
    begun = Restarts(run).begin(Attempt(now, submission, job=submission))
    Restarts(run).end(
        replace(begun, ended=now, code=code, asked=asked, failed_host=host, reason=f"exit code {code}")
    )


def test_failures_without_a_new_checkpoint_are_bounded(run: Path) -> None:
    for failures in range(1, 4):
        attempt(run, FAILED)
        assert Restarts(run).fruitless("7") == (failures, 0)
        assert Restarts(run).spent("7", max_restarts=3) is None
    attempt(run, 137)
    assert Restarts(run).spent("7", 3) == (
        "4 attempts in a row failed without a new checkpoint after step 0; the last: exit code 137"
    )
    assert Restarts(run).spent("7", 4) is None
    assert Restarts(run).spent("8", 3) is None, "whoever mends the cause and launches again starts afresh"


def test_zero_restarts_end_with_the_first_failure(run: Path) -> None:
    attempt(run, FAILED)
    said = Restarts(run).spent("7", 0)
    assert said is not None
    assert said.startswith("it failed without")


def test_a_new_checkpoint_starts_the_count_afresh(run: Path, checkpoint: Commit) -> None:
    for _ in range(3):
        attempt(run, FAILED)
    begun = Restarts(run).begin(Attempt(200.0, "7"))
    checkpoint(40)
    ended = Restarts(run).end(replace(begun, ended=201.0, code=FAILED))
    assert (ended.first_step, ended.step, ended.gained) == (0, 40, True)
    assert Restarts(run).fruitless("7") == (0, 0)
    attempt(run, FAILED)
    assert Restarts(run).fruitless("7") == (1, 0), "that it gained something before is no gain of this one"


def test_stops_are_no_failures_but_not_endless_either(run: Path) -> None:
    for _ in range(FRUITLESS_STOPS):
        attempt(run, REQUEUE)
    attempt(run, FAILED, asked=True)  # say, a rank that was killed while it saved
    failures, stops = Restarts(run).fruitless("7")
    assert (failures, stops) == (0, FRUITLESS_STOPS + 1)
    said = Restarts(run).spent("7", 0)
    assert said is not None
    assert "11 attempts in a row were stopped without a new checkpoint" in said


def test_an_attempt_that_was_lost_is_a_failure_and_one_that_runs_is_none(run: Path) -> None:
    begun = Restarts(run).begin(Attempt(100.0, "7", job="7"))
    assert Restarts(run).fruitless("7") == (0, 0)
    assert Restarts(run).open("7") == begun
    assert Restarts(run).open("8") is None
    Restarts(run).end(replace(begun, ended=101.0))
    assert Restarts(run).open("7") is None
    assert Restarts(run).fruitless("7") == (1, 0)
    attempt(run, DONE, submission="9")
    assert Restarts(run).fruitless("9") == (0, 1)


def test_two_jobs_of_one_run_keep_their_own_lines(run: Path) -> None:
    first = Restarts(run).begin(Attempt(100.0, "7", job="7"))
    second = Restarts(run).begin(Attempt(101.0, "8", job="8"))
    Restarts(run).end(replace(second, ended=102.0, code=77, reason="locked"))
    Restarts(run).end(replace(first, ended=103.0, code=DONE, reason="done"))
    assert [(each.job, each.code, each.reason) for each in Restarts(run).attempts] == [
        ("7", DONE, "done"),
        ("8", 77, "locked"),
    ]


def test_hosts_that_failed_twice_of_late_are_offenders(run: Path) -> None:
    attempt(run, FAILED, host="n2")
    attempt(run, FAILED, host="n3")
    assert Restarts(run).offenders(now=200.0) == []
    attempt(run, FAILED, host="n2", submission="8")
    assert Restarts(run).offenders(now=200.0) == ["n2"]
    assert Restarts(run).offenders(now=200.0 + 8 * 86400) == [], "by then it was repaired"


def test_a_damaged_or_newer_record_is_no_obstacle(run: Path) -> None:
    (run / RESTARTS).write_text(
        '[{"time": 1.0, "submission": "7", "code": 1, "ended": 2.0, "of_tomorrow": 3}]'
    )
    assert Restarts(run).fruitless("7") == (1, 0)
    (run / RESTARTS).write_text('[{"time": 1')
    attempt(run, FAILED)
    (entry,) = json.loads((run / RESTARTS).read_text())
    assert {"time", "job", "restart", "nodes", "code", "step", "failed_host", "failed_rank"} <= entry.keys()
