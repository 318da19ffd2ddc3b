"""One rank fails, dies, is stopped or falls behind: all end soon, and everybody hears who it was."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, LOCKED
from tests.support.forked_commands import ForkedCommand, send_signal
from tests.support.rank_processes import Fault, Ranks, Start
from tests.support.small_runs import SMALL_CONFIG

HANG = 10.0
"""Seconds: on a busy machine, a rank that is well may be silent for some of them."""
HOST = socket.gethostname()
# Which rank misbehaves in which phase: rank 0, who listens, too.
FAULTS = [(1, "startup"), (0, "step"), (1, "evaluation"), (0, "save")]
STEPS = {"startup": 0, "step": 2, "evaluation": 2, "save": 6}
# A save goes on in the background: to the next one, which waits for it.
SEEN_IN = {"startup": "start", "step": "step", "evaluation": "evaluation", "save": "(?:save|step|evaluation)"}


Case = tuple[str, tuple[int, str]]


def parametrize_cases(first: list[Case], faults: dict[str, list[tuple[int, str]]]) -> Any:
    """Cases side by side: the first, which have each way in some phase and each phase, and all others."""
    remaining = [(how, fault) for how in faults for fault in faults[how] if (how, fault) not in first]
    return pytest.mark.parametrize(
        "cases", [pytest.param(first, id="each"), pytest.param(remaining, id="others", marks=pytest.mark.slow)]
    )


@pytest.fixture(scope="module", autouse=True)
def without_rank_1(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of three, which wait for the other one while the first tests run."""
    folder = tmp_path_factory.mktemp("missing")
    (folder / "small.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
    ranks = Ranks(str(folder / "small.toml"), ["train.hang_seconds=5"], folder / "run")
    yield ranks.start(3, Fault(-1, "meeting", "has_little_patience"), absent=[1])
    ranks.end()


@parametrize_cases(
    [("raises", FAULTS[1]), ("raises", FAULTS[3]), ("exits", FAULTS[0]), ("is_killed", FAULTS[2])],
    dict.fromkeys(("raises", "exits", "is_killed"), FAULTS),
)
def test_a_rank_that_ends_ends_all_at_once_and_is_named(start: Start, cases: list[Case]) -> None:
    runs = {
        (how, fault): start("train.hang_seconds=600", run=f"{how}-{fault[1]}", fault=Fault(*fault, how))
        for how, fault in cases
    }
    for (how, (rank, phase)), run in runs.items():
        codes = run.wait(60)
        assert codes[1 - rank] == EXIT_FAILED, (phase, codes, run.said(1 - rank))
        assert codes[rank] == {"raises": EXIT_FAILED, "exits": 3, "is_killed": -9}[how], phase
        output = run.said(1 - rank)
        (failed,) = [event for event in run.events() if event["event"] == "failed"]
        if (how, phase) == ("raises", "save"):  # where the store lets all ranks fail alike, and says why
            assert (
                f"error: checkpoint of step 3 not saved: rank {rank} on {HOST}: ZeroDivisionError: a planted fault\n"
                == output
            )
            assert failed["ranks"] == []
            continue
        reason = "failed: ZeroDivisionError: a planted fault" if how == "raises" else "ended without an error message"
        match = re.search(rf"error: rank {rank} on {HOST} at step (\d+), {SEEN_IN[phase]}: {reason}", output)
        assert match, (phase, output)
        assert int(match[1]) == STEPS[phase] if how == "raises" else int(match[1]) <= STEPS[phase]
        assert (failed["ranks"], failed["hosts"]) == ([rank], [HOST]), phase


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_stage_that_raises_in_a_schedule_is_named(start: Start, ranks: int) -> None:
    """All ranks end at once.

    While some ranks wait for its gradients, and others for hidden vectors that it has yet to ask for.
    """
    layout, rank = ("parallel.pp=4", f"parallel.dp_shard={ranks // 4}"), ranks // 2 + 1
    run = start(*layout, "train.micro_batch=2", ranks=ranks, fault=Fault(rank, "schedule", "raises"))
    run.processes[rank].join(120)
    assert run.wait(60) == [EXIT_FAILED] * ranks, [run.said(rank)[-300:] for rank in range(ranks)]
    (failed,) = [event for event in run.events() if event["event"] == "failed"]
    assert failed["ranks"] == [rank]
    assert "ZeroDivisionError: a planted fault" in run.said(rank)
    remaining = [run.said(item) for item in range(ranks) if item != rank]
    assert all(f"error: rank {rank} on {HOST} at step " in log_text for log_text in remaining), remaining


@parametrize_cases(
    [
        ("is_stopped", FAULTS[0]),
        ("sleeps", FAULTS[1]),
        ("sticks_and_holds_the_interpreter", FAULTS[2]),
        ("sticks_in_c", FAULTS[3]),
    ],
    {"is_stopped": FAULTS, "sleeps": FAULTS, "sticks_in_c": FAULTS[1::2]},
)
def test_a_rank_that_hangs_is_named_within_the_time_that_is_set(start: Start, cases: list[Case]) -> None:
    runs = {
        (how, fault): start(f"train.hang_seconds={HANG}", run=f"{how}-{fault[1]}", fault=Fault(*fault, how))
        for how, fault in cases
    }
    for (how, (rank, phase)), run in runs.items():
        codes = run.wait(HANG + 60, without=[rank] if how == "is_stopped" else [])
        assert codes[1 - rank] == EXIT_FAILED, (phase, codes, run.said(1 - rank))
        output = run.said(1 - rank)
        reason = "has made no progress for" if how in ("sleeps", "sticks_in_c") else "no sign of life for"
        named = rf"error: rank {rank} on {HOST} at step \d+, {SEEN_IN[phase]}: {reason} (\d+) s"
        match = re.search(named, output)
        assert match, (phase, output)
        assert float(match[1]) >= HANG, "test_hang_detector.py has it to the second"
        (failed,) = [event for event in run.events() if event["event"] == "failed"]
        assert (failed["ranks"], failed["hosts"]) == ([rank], [HOST])
        log = (run.folder / "logs" / f"rank-{1 - rank}.log").read_text()
        assert f"The stacks of rank {1 - rank}, at step" in log, "of those who wait, too"
        assert "most recent call first" in log
        if how != "is_stopped":
            assert codes[rank] == EXIT_FAILED, phase
            log = (run.folder / "logs" / f"rank-{rank}.log").read_text()
            assert f"in {how}" in log, (phase, "the stack of the rank that hangs", log)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_fills_up_in_the_middle_of_a_save_ends_all_ranks(start: Start, mode: str) -> None:
    full = Fault(1, "second save", "has_no_room_for_a_file")
    run = start(f"checkpoint.mode={mode}", "log.sinks=[]", fault=full)
    assert run.wait(60) == [EXIT_FAILED, EXIT_FAILED], run.said(0)
    refused = rf"rank 1 on {HOST}: can't write \S+/rank-00001-000\.safetensors: File too large"
    for rank in range(2):
        output = run.said(rank)
        assert re.search(rf"^error: checkpoint of step 6 not saved: {refused}$", output, re.MULTILINE), output
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000003"]
    checkpoint.check_all_bytes(run.folder / "checkpoints" / "step-00000003")
    second_run = start("train.steps=7", 'resume.allow=["schedule"]')
    assert second_run.wait(60) == [EXIT_OK, EXIT_OK], second_run.said(0)


def test_a_run_resumes_from_node_local_checkpoints_without_one_node(start: Start, tmp_path: Path) -> None:
    # Each rank stands for a node, with a disk of its own.
    often = (
        "train.steps=16", "checkpoint.every=100", "evaluate.every=0", "evaluate.max_rows=2", "log.sinks=[]",
        "checkpoint.local_every=2", f"checkpoint.local_dir={tmp_path}/node-$RANK",
    )  # fmt: skip
    full = start(*often, run="whole")
    assert full.wait(90) == [EXIT_OK, EXIT_OK], full.said(0)
    run = start(*often, fault=Fault(-1, "tenth step", "is_killed"))  # when step 6 is saved for sure, and 8 perhaps
    assert -signal.SIGKILL in run.wait(60), run.said(0)  # at most one learns of the other's end before its own
    assert None not in run.wait(60)
    assert not list((run.folder / "checkpoints").glob("step-*"))
    shutil.rmtree(tmp_path / "node-1")
    second_run = start(*often)
    assert second_run.wait(90) == [EXIT_OK, EXIT_OK], second_run.said(0)
    (resumed,) = [event["detail"] for event in second_run.events() if event["event"] == "resumed"]
    assert int(resumed.removeprefix("from step-")) >= 6
    last = "checkpoints/step-00000016"
    first, second = (checkpoint.read_tensors(folder / last) for folder in (full.folder, run.folder))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (full.folder, run.folder)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 16


def test_a_missing_rank_is_named(without_rank_1: Ranks) -> None:
    assert without_rank_1.wait(60) == [EXIT_FAILED, EXIT_FAILED]
    output = "error: rank 1 of 3 did not start within 5 s: check its log or its node\n"
    assert without_rank_1.said(0).endswith(output)


def test_one_interrupt_saves_and_a_second_ends_a_rank_that_is_stuck(start: Start) -> None:
    early = start(run="early", fault=Fault(1, "startup", "is_asked_to_stop"))
    quiet = start("train.steps=20000", "evaluate.every=0", run="quiet")
    stuck = start("train.hang_seconds=600", run="stuck", fault=Fault(1, "step", "sticks_in_c"))
    twice = start(run="twice", fault=Fault(1, "step", "is_interrupted_twice"))
    quiet.wait_for_step(2)
    quiet.signal(0, signal.SIGINT)
    assert quiet.wait(60) == [EXIT_REQUEUE, EXIT_REQUEUE], quiet.said(0)
    steps = (quiet.folder / "metrics.jsonl").read_bytes().count(b"\n")
    checkpoint.check_all_bytes(quiet.folder / f"checkpoints/step-{steps:08d}")
    assert twice.wait(60) == [EXIT_FAILED, 128 + signal.SIGINT], twice.said(0)
    assert f"error: rank 1 on {HOST} at step 2, step: failed: KeyboardInterrupt" in twice.said(0)
    assert not (twice.folder / "checkpoints").exists(), "stopped at once, without saving"
    assert early.wait(60) == [EXIT_REQUEUE, EXIT_REQUEUE], early.said(0)
    assert not (early.folder / "checkpoints").exists(), "asked before the first step: nothing to save"
    assert not (early.folder / "metrics.jsonl").exists()
    stuck.wait_for_step(2)
    for _ in range(2):
        send_signal(stuck.processes[1].pid or 0, signal.SIGINT)
    assert stuck.wait(60) == [EXIT_FAILED, 128 + signal.SIGINT], stuck.said(0)
    assert "rank 1 on" in stuck.said(0)


def test_an_active_run_is_locked_and_a_killed_one_is_not(start: Start) -> None:
    first = start("train.steps=20000", "evaluate.every=0")
    first.wait_for_step(2)
    second = start(run="run")
    assert second.wait(60) == [LOCKED, LOCKED]
    assert f"another process is training in this run directory (process {first.processes[0].pid} on" in second.said(1)
    assert all(process.is_alive() for process in first.processes)
    for rank in range(2):
        first.signal(rank, signal.SIGKILL)
    first.wait(20)
    assert (first.folder / "lock").read_text(), "left over"
    assert start("train.steps=20000", 'resume.allow=["schedule"]', "evaluate.every=0").wait_for_step(1) is None


CRASHES = """
from megatfm.engines.native.engine import NativeEngine
def forward_backward(*_, **__):
    raise RuntimeError("never gets far")
NativeEngine.forward_backward = forward_backward
"""


def test_torchrun_restarts_and_the_run_gives_up_when_nothing_is_gained(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    words = [
        str(config_file), f"run_dir={tmp_path / 'run'}", 'plugins=["crashes"]', "resilience.max_failures=1",
    ]  # fmt: skip
    agent = ["--standalone", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1"]
    torchrun = ForkedCommand(
        [*agent, "-m", "megatfm", "train", *words],
        tmp_path / "said",
        environment={**os.environ, "PYTHONPATH": str(tmp_path)},
        program="torch.distributed.run",
    )
    assert torchrun.wait(120) != 0
    output = torchrun.output
    assert "never gets far" in output
    assert "1 restarts in a row saved no checkpoint after step 0 (resilience.max_failures)" in output


# ------------------------------------------------------------------------------------------------------ preflight


def ends_with(run: Ranks, *words: str) -> None:
    codes = run.wait(60)
    assert codes == [EXIT_FAILED] * len(codes)
    for rank in range(len(codes)):
        output = run.said(rank)
        assert "the check before training failed" in output
        assert output.count("\n") == 1, "one line"
        for word in words:
            assert word in output
    assert not (run.folder / "checkpoints").exists()


def test_before_training_what_is_broken_is_named_with_its_rank(start: Start) -> None:
    disk = start(run="disk", fault=Fault(1, "preflight", "has_no_room_for_a_file"))
    memory = start(run="memory", fault=Fault(1, "preflight", "has_no_memory"))
    total = start(run="sum", fault=Fault(1, "preflight", "miscounts"))
    slow = start(run="slow", fault=Fault(1, "preflight", "writes_slowly"))
    ends_with(disk, f"rank 1 on {HOST}", str(disk.folder), "File too large")
    ends_with(memory, f"rank 1 on {HOST}", "gradients and optimizer state need")
    ends_with(total, f"rank 0 on {HOST}, rank 1 on {HOST}: a sum over the axis dp_shard is wrong")
    assert slow.wait(60) == [EXIT_OK, EXIT_OK], "slow is no reason not to train"
    output = [event["detail"] for event in slow.events() if event["event"] == "slow"]
    words = f"rank 1 on {HOST} is slow: writing and syncing a file took"
    assert any(event.startswith(words) for event in output), output  # a busy machine may be slow elsewhere too
    assert not list(slow.folder.glob(".probe*"))


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small disk")
def test_a_disk_too_small_for_the_checkpoints_is_seen_beforehand(start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "run"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        ends_with(start("checkpoint.keep=3"), "B are free, but 4 more checkpoints of", "checkpoint.keep")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
