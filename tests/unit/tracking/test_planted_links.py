"""Files of a run that grow: whoever can write into its folder can't have it write elsewhere."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatfm.commands import models
from megatfm.errors import MegatfmError
from megatfm.launchers.supervisor import Child, supervise
from megatfm.parallel.distributed import ProcessInfo
from megatfm.tracking.console import RunLog
from megatfm.tracking.metrics import MetricsLog, RunInfo, log_event
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.rank_monitor_client import RankMonitor
from megatfm.train.resilience import DecisionLog

ALONE = ProcessInfo(0, 1, 0, "none", torch.device("cpu"))


def samples(run: RunDirectory) -> None:
    loaded: Any = SimpleNamespace(run_dir=run.folder, step=1)
    models._append_samples(loaded, "a prompt", ["text"])


GROWING: dict[str, Callable[[RunDirectory], object]] = {
    "metrics.jsonl": lambda run: MetricsLog(RunInfo(run.folder)),
    "events.jsonl": lambda run: log_event(run.folder, "started", "seed 1"),
    "decisions.jsonl": lambda run: DecisionLog.of_run(run).skip(3),
    "logs/rank-0.log": lambda run: RunLog(run, 9).__enter__(),
    "logs/watch.log": lambda run: RankMonitor(ALONE, 9.0).attach_run_log(
        run.folder / "logs/watch.log", lambda *_: None
    ),
    "samples.jsonl": samples,
    "logs/rank-1.log": lambda run: supervise([Child("rank 1", ["true"], log=run.folder / "logs/rank-1.log")]),
}


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_does_not_grow_through_a_planted_link(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named and left alone; samples are only for the report, so that a note suffices."""
    (tmp_path / "precious").touch()
    with RunDirectory(tmp_path / "run", 0) as run:
        (run.folder / "logs").mkdir(exist_ok=True)
        (run.folder / name).symlink_to(tmp_path / "precious")
        with nullcontext() if name == "samples.jsonl" else pytest.raises((MegatfmError, OSError)) as raised:
            GROWING[name](run)
        output = str(raised.value) if raised else capsys.readouterr().err
        assert "it is a symbolic link, whose target would be overwritten: remove it" in output
        assert Path(name).name in output
    assert (tmp_path / "precious").read_bytes() == b""
