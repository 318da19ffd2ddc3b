"""Hosts and ranks that a log blames for a failure."""

import time
from pathlib import Path

import pytest

from megatfm.launchers.prolog_epilog import find_failure_cause
from tests.support.slurm_attempts import write_event, write_log

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
    write_log(run, f"srun: error: n9: task 9: Killed\nmegatfm job: attempt 2: job 7\n{text}")
    result = find_failure_cause(run / "logs" / "slurm-7.log", run, 0.0)
    assert (result.host, result.rank) == (host, rank), "and nobody of an earlier attempt"


def test_the_runs_own_word_counts_more_than_the_logs(run: Path) -> None:
    now = time.time()
    write_event(run, event="failed", detail="long ago", ranks=[9], hosts=["n9"], time=now - 100)
    write_log(run, "srun: error: n1: task 0: Aborted\n")
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host == "n1"
    write_event(run, event="failed", detail="rank 2 on n2 hangs", ranks=[2], hosts=["n2"])
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host == "n2"
    write_event(run, event="failed", detail="all failed alike", ranks=[], hosts=[])
    assert find_failure_cause(run / "logs" / "slurm-7.log", run, now).host is None
