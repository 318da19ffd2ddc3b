"""A node goes away under torchrun's elastic agent: the others go on without it, with a layout that fits them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked_commands import megatfm
from tests.support.rank_processes import free_port

STEPS = 30
# Three data ranks share a batch of twelve, and so can two.
OVERRIDES = (
    f"train.steps={STEPS}", "train.global_batch=12", "train.micro_batch=4", "checkpoint.every=5", "evaluate.max_rows=4",
    "evaluate.every=1000", "optimizer.name=adamw", "log.sinks=[]", "resilience.elastic=true",
)  # fmt: skip
# How soon a silent agent counts as lost, and how long the others wait for more of them (by default 15 s and 30 s).
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=120"
# Of three ranks, steps after the seventh take long enough to be interrupted however busy the machine is.
PAUSES = """
import time
import torch.distributed as dist
from megatfm.engines.native.engine import NativeEngine

genuine, calls = NativeEngine.forward_backward, 0

def forward_backward(*batch, **how):
    global calls
    calls += 1
    if calls > 7 and dist.get_world_size() == 3:
        time.sleep(0.5)
    return genuine(*batch, **how)

NativeEngine.forward_backward = forward_backward
"""


class Node:
    """An agent with one rank."""

    def __init__(self, number: int, port: int, words: list[str], folder: Path) -> None:
        agent = [
            "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3",
            "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
            f"--rdzv-conf={RENDEZVOUS},is_host={int(number == 0)}", "--local-addr=127.0.0.1",
        ]  # fmt: skip
        self.said = folder / f"node-{number}.log"
        with self.said.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *agent, "-m", "megatfm", "train", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}"},
            )

    def is_lost(self) -> None:
        """All its processes die at once."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in (*children, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.process.wait()


def losses(run: Path) -> list[tuple[int, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


@pytest.fixture
def nodes(config_file: Path, tmp_path: Path) -> Iterator[list[Node]]:
    (tmp_path / "pauses.py").write_text(PAUSES)
    port = free_port()
    words = [str(config_file), f"run_dir={tmp_path / 'run'}", 'plugins=["pauses"]', *OVERRIDES]
    nodes = [Node(number, port, words, tmp_path) for number in range(3)]
    yield nodes
    for node in nodes:
        if node.process.poll() is None:
            node.is_lost()


@pytest.mark.timeout(900)
def test_the_run_goes_on_without_a_node(nodes: list[Node], config_file: Path, tmp_path: Path) -> None:
    run, deadline = tmp_path / "run", time.monotonic() + 240
    while len(losses(run)) < 7:
        assert time.monotonic() < deadline, [node.said.read_text() for node in nodes]
        time.sleep(0.02)
    nodes[2].is_lost()
    assert len(losses(run)) < STEPS, "in the middle"
    for node in nodes[:2]:
        assert node.process.wait(300) == 0, node.said.read_text()
    words = [str(config_file), f"run_dir={tmp_path / 'whole'}", *OVERRIDES]
    megatfm("train", *words, output=tmp_path / "said")
    of_nodes, of_one = losses(run), losses(tmp_path / "whole")
    assert [step for step, _ in of_nodes] == [step for step, _ in of_one] == list(range(1, STEPS + 1))
    assert [loss for _, loss in of_nodes] == pytest.approx([loss for _, loss in of_one], rel=1e-5)
    text = (run / "logs" / "rank-0.log").read_text()
    assert "dp_shard 3" in text
    assert "dp_shard 2" in text
