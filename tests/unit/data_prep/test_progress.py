"""Progress: a bar on a terminal, plain lines in a log."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatfm.data_prep.execution import progress
from megatfm.data_prep.execution.progress import Reporter


def clock(*times: float) -> SimpleNamespace:
    seconds = iter(times)
    return SimpleNamespace(monotonic=lambda: next(seconds), strftime=lambda _: "12:01:07")


def test_a_log_gets_lines_with_time_task_speed_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    times = (0.0, 0.0, *[700.0] * 2, *[7400.0] * 2, *[7500.0] * 2, 7512.5)
    for unit, total, lines in (
        ("bytes", 2 * 10**9, (
            "clean | 10 %: 200.00 MB of 2.00 GB, 0.29 MB/s, 1 h 45 min left",
            "clean | 90 %: 1.80 GB of 2.00 GB, 0.24 MB/s, 13 min 42 s left",
            "clean | 100 %: 2.00 GB of 2.00 GB, 0.27 MB/s",
        )),
        ("rows", 2 * 10**6, (
            "clean | 10 %: 200,000 of 2,000,000 rows, 285/s, 1 h 45 min left",
            "clean | 90 %: 1,800,000 of 2,000,000 rows, 243/s, 13 min 42 s left",
            "clean | 100 %: 2,000,000 of 2,000,000 rows, 266/s",
        )),
    ):  # fmt: skip
        monkeypatch.setattr(progress, "time", clock(*times))
        log = io.StringIO()
        with Reporter(Console(file=log), (3, 8)).stage("clean", total, unit) as advance:
            for percent in (10, 80, 10):
                advance(total * percent // 100)
        expected = [*lines, "clean | done in 7512.5 s"]
        assert log.getvalue().splitlines() == [f"12:01:07 task 3/8 | {line}" for line in expected]


def test_a_stage_that_was_committed_before_is_skipped_and_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", clock(0.0, 0.0))
    log = io.StringIO()
    reporter = Reporter(Console(file=log))
    with reporter.stage("clean", 10):
        reporter.skip("clean")
    reporter.skip("split-plan")
    assert log.getvalue().splitlines() == [
        "12:01:07 clean | skipped: committed by an earlier run",
        "12:01:07 split-plan | skipped: committed by an earlier run",
    ]


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", clock(*[1.0] * 2000))
    log = io.StringIO()
    with Reporter(Console(file=log)).stage("read", 1000) as advance:
        for _ in range(1000):
            advance(1)
    assert len(log.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_bar() -> None:
    terminal = io.StringIO()
    with Reporter(Console(file=terminal, force_terminal=True, width=100)).stage("read", 200) as advance:
        advance(100)
    assert "━" in terminal.getvalue()
    assert "read | done in" in terminal.getvalue()


def test_a_failed_stage_is_not_called_done() -> None:
    log = io.StringIO()
    with pytest.raises(ValueError), Reporter(Console(file=log)).stage("read", 1):
        raise ValueError
    assert log.getvalue() == ""


def test_markup_and_long_lines_are_said_as_they_are() -> None:
    log = io.StringIO()
    line = "note: [bold]a[/bold] " + "x" * 300
    Reporter(Console(file=log, width=40)).log(line)
    assert log.getvalue()[8:] == f" {line}\n"
