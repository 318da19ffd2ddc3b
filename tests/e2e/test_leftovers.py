"""Kills, checkpoints on two tiers, leftovers: a run that goes on takes the newest whole one, or says why not."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatfm import checkpoint
from megatfm.checkpoint import metadata
from megatfm.config import Config
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE
from tests.support.documentation import ROOT
from tests.support.files import flip_bit, read_lines
from tests.support.forked_commands import ForkedCommand
from tests.support.kill_series import LAYOUTS, PHASES, divide_kills
from tests.support.rank_processes import Fault, Start
from tests.support.training_runs import run_training, training_curve
from tests.support.workers import Workers

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


def test_a_run_resumes_despite_leftovers_and_a_checkpoint_without_permission(start: Start, closed: list[Path]) -> None:
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
    second_run = start(*QUICK, "train.steps=8", fault=UNPRIVILEGED)
    assert second_run.wait(120) == [EXIT_OK, EXIT_OK], second_run.said(0)
    log = (first.folder / "logs" / "rank-0.log").read_text()
    assert f"{newest.name} is not used: can't read {newest}/metadata.json: Permission denied" in log
    assert f"a leftover of a killed save could not be removed: can't remove {stuck}" in log
    assert not partial.exists()
    assert [event["detail"] for event in second_run.events() if event["event"] == "resumed"] == [f"from {before.name}"]
    aside = [path for path in folder.iterdir() if path.name.startswith(".step-00000008.damaged-")]
    closed += aside
    assert len(aside) == 1, "out of the way of the one that is saved in its place"
    checkpoint.check_all_bytes(newest)


def train_in_the_room_of_a_leftover(config: Config) -> int:
    """Train on a disk that a killed save has filled."""
    leftover = config.run_folder / "checkpoints/.step-00000004.partial-0123abcd"
    leftover.mkdir(parents=True)
    with patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if leftover.exists() else 10**12)):
        return run_training(config)


def test_leftovers_are_removed_before_room_is_looked_for(workers: Workers, make_config: Callable[..., Config]) -> None:
    assert workers.run(train_in_the_room_of_a_leftover, 1, make_config("train.steps=2", *QUICK)) == [EXIT_OK]


CLOSED = {
    "checkpoints": r"can't list RUN/checkpoints: Permission denied",
    "lock": r"RUN: can't write the run directory: Permission denied",
    ".": r"RUN: can't write the run directory: Permission denied",
    "checkpoints/step-00000004": r"RUN/checkpoints: none of its 1 checkpoints is intact, see above; move them away",
}


def test_unreadable_leftovers_are_an_error_with_a_reason(start: Start, closed: list[Path]) -> None:
    first = start(*QUICK, "train.steps=4")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    for name, message in CLOSED.items():
        closed.append(first.folder / name)
        mode = closed[-1].stat().st_mode
        closed[-1].chmod(0)
        second_run = start(*QUICK, "train.steps=4", fault=UNPRIVILEGED)
        assert second_run.wait(120) == [EXIT_FAILED, EXIT_FAILED], second_run.said(0)
        closed[-1].chmod(mode)
        for rank in range(2):
            last = second_run.said(rank).splitlines()[-1]
            assert re.match(rf"error: .*{message.replace('RUN', str(first.folder))}", last), second_run.said(rank)
            assert "Traceback" not in second_run.said(rank)


@pytest.mark.parametrize("successor", [False, True])
def test_a_run_directory_that_is_taken_away_ends_the_run(start: Start, tmp_path: Path, successor: bool) -> None:
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
    second_run = start(*QUICK, "train.steps=12")
    assert second_run.wait(120) == [EXIT_USAGE, EXIT_USAGE], "a restart would end alike"
    for rank in range(2):
        assert f"{link} is a symbolic link: put the checkpoint itself there" in second_run.said(rank)
    assert [line["event"] for line in second_run.events()] == ["started", "finished", "refused"]


def test_a_model_for_which_there_is_no_memory_is_one_line(start: Start) -> None:
    run = start(fault=Fault(-1, "startup", "asks_for_too_much"))
    assert run.wait(120) == [EXIT_FAILED, EXIT_FAILED]
    output = run.said(0)
    assert "is out of memory: it held" in output
    assert "Traceback" not in output


def test_a_checkpoint_of_a_step_that_is_no_number_is_one_line(start: Start) -> None:
    """The checkpoint's hash is right, which no accident achieves."""
    first = start(*QUICK, "train.steps=4")
    assert first.wait(120) == [EXIT_OK, EXIT_OK], first.said(0)
    path = first.folder / "checkpoints" / "step-00000004"
    content = metadata.read_metadata(path)
    content.state["step"] = "four"
    (path / metadata.METADATA_FILENAME).write_bytes(metadata.encode_metadata(content))
    second_run = start(*QUICK, "train.steps=8")
    assert second_run.wait(120) == [EXIT_FAILED, EXIT_FAILED]
    assert f"{path}: not a checkpoint of a run: its step is 'four'" in second_run.said(0)
    assert "Traceback" not in second_run.said(0)


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
    completed = subprocess.run([sys.executable, "-c", IMPATIENT, *words], capture_output=True, text=True)
    assert completed.returncode == EXIT_REQUEUE, completed.stderr
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["event"] == "stopped"


