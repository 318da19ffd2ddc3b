"""Progress: a bar on a terminal, plain lines in a log."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatfm.data_prep import progress
from megatfm.data_prep.progress import Reporter


def test_a_log_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    times = iter((0.0, 0.0, *[700.0] * 2, *[7400.0] * 2, *[7500.0] * 2, 7512.5))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    log = io.StringIO()
    with Reporter(Console(file=log)).stage("read", 200) as advance:
        advance(20)
        advance(160)
        advance(20)
    assert log.getvalue().splitlines() == [
        "read: 10 %, about 1 h 45 min left",
        "read: 90 %, about 13 min 42 s left",
        "read: 100 %",
        "read: done in 7512.5 s",
    ]
    assert "\x1b" not in log.getvalue()


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 1.0))
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
    assert "read: done in" in terminal.getvalue()


def test_a_failed_stage_is_not_called_done() -> None:
    log = io.StringIO()
    with pytest.raises(ValueError), Reporter(Console(file=log)).stage("read", 1):
        raise ValueError
    assert log.getvalue() == ""


def test_markup_and_long_lines_are_said_as_they_are() -> None:
    log = io.StringIO()
    line = "note: [bold]a[/bold] " + "x" * 300
    Reporter(Console(file=log, width=40)).log(line)
    assert log.getvalue() == line + "\n"
