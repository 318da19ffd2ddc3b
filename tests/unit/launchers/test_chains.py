"""Chains of SLURM jobs: the next link goes on, and what gains nothing ends."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatfm.launchers.record import AttemptLog
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_attempts import chain, epilog, finish_run, prolog, write_event


def test_in_a_chain_the_next_link_goes_on(
    run: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(run, 7, 8, 9)
    prolog(run)
    assert epilog(run, 75, "--asked", "USR1", "--no-requeue") == 75
    assert "the next job of the chain, 8, will resume" in capsys.readouterr().err
    assert "scontrol requeue 7" not in fake_slurm.calls
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    prolog(run)
    assert AttemptLog(run).attempts[-1].submission == "7", "the links of a chain are counted together"
    finish_run(run)
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
    write_event(run, event="failed", detail="rank 1 on n2 hangs", ranks=[1], hosts=["n2"])
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
    assert [each.ended is None for each in AttemptLog(run).attempts] == [False, True]


def test_a_chain_that_gains_nothing_is_taken_out_of_the_queue(run: Path, fake_slurm: FakeSlurm) -> None:
    chain(run, 7, 8, 9)
    prolog(run, limit=0)
    assert epilog(run, 1, "--no-requeue", limit=0) == 76
    assert fake_slurm.calls[-1] == "scancel 8 9"


@pytest.mark.parametrize(("code", "requested"), [(75, "USR1"), (138, "USR1"), (138, ""), (75, "")])
def test_a_run_that_is_asked_to_stop_after_its_last_step_is_done(
    run: Path, fake_slurm: FakeSlurm, code: int, requested: str
) -> None:
    prolog(run)
    finish_run(run)
    assert epilog(run, code, *(["--asked", requested] if requested else [])) == 0
    assert AttemptLog(run).attempts[-1].state_name == "DONE"
    assert not [call for call in fake_slurm.calls if "requeue" in call]


def test_the_last_link_says_how_to_go_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain(run, 5, 6, 7)
    prolog(run)
    epilog(run, 75, "--no-requeue")
    assert "the chain has no further job: start the same command again" in capsys.readouterr().err
