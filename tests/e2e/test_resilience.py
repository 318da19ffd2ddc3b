"""One rank fails, dies, is stopped or falls behind: all end soon, and everybody hears who it was."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Fault, Ranks

HANG = 4.0
LAYOUT = ("parallel.dp_shard=2", "evaluate.every=2", "checkpoint.every=3", "train.steps=10")
HOST = socket.gethostname()
# Which rank misbehaves in which phase: rank 0, who listens, too.
FAULTS = [(1, "startup"), (0, "step"), (1, "evaluation"), (0, "save")]
STEPS = {"startup": 0, "step": 2, "evaluation": 2, "save": 3}
SEEN_IN = {"startup": "start", "step": "step", "evaluation": "evaluation", "save": "save"}


@pytest.fixture
def start(config_file: Path, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    runs: list[Ranks] = []

    def start(*overrides: str, run: str = "run", ranks: int = 2, fault: Fault | None = None) -> Ranks:
        runs.append(Ranks(str(config_file), (*LAYOUT, *overrides), tmp_path / run))
        return runs[-1].start(ranks, fault)

    yield start
    for run in runs:
        run.end()


@pytest.mark.parametrize("how", ["raises", "exits", "is_killed"])
def test_a_rank_that_ends_ends_all_at_once_and_is_named(start: Callable[..., Ranks], how: str) -> None:
    runs = {(r, p): start("train.hang_seconds=600", run=p, fault=Fault(r, p, how)) for r, p in FAULTS}
    for (rank, phase), run in runs.items():
        codes = run.wait(60)
        assert codes[1 - rank] == 1, (phase, codes, run.said(1 - rank))
        assert codes[rank] == {"raises": 1, "exits": 3, "is_killed": -9}[how], phase
        what = "failed: ZeroDivisionError: a planted fault" if how == "raises" else "ended without a word"
        said = run.said(1 - rank)
        seen = re.search(rf"error: rank {rank} on {HOST} at step (\d+), {SEEN_IN[phase]}: {what}", said)
        assert seen, (phase, said)
        assert int(seen[1]) == STEPS[phase] if how == "raises" else int(seen[1]) <= STEPS[phase]
        failed = [event for event in run.events() if event["event"] == "failed"]
        if phase != "startup":
            assert [(event["ranks"], event["hosts"]) for event in failed] == [([rank], [HOST])], phase


@pytest.mark.parametrize("how", ["is_stopped", "sleeps", "sticks_in_c", "sticks_and_holds_the_interpreter"])
def test_a_rank_that_hangs_is_named_within_the_time_that_is_set(
    start: Callable[..., Ranks], how: str
) -> None:
    runs = {(r, p): start(f"train.hang_seconds={HANG}", run=p, fault=Fault(r, p, how)) for r, p in FAULTS}
    for (rank, phase), run in runs.items():
        codes = run.wait(HANG + 60, without=[rank] if how == "is_stopped" else [])
        assert codes[1 - rank] == 1, (phase, codes, run.said(1 - rank))
        said = run.said(1 - rank)
        what = "has not moved for" if how in ("sleeps", "sticks_in_c") else "no sign of life for"
        assert re.search(rf"error: rank {rank} on {HOST} at step \d+, {SEEN_IN[phase]}: {what}", said), (
            phase,
            said,
        )
        if how != "is_stopped":
            assert codes[rank] == 1, phase
            log = (run.folder / "logs" / f"rank-{rank}.log").read_text()
            assert f"in {how}" in log, (phase, log)
