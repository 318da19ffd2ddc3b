"""`megatfm launch --from`, before anything is started."""

import argparse
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from megatfm.commands import training
from megatfm.config import load_config
from megatfm.errors import LockedError


def test_the_config_of_a_run_that_is_under_way_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restarts read it."""
    config = load_config("quickstart", [f"run_dir={tmp_path}"])
    monkeypatch.setattr(training, "load_training_config", lambda *_: config)
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (tmp_path / "launch.json").write_text(json.dumps(note))
    (tmp_path / training.RESOLVED_CONFIG).write_text("of the run\n")
    parser = argparse.ArgumentParser()
    training.add_launch_arguments(parser)
    with pytest.raises(LockedError, match=f"process {os.getpid()} runs this already"):
        training.launch_command(parser.parse_args(["--from", "a-model", "--nproc", "1"]))
    assert (tmp_path / training.RESOLVED_CONFIG).read_text() == "of the run\n"
