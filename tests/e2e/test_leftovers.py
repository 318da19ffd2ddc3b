"""What a run finds where it goes on: leftovers, stale locks, what it may not read. It starts, or says why."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatfm import checkpoint
from megatfm.checkpoint import metadata
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE
from tests.support.rank_processes import Fault, Start

HOST = socket.gethostname()
UNPRIVILEGED = Fault(-1, "meeting", "gives_up_its_privileges")
QUICK = ("evaluate.every=0", "evaluate.max_rows=2", "log.sinks=[]", "checkpoint.every=4")


@pytest.fixture
def closed() -> Iterator[list[Path]]:
    """Folders that are closed when the test is; opened again at its end, so that they can be removed."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        if path.exists():
            path.chmod(0o755)


def test_leftovers_and_a_checkpoint_without_permission_stop_nobody(start: Start, closed: list[Path]) -> None:
    first = start(*QUICK, "train.steps=8")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    folder = first.folder / "checkpoints"
    newest, before = folder / "step-00000008", folder / "step-00000004"
    partial, stuck = folder / ".step-00000012.partial-0123abcd", folder / ".step-00000001.removed-0123abcd"
    for leftover in (partial, stuck):
        leftover.mkdir()
        (leftover / "rank-00000-000.safetensors").write_bytes(b"half")
    (first.folder / "lock").write_text(json.dumps({"host": HOST, "pid": 2**22 - 1, "job": None}))
    (first.folder / ".config.toml.tmp").write_text("half")
    closed += [newest, stuck]
    for path in closed:
        path.chmod(0)
    again = start(*QUICK, "train.steps=8", fault=UNPRIVILEGED)
    assert again.wait(120) == [EXIT_OK, EXIT_OK], again.said(0)
    log = (first.folder / "logs" / "rank-0.log").read_text()
    assert f"{newest.name} is not used: cannot read {newest}/metadata.json: Permission denied" in log
    assert f"a leftover of a killed save could not be removed: cannot remove {stuck}" in log
    assert not partial.exists()
    assert [event["detail"] for event in again.events() if event["event"] == "resumed"] == [
        f"from {before.name}"
    ]
    aside = [path for path in folder.iterdir() if path.name.startswith(".step-00000008.damaged-")]
    closed += aside
    assert len(aside) == 1, "out of the way of the one that is saved in its place"
    checkpoint.verify(newest)


CLOSED = {
    "checkpoints": r"cannot list RUN/checkpoints: Permission denied",
    "lock": r"RUN: can't write the run directory: Permission denied",
    ".": r"RUN: can't write the run directory: Permission denied",
    "checkpoints/step-00000004": r"RUN/checkpoints: none of its 1 checkpoints is intact, see above; move them away",
}


def test_what_can_not_be_gone_on_from_says_why(start: Start, closed: list[Path]) -> None:
    first = start(*QUICK, "train.steps=4")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    for name, message in CLOSED.items():
        closed.append(first.folder / name)
        mode = closed[-1].stat().st_mode
        closed[-1].chmod(0)
        again = start(*QUICK, "train.steps=4", fault=UNPRIVILEGED)
        assert again.wait(120) == [EXIT_FAILED, EXIT_FAILED], again.said(0)
        closed[-1].chmod(mode)
        for rank in range(2):
            last = again.said(rank).splitlines()[-1]
            assert re.match(rf"error: .*{message.replace('RUN', str(first.folder))}", last), again.said(rank)
            assert "Traceback" not in again.said(rank)


@pytest.mark.parametrize("successor", [False, True])
def test_a_run_directory_that_is_taken_away_ends_the_run(
    start: Start, tmp_path: Path, successor: bool
) -> None:
    """The folder is not made again: whoever starts in a new folder of that name must be alone there."""
    run = start(*QUICK, "train.steps=10000")
    run.wait_for_step(3)
    aside = run.folder.with_name("aside")
    run.folder.rename(aside)
    if successor:
        (run.folder / "checkpoints").mkdir(parents=True)
        (run.folder / "lock").write_text("another's")
    assert run.wait(60) == [EXIT_FAILED, EXIT_FAILED]
    for rank in range(2):
        assert "removed, moved or replaced during training" in run.said(rank), run.said(rank)
        assert "Traceback" not in run.said(rank)
    left = sorted(path.name for path in run.folder.rglob("*")) if run.folder.exists() else []
    assert left == (["checkpoints", "lock"] if successor else [])


def test_a_link_in_the_place_of_a_checkpoint_is_refused_at_the_start(start: Start) -> None:
    first = start(*QUICK, "train.steps=4")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    link = first.folder / "checkpoints" / "step-00000008"
    link.symlink_to(first.folder / "checkpoints" / "step-00000004")
    again = start(*QUICK, "train.steps=12")
    assert again.wait(120) == [EXIT_FAILED, EXIT_FAILED]
    for rank in range(2):
        assert f"{link} is a symbolic link: put the checkpoint itself there" in again.said(rank)
    assert "resumed" not in [line["event"] for line in again.events()]


def test_a_model_for_which_there_is_no_memory_is_one_line(start: Start) -> None:
    run = start(fault=Fault(-1, "startup", "asks_for_too_much"))
    assert run.wait(120) == [EXIT_FAILED, EXIT_FAILED]
    output = run.said(0)
    assert "is out of memory: it held" in output
    assert "Traceback" not in output


def test_a_checkpoint_of_a_step_that_is_no_number_is_one_line(start: Start) -> None:
    """With the right hash, as an accident never has it."""
    first = start(*QUICK, "train.steps=4")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    path = first.folder / "checkpoints" / "step-00000004"
    content = metadata.read_metadata(path)
    content.state["step"] = "four"
    (path / metadata.METADATA_FILENAME).write_bytes(metadata.encode_metadata(content))
    again = start(*QUICK, "train.steps=8")
    assert again.wait(120) == [EXIT_FAILED, EXIT_FAILED]
    assert f"{path}: not a checkpoint of a run: its step is 'four'" in again.said(0)
    assert "Traceback" not in again.said(0)


IMPATIENT = """
import os, signal, sys
from megatfm import cli
import megatfm.commands.training as command

def asked(*words):
    os.kill(os.getpid(), signal.SIGUSR1)  # long before torch is imported, and its handlers are there
    return genuine(*words)

genuine, command.load_training_config = command.load_training_config, asked
cli.main(sys.argv[1:])
"""


def test_a_signal_while_it_starts_is_heard_as_soon_as_it_can_be(config_file: Path, tmp_path: Path) -> None:
    words = ["train", str(config_file), f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", IMPATIENT, *words], capture_output=True, text=True)
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["event"] == "stopped"
