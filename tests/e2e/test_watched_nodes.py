"""Processes of several machines, as they believe: all end soon and name the one to blame, and none waits for ever."""

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.watched_ranks import STEPS, WatchedRanks

Start = Callable[..., WatchedRanks]
HOST = socket.gethostname()
SLOW = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`ranks = start()`: of machines a, b and c, on which rank 2 relays what rank 3 says; ended when the test is."""
    started: list[WatchedRanks] = []

    def start(
        machines: str = "aabbc", hang_timeout: float = 30.0, failing: int | None = None
    ) -> WatchedRanks:
        started.append(WatchedRanks(tmp_path, machines, hang_timeout, failing))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.mark.parametrize(
    "machines", ["abcba", pytest.param("aabbc", marks=SLOW), pytest.param("aaa", marks=SLOW)]
)
def test_all_end_well(start: Start, machines: str) -> None:
    for code, output in start(machines).ends(60).values():
        assert code == 0, output
        assert f"step {STEPS - 1}\n" in output


@pytest.mark.parametrize("blamed", [2, 3, pytest.param(0, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_a_killed_rank_is_named_on_all_machines(start: Start, blamed: int) -> None:
    ranks = start()
    ranks.wait_until_watched()
    ranks.signal(blamed, signal.SIGKILL)
    for code, output in ranks.ends(30, without=blamed).values():
        assert code == 1, output
        assert f"error: rank {blamed} on {HOST} at step" in output
        assert "ended without an error message" in output


@pytest.mark.parametrize("blamed", [2, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_stopped_rank_is_named_on_all_machines(start: Start, blamed: int) -> None:
    ranks = start(hang_timeout=3.0)
    ranks.wait_until_watched()
    ranks.signal(blamed, signal.SIGSTOP)
    for code, output in ranks.ends(40, without=blamed).values():
        assert code == 1, output
        assert f"error: rank {blamed} on {HOST} at step" in output
        assert "no sign of life" in output


@pytest.mark.parametrize("failing", [2, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_an_error_of_one_is_told_by_all(start: Start, failing: int) -> None:
    for rank, (code, output) in start(failing=failing).ends(60).items():
        assert code == 1, output
        assert "as the test wants it" in output
        if rank != failing:
            assert f"rank {failing} on {HOST} at step 5, step: failed: ValueError" in output
