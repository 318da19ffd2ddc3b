"""Processes of several machines, as they believe: all end soon and name the one to blame, and none waits for ever."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

Start = Callable[..., list[subprocess.Popen[str]]]
MACHINES = "aabbc"


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(
        machines: str = MACHINES, hang_timeout: float = 4.0, *words: str
    ) -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(machines))}
        for rank in range(len(machines)):
            env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command = [
                sys.executable,
                "-m",
                "tests.support.watched_ranks",
                machines,
                str(hang_timeout),
                *words,
            ]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            )
        return processes

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


def wait_until_watched(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "watched\n"


def ends(ranks: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Exit codes and errors of processes, all of which end within that time."""
    deadline = time.monotonic() + seconds
    results = []
    for rank in ranks:
        _, errors = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
        results.append((rank.returncode, errors))
    return results


@pytest.mark.parametrize("machines", ["aabbc", "abcba", "aaa", "abc"])
def test_all_end_well(start: Start, machines: str) -> None:
    ranks = start(machines)
    for code, errors in ends(ranks, 120):
        assert code == 0, errors


@pytest.mark.parametrize("blamed", [1, 2, 3, 4])
def test_a_killed_rank_is_named_on_all_machines(start: Start, blamed: int) -> None:
    """Rank 2 is the one through which rank 3 is heard."""
    ranks = start()
    wait_until_watched(ranks)
    time.sleep(0.5)
    ranks[blamed].kill()
    others = [rank for rank in ranks if rank is not ranks[blamed]]
    for code, errors in ends(others, 30):
        assert code == 1, errors
        assert f"rank {blamed} on {socket.gethostname()} at step" in errors
        assert "ended without a word" in errors


@pytest.mark.parametrize("blamed", [0, 2, 3])
def test_a_stopped_rank_is_named_on_all_machines(start: Start, blamed: int) -> None:
    ranks = start()
    wait_until_watched(ranks)
    time.sleep(0.5)
    ranks[blamed].send_signal(signal.SIGSTOP)
    others = [rank for rank in ranks if rank is not ranks[blamed]]
    for code, errors in ends(others, 60):
        assert code == 1, errors
        assert f"rank {blamed} on {socket.gethostname()} at step" in errors
        assert "no sign of life" in errors


@pytest.mark.parametrize("blamed", [0, 2, 3])
def test_an_error_of_one_is_told_by_all(start: Start, blamed: int) -> None:
    ranks = start(MACHINES, 30.0, str(blamed))
    for rank, (code, errors) in enumerate(ends(ranks, 60)):
        assert code == 1, errors
        assert "as the test wants it" in errors
        if rank != blamed:
            assert f"rank {blamed} on {socket.gethostname()} at step 5, step: failed: ValueError" in errors
