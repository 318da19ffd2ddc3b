"""Run directories that `status`, `logs` and `cancel` look at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatfm import cli
from megatfm.launchers.record import Attempt, dump_attempts

MakeRun = Callable[..., Path]


def megatfm(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and all that it wrote."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out + output.err


def write_attempts(run: Path, *codes: int | None) -> None:
    """Write `restarts.json`: an attempt of job 7 for each exit code, None for one that runs."""
    result = [
        Attempt(100.0, "7", job="7", code=code, ended=None if code is None else 101.0, reason="of a test")
        for code in codes
    ]
    (run / "restarts.json").write_text(dump_attempts(result))
