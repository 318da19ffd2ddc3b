"""Nodes that go away under torchrun's elastic agent, and processes of several machines: all end soon or go on."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from megatfm.errors import MegatfmError
from megatfm.launchers.local import find_free_port
from megatfm.parallel.distributed import distributed_session
from megatfm.train import rank_monitor_client
from megatfm.train.rank_monitor_client import RankMonitor
from tests.support.forked_commands import ForkedCommand, run_megatfm
from tests.support.rank_processes import make_rank_variables, set_up_rank
from tests.support.small_runs import SMALL_CONFIG
from tests.support.workers import start_fork_server

STEPS = 30


class WatchedRanks:
    """Processes forked from one that has imported all there is to import.

    machines: a letter for each rank. failing: the rank that raises at step 5.
    """

    def __init__(self, folder: Path, machines: str, hang_timeout: float, failing: int | None = None) -> None:
        context = start_fork_server()
        port = find_free_port()
        self._outputs = [folder / f"{rank}.txt" for rank in range(len(machines))]
        self._processes = [
            context.Process(target=_run_rank, args=(output, port, rank, machines, hang_timeout, failing))
            for rank, output in enumerate(self._outputs)
        ]
        for process in self._processes:
            process.start()

    def wait_until_watched(self) -> None:
        """Wait until all ranks move on."""
        deadline = time.monotonic() + 60
        while not all(output.exists() and "step 3\n" in output.read_text() for output in self._outputs):
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        os.kill(self._processes[rank].pid or 0, number)

    def wait_for_exits(self, seconds: float, without: int | None = None) -> dict[int, tuple[int | None, str]]:
        """Wait so long at most, and return exit codes (None: still runs) and outputs by rank."""
        deadline = time.monotonic() + seconds
        ranks = [rank for rank in range(len(self._processes)) if rank != without]
        for rank in ranks:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        return {rank: (self._processes[rank].exitcode, self._outputs[rank].read_text()) for rank in ranks}

    def outputs(self) -> list[str]:
        """Return what each rank has said."""
        return [output.read_text() if output.exists() else "" for output in self._outputs]

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.join()


def _run_rank(output: Path, port: int, rank: int, machines: str, hang_timeout: float, failing: int | None) -> None:
    set_up_rank(make_rank_variables(rank, len(machines), port), output)
    vars(rank_monitor_client)["machine"] = lambda: machines[rank]
    try:
        with distributed_session(60.0, "cpu", 60.0) as info, RankMonitor(info, hang_timeout) as monitor:
            for step in range(STEPS):
                monitor.tick(step, "step")
                os.write(1, f"step {step}\n".encode())
                if step == 5 and rank == failing:
                    raise ValueError("as the test wants it")
                dist.monitored_barrier(timeout=timedelta(seconds=60))
                time.sleep(0.05)
    except (MegatfmError, ValueError) as error:
        os.write(2, f"error: {error}\n".encode())
        sys.exit(1)


SLOW, EXTENDED = pytest.mark.slow, pytest.mark.extended
pytestmark = pytest.mark.timeout(900)  # the first test waits until three nodes train
TOTAL = 30
# Three data ranks share a batch of twelve, and so can two.
OVERRIDES = (
    f"train.steps={TOTAL}", "train.global_batch=12", "train.micro_batch=4", "checkpoint.every=5", "evaluate.max_rows=4",
    "evaluate.every=1000", "optimizer.name=adamw", "log.sinks=[]", "resilience.elastic=true",
)  # fmt: skip
# When a silent agent counts as lost (12 s: on a busy machine one may be silent for 6), and how long the others wait for
# more of them (by default 15 s and 30 s).
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=6,last_call_timeout=10,join_timeout=240"
# torchrun whose agents join when all three are there: on a busy machine more than ten seconds may lie between them.
AGENT = """
import sys, time
from pathlib import Path
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

genuine, ready = DynamicRendezvousHandler.next_rendezvous, Path(__file__).with_name(f"ready-{sys.argv.pop(1)}")

def next_rendezvous(handler):
    ready.touch()
    while len(list(ready.parent.glob("ready-*"))) < 3:
        time.sleep(0.02)
    return genuine(handler)