# ------------------------------------------------------------------------------------------------------ kills


def run_series(corpus: Path, folder: Path, kills: dict[str, int]) -> dict[str, Any]:
    """In a process of its own: it forks, and so must have no thread."""
    words = [corpus, folder, json.dumps(kills)]
    series = ForkedCommand(words, folder.with_name("said"), ROOT, program="tests.support.kill_series")
    try:
        assert series.wait(850) == 0, series.output[-4000:]
    finally:
        series.end()
    report: dict[str, Any] = json.loads(series.output.splitlines()[-1])
    print(report)
    assert report["kills"] == sum(kills.values())
    assert report["compared"] >= len(kills)
    return report


def test_a_run_killed_in_each_phase_equals_an_undisturbed_one(corpus: Path, tmp_path: Path) -> None:
    report = run_series(corpus, tmp_path / "runs", {"zero 3 on 2": len(PHASES)})
    assert report["hits"] == dict.fromkeys(PHASES, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine; it takes a tenth
def test_killed_runs_of_all_layouts_and_engines_end_alike(corpus: Path, tmp_path: Path) -> None:
    report = run_series(corpus, tmp_path / "runs", divide_kills(23))
    assert {phase: report["hits"].get(phase, 0) >= 3 for phase in PHASES} == dict.fromkeys(PHASES, True)
    by_layout = report["hits by layout"]
    assert all(sum(by_layout[layout].values()) >= 3 for layout in LAYOUTS)
    for world in (1, 2, 4):
        hit = {phase for layout, (ranks, _) in LAYOUTS.items() if ranks == world for phase in by_layout[layout]}
        assert hit == set(PHASES), f"on {world} ranks"


# ------------------------------------------------------------------------------------------------------ tiers


LAST = "step-00000012"


def damage(path: Path) -> None:
    """One bit of one file of tensors."""
    file = path / "rank-00001-000.safetensors"
    flip_bit(file)


def on_nodes(nodes: Path, step: int) -> list[Path]:
    return sorted(nodes.glob(f"node-*/*/step-{step:08d}"))


def lose_a_node(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    shutil.rmtree(nodes / "node-1")


def damage_the_shared(shared: Path, nodes: Path) -> None:
    damage(shared / LAST)


def damage_both_copies(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    for path in on_nodes(nodes, 9):
        damage(path)


def lose_all_nodes(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    shutil.rmtree(nodes)


Accident = Callable[[Path, Path], None]
# What goes wrong after the last step → the step that the run then goes on from.
ACCIDENTS: dict[Accident, int] = {lose_a_node: 9, damage_both_copies: 8}
# A damaged one on the shared disk is in tests/e2e/test_training.py, and what lies there alone every resume reads.
FURTHER_ACCIDENTS: dict[Accident, int] = {damage_the_shared: 9, lose_all_nodes: 8}


@pytest.mark.parametrize("accidents", [
    pytest.param(ACCIDENTS, id="of nodes"),
    pytest.param(FURTHER_ACCIDENTS, id="of either", marks=pytest.mark.extended),
])  # fmt: skip
def test_the_newest_whole_one_of_either_tier_is_taken(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path, accidents: dict[Accident, int]
) -> None:
    """Shared at 4, 8 and 12; each rank stands for a node, with a disk of its own, and saves at 3, 6 and 9."""

    def config(name: str) -> Config:
        local = [f"checkpoint.local_dir={tmp_path / name}-nodes/node-$RANK", "checkpoint.local_every=3"]
        return make_config("parallel.dp_shard=2", "train.steps=12", "evaluate.every=0", *local, run=name)

    assert workers.run(run_training, 2, config("whole")) == [EXIT_OK, EXIT_OK]
    full = tmp_path / "whole"
    assert len(on_nodes(tmp_path / "whole-nodes", 9)) == 2
    assert not on_nodes(tmp_path / "whole-nodes", 12), "both rules name it: it goes to the shared disk"
    expected = checkpoint.read_tensors(full / "checkpoints" / LAST)
    for number, (happens, step) in enumerate(accidents.items()):
        run, nodes = tmp_path / f"run-{number}", tmp_path / f"run-{number}-nodes"
        shutil.copytree(full, run)
        shutil.copytree(tmp_path / "whole-nodes", nodes)
        happens(run / "checkpoints", nodes)
        assert workers.run(run_training, 2, config(run.name)) == [EXIT_OK, EXIT_OK], happens
        events = read_lines(run / "events.jsonl")
        (resumed,) = [event["detail"] for event in events if event["event"] == "resumed"]
        assert resumed == f"from step-{step:08d}", happens
        assert training_curve(run) == training_curve(full), happens
        tensors = checkpoint.read_tensors(run / "checkpoints" / LAST)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items()), happens
