"""The log of a run: on the screen, in its file, and after a crash or a full disk."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.errors import MegatfmError
from megatfm.tracking.console import RunLog, log
from megatfm.tracking.hardware import describe_commit
from megatfm.tracking.run_directory import RunDirectory

RECORD = {"loss": 1.5, "tokens_per_second": 2e3, "lr": 1e-3, "grad_norm": 0.5}


def train_and_fail(run: RunDirectory) -> None:
    with run, RunLog(run, steps=10) as screen:
        log.info("a message")
        screen.step(RECORD | {"step": 3}, is_due=True)
        screen.step(RECORD | {"step": 4}, is_due=False)
        raise ValueError("the cause")


@pytest.mark.parametrize("rank", [0, 1])
def test_tracebacks_are_in_the_log_file_only(tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(log.handlers)
    with pytest.raises(ValueError, match="the cause"):
        train_and_fail(RunDirectory(tmp_path, rank))
    assert log.handlers == before, "handlers are taken off again"
    text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert "INFO a message" in text
    assert "step 3  loss 1.5000  2,000 tokens/s  lr 1.00e-03  grad norm 0.50" in text
    assert "step 4" not in text
    assert "ERROR the cause\nTraceback (most recent call last)" in text
    assert "in train_and_fail" in text
    displayed = capsys.readouterr()
    assert ("a message" in displayed.out) == (rank == 0)
    assert "Traceback" not in displayed.out + displayed.err


def test_log_lines_are_printed_above_the_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what it writes to for a terminal
    monkeypatch.setenv("COLUMNS", "160")
    with RunDirectory(tmp_path, 0) as run, RunLog(run, steps=10) as screen:
        for step in (1, 2, 3, 4):
            screen.step(RECORD | {"step": step, "loss": float(step)}, is_due=step % 2 == 0)
    displayed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    lines = re.findall(r"step (\d)  loss ([\d.]+)  2,000 tokens/s  lr", displayed)
    assert lines == [("2", "2.0000"), ("4", "4.0000")]
    assert "4/10" in displayed, "the bar is there"


def test_a_log_line_has_mfu_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 104.0, 107.0])
    monkeypatch.setattr("megatfm.tracking.console.time.monotonic", lambda: next(now))
    with RunDirectory(tmp_path, 0) as run, RunLog(run, steps=1003) as screen:
        screen.step(RECORD | {"step": 501, "mfu": 0.4123, "mfu_causal": 0.38}, is_due=True)
        screen.step(RECORD | {"step": 502, "mfu": 0.06101, "mfu_causal": 0.06101}, is_due=True)
        screen.step(RECORD | {"step": 503}, is_due=True)
        screen.step(RECORD | {"step": 1003}, is_due=True)
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert "tokens/s  MFU 41.2 % (38.0 % causal)  lr" in lines[0]
    assert lines[0].endswith("grad norm 0.50"), "the time before the first step says nothing about the others"
    assert "tokens/s  MFU 6.10 %  lr" in lines[1], "a bidirectional model has one figure"
    assert lines[1].endswith("grad norm 0.50  0:33:24 left"), "501 steps of 4 seconds"
    assert lines[2].endswith("grad norm 0.50  0:29:10 left"), "500 steps of 3.5 seconds"
    assert lines[3].endswith("grad norm 0.50")


def test_a_run_without_an_end_has_no_time_left(tmp_path: Path) -> None:
    """Its log lines go on: no `timedelta` holds the time that the most steps take."""
    with RunDirectory(tmp_path, 0) as run, RunLog(run, steps=2**53) as screen:
        screen.step(RECORD | {"step": 1}, is_due=False)
        screen._start_time -= 100.0
        screen.step(RECORD | {"step": 2}, is_due=True)
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("grad norm 0.50\n")


def test_the_logger_is_restored_after_a_run(tmp_path: Path) -> None:
    log.setLevel(logging.WARNING)
    try:
        before = log.level, list(log.handlers)
        with RunDirectory(tmp_path / "a", 0) as run, RunLog(run, steps=1):
            assert log.level == logging.INFO
        assert (log.level, log.handlers) == before
        (tmp_path / "b" / "logs" / "rank-0.log").mkdir(parents=True)
        with RunDirectory(tmp_path / "b", 0) as run, pytest.raises(MegatfmError, match="can't write"):
            RunLog(run, steps=1).__enter__()
        assert (log.level, log.handlers) == before
    finally:
        log.setLevel(logging.NOTSET)


def test_a_log_file_is_appended_to(tmp_path: Path) -> None:
    for message in ("first", "second"):
        with RunDirectory(tmp_path, 0) as run, RunLog(run, steps=1):
            log.info(message)
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "second"]


def test_a_run_continues_when_the_console_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with RunDirectory(tmp_path, 0) as run, open(writes, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with RunLog(run, steps=1):
            for message in ("first", "second"):
                log.info(message)
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert text.count("the console was closed") == 1
    assert [word for word in ("INFO first", "INFO second") if word in text] == ["INFO first", "INFO second"]
    assert capsys.readouterr().err == "", "no traceback of logging's"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_run_continues_on_a_console_whose_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(tmp_path, 0) as run, open("/dev/full", "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with RunLog(run, steps=1):
            for message in ("first", "second"):
                log.info(message)
        screen.flush()  # as Python does at its end
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert text.count("the console can't be written (No space left on device): its lines are in the log file") == 1
    assert [word for word in ("INFO first", "INFO second") if word in text] == ["INFO first", "INFO second"]
    assert capsys.readouterr().err == "", "no traceback of logging's"


def fail_in_a_run(run: RunDirectory) -> None:
    with RunLog(run, steps=1):
        log.info("first")
        log.info("second")
        raise MegatfmError("the reason")


def test_a_log_on_a_full_disk_is_one_warning_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunLog, "_open", lambda _: Path("/dev/full").open("a"))  # noqa: SIM115
    with RunDirectory(tmp_path, 1) as run, pytest.raises(MegatfmError, match=r"^the reason$"):
        fail_in_a_run(run)
    assert capsys.readouterr().err == "warning: /dev/full: can't be written: No space left on device\n"


def test_the_commit_is_read_from_the_checkout_or_the_copied_code(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) == {}, "an installed package is no checkout"
    (tmp_path / "origin.json").write_text(json.dumps({"commit": "c0ffee", "changed": []}))
    assert describe_commit(tmp_path) == {"commit": "c0ffee"}
    (tmp_path / "origin.json").write_text(json.dumps({"commit": "c0ffee", "changed": [" M a.py"]}))
    assert describe_commit(tmp_path) == {"commit": "c0ffee with changes"}
    (tmp_path / "origin.json").write_text("[]")
    assert describe_commit(tmp_path) == {}, "a damaged file doesn't keep a job from training"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert re.fullmatch("[0-9a-f]{40}", describe_commit(tmp_path)["commit"])


ENABLED = """
import faulthandler, os, sys
from pathlib import Path
from megatfm.tracking.console import RunLog
from megatfm.tracking.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1]), 1) as run, RunLog(run, steps=1):
    pass
assert faulthandler.is_enabled() == (sys.argv[2] == "1")
faulthandler.enable() if sys.argv[2] == "0" else None
os.abort()
"""


@pytest.mark.parametrize("is_enabled", ["0", "1"])
def test_crashes_after_a_run_are_reported_where_they_were_before(tmp_path: Path, is_enabled: str) -> None:
    words = [*(["-X", "faulthandler"] if is_enabled == "1" else []), "-c", ENABLED, str(tmp_path / "run"), is_enabled]
    completed = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert "Fatal Python error: Aborted" in completed.stderr
    assert "Aborted" not in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