DynamicRendezvousHandler.next_rendezvous = next_rendezvous
main()
"""
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
            "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3",
            "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
            f"--rdzv-conf={RENDEZVOUS},is_host=0", "--local-addr=127.0.0.1",
        ]  # fmt: skip
        self.agent = ForkedCommand(
            [number, *agent, "-m", "megatfm", "train", *words],
            folder / f"node-{number}.log",
            environment={
                **os.environ,
                "PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            program=str(folder / "agent.py"),
        )

    def list_children(self) -> list[int]:
        """Return the pids of its ranks."""
        return list(map(int, Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()))

    def has_open(self, log: Path) -> bool:
        """Return whether one of its ranks writes this log."""
        files = (file for pid in self.list_children() for file in Path(f"/proc/{pid}/fd").iterdir())
        return log.resolve() in (file.resolve() for file in files)

    def kill(self) -> None:
        """Kill all its processes at once."""
        for pid in (*self.list_children(), self.agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.process.join()


def losses(run: Path) -> list[tuple[int, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


@dataclass
class LostNode:
    """A run on three nodes of which one is lost, and the folder of the same run on one rank."""

    folder: Path
    nodes: list[Node]
    lost: Node
    store: TCPStore
    """The host of the rendezvous outlives all nodes."""

    def end(self) -> None:
        """Kill what still runs."""
        for node in self.nodes:
            if node.agent.process.is_alive():
                node.kill()


def lose_a_node(corpus: Path, folder: Path, rank: int) -> LostNode:
    """Train on three nodes, kill that of a rank in the middle, and train on one rank while the others look for it."""
    (folder / "pauses.py").write_text(PAUSES)
    (folder / "agent.py").write_text(AGENT)
    (folder / "small.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
    words, run, port = [str(folder / "small.toml"), *OVERRIDES], folder / "run", find_free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    on_nodes = [*words, f"run_dir={run}", 'plugins=["pauses"]']
    nodes = [Node(number, port, on_nodes, folder) for number in range(3)]
    deadline = time.monotonic() + 300
    while len(losses(run)) < 7:
        assert time.monotonic() < deadline, [node.agent.output for node in nodes]
        time.sleep(0.02)
    (lost,) = (node for node in nodes if node.has_open(run / "logs" / f"rank-{rank}.log"))
    lost.kill()
    assert len(losses(run)) < TOTAL, "in the middle"
    run_megatfm("train", *words, f"run_dir={folder / 'whole'}", output=folder / "said")
    return LostNode(folder, nodes, lost, store)


@pytest.fixture(scope="module")
def without_rank_0(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LostNode]:
    """Ranks meet at another node's store after the loss of the first one."""
    lost_node = lose_a_node(corpus, tmp_path_factory.mktemp("nodes"), 0)
    yield lost_node
    lost_node.end()


@pytest.fixture(autouse=True)
def ahead(without_rank_0: LostNode) -> None:
    """The nodes that are left wait for the lost one, 22 s in all, while the other tests run."""


def assert_resumed(lost_node: LostNode) -> None:
    """Wait for the nodes that are left; their run is that of one rank."""
    for node in lost_node.nodes:
        assert node is lost_node.lost or node.agent.wait(300) == 0, node.agent.output
    of_nodes, of_one = losses(lost_node.folder / "run"), losses(lost_node.folder / "whole")
    assert [step for step, _ in of_nodes] == [step for step, _ in of_one] == list(range(1, TOTAL + 1))
    assert [loss for _, loss in of_nodes] == pytest.approx([loss for _, loss in of_one], rel=1e-5)
    text = (lost_node.folder / "run" / "logs" / "rank-0.log").read_text()
    assert "dp_shard 3" in text
    assert "dp_shard 2" in text


# ---------------------------------------------------------------------------------------------- watched nodes


Start = Callable[..., WatchedRanks]
HOST = socket.gethostname()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`ranks = start()`: of machines a, b and c, on which rank 2 relays what rank 3 says; ended when the test is."""
    started: list[WatchedRanks] = []

    def start(machines: str = "aabbc", hang_timeout: float = 30.0, failing: int | None = None) -> WatchedRanks:
        started.append(WatchedRanks(tmp_path, machines, hang_timeout, failing))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.mark.parametrize("machines", ["abcba", pytest.param("aabbc", marks=SLOW), pytest.param("aaa", marks=SLOW)])
def test_all_end_well(start: Start, machines: str) -> None:
    for code, output in start(machines).wait_for_exits(60).values():
        assert code == 0, output
        assert f"step {STEPS - 1}\n" in output


# What is said of 3, rank 2 relays; of 2 it is below, where it is stopped or fails.
@pytest.mark.parametrize(("number", "blamed"), [
    (signal.SIGKILL, 3), pytest.param(signal.SIGKILL, 2, marks=EXTENDED),
    *(pytest.param(signal.SIGKILL, rank, marks=SLOW) for rank in (0, 4)),
    (signal.SIGSTOP, 2), *(pytest.param(signal.SIGSTOP, rank, marks=SLOW) for rank in (0, 3)),
], ids=lambda value: getattr(value, "name", None))  # fmt: skip
def test_a_killed_or_stopped_rank_is_named_on_all_machines(start: Start, number: signal.Signals, blamed: int) -> None:
    is_killed = number == signal.SIGKILL
    ranks = start() if is_killed else start(hang_timeout=3.0)
    ranks.wait_until_watched()
    ranks.signal(blamed, number)
    for code, output in ranks.wait_for_exits(40, without=blamed).values():
        assert code == 1, output
        assert f"error: rank {blamed} on {HOST} at step" in output
        assert ("ended without an error message" if is_killed else "no sign of life") in output


@pytest.mark.parametrize("failing", [2, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_an_error_of_one_rank_is_reported_by_all(start: Start, failing: int) -> None:
    for rank, (code, output) in start(failing=failing).wait_for_exits(60).items():
        assert code == 1, output
        assert "as the test wants it" in output
        if rank != failing:
            assert f"rank {failing} on {HOST} at step 5, step: failed: ValueError" in output


# --------------------------------------------------------------------------------------------- without a node


def test_a_run_resumes_without_a_node(without_rank_0: LostNode) -> None:
    assert_resumed(without_rank_0)


@SLOW
def test_a_run_resumes_without_its_last_node(corpus: Path, tmp_path: Path) -> None:
    lost_node = lose_a_node(corpus, tmp_path, 2)
    try:
        assert_resumed(lost_node)
    finally:
        lost_node.end()
