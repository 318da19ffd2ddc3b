"""The simulated pipeline, against closed forms and against the simulator of the schedules' own tests."""

import pytest

from megatfm.estimate.schedule import simulate
from megatfm.parallel.pipeline_schedule import build_schedule, stage_to_rank
from tests.support.pipeline_simulation import bubble
from tests.support.pipeline_simulation import simulate as simulate_plain

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.2, "W": 0.8}


def costs(stages: int) -> dict[str, list[float]]:
    return {kind: [seconds] * stages for kind, seconds in SECONDS.items()}


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 7), (5, 5), (4, 1)])
def test_the_bubble_of_1f1b(ranks: int, microbatches: int) -> None:
    actual = simulate("1f1b", ranks, 1, microbatches, range(ranks), costs(ranks), 0.0)
    assert actual.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=1e-12)
    assert actual.held == {rank: min(ranks - rank, microbatches) for rank in range(ranks)}


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_schedules_take_as_long_as_in_their_own_simulator(schedule: str) -> None:
    virtual = 1 if schedule == "gpipe" else 2
    rank_of = stage_to_rank(schedule, 3, virtual)
    actual = simulate(schedule, 3, virtual, 7, rank_of, costs(len(rank_of)), 0.0)
    plain = simulate_plain(build_schedule(schedule, 3, virtual, 7), rank_of, SECONDS)
    assert actual.seconds == pytest.approx(max(rank.last for rank in plain), rel=1e-12)
    assert actual.bubble == pytest.approx(bubble(plain), rel=1e-9)


def test_a_transfer_is_waited_for_between_ranks_alone() -> None:
    actual = simulate("1f1b", 2, 1, 1, [0, 1], costs(2), 0.5)
    assert actual.seconds == pytest.approx(2 * (1.0 + 2.0) + 2 * 0.5)
    slow = {kind: [seconds, 3 * seconds] for kind, seconds in SECONDS.items()}
    assert simulate("1f1b", 2, 1, 1, [0, 1], slow, 0.0).seconds == pytest.approx(1 + 3 + 6 + 2)
