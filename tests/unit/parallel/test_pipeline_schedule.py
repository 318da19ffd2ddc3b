"""Every schedule gives an order that runs through, for any number of micro-batches, with the bubble of its formula."""

from collections import Counter, deque
from itertools import pairwise

import pytest

from megatfm.parallel.pipeline_schedule import (
    SPLITS_BACKWARD,
    V_SHAPED,
    Action,
    add_send_recv,
    build_schedule,
    stage_to_rank,
)
from tests.support.pipeline_simulation import bubble, simulate

SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zero-bubble": 2, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
MICROBATCHES = (1, 2, 3, 5, 8, 11)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_are_made_once_on_their_rank(schedule: str, ranks: int) -> None:
    rank_of = stage_to_rank(schedule, ranks, SCHEDULES[schedule])
    for microbatches in MICROBATCHES:
        order_of = build_schedule(schedule, ranks, SCHEDULES[schedule], microbatches)
        counts = Counter(action for order in order_of for action in order)
        assert set(counts.values()) == {1}
        for stage in range(len(rank_of)):
            for i in range(microbatches):
                kinds = {kind for s, kind, j in counts if (s, j) == (stage, i)}
                assert kinds in ({"F", "B"}, {"F", "I", "W"})
                assert "B" in kinds or schedule in SPLITS_BACKWARD
        for rank, order in enumerate(order_of):
            assert {rank_of[action.stage] for action in order} == {rank}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_meet_their_transfers_in_the_same_order(schedule: str, ranks: int) -> None:
    """As if each transfer waited for the other side, and no other could overtake it."""
    rank_of = stage_to_rank(schedule, ranks, SCHEDULES[schedule])
    for microbatches in MICROBATCHES:
        plan = add_send_recv(build_schedule(schedule, ranks, SCHEDULES[schedule], microbatches), rank_of)
        sent = Counter(kind for order in plan for _, kind, _ in order if " " in kind)
        crossed = sum(a != b for a, b in pairwise(rank_of)) * microbatches
        ways = ("send F", "recv F", "send B", "recv B")
        assert sent == Counter({way: crossed for way in ways if crossed})
        pairs: dict[tuple[int, int], deque[tuple[str, int, int]]] = {}
        for rank, order in enumerate(plan):
            for stage, kind, i in order:
                if " " not in kind:
                    continue
                step = {"send F": 1, "recv B": 1}.get(kind, -1)
                boundary = min(stage, stage + step)
                pairs.setdefault((rank, rank_of[stage + step]), deque()).append((kind[-1], boundary, i))
        for (local, there), transfers in pairs.items():
            assert transfers == pairs[there, local]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_of_whole_backward_passes(schedule: str, ranks: int) -> None:
    """(p − 1) / (v·m + p − 1) of the time (Narayanan et al. 2021)."""
    virtual = SCHEDULES[schedule]
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        times = simulate(
            build_schedule(schedule, ranks, virtual, microbatches),
            stage_to_rank(schedule, ranks, virtual),
            TIMES,
        )
        assert bubble(times) == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bubble_of_split_backward_passes(ranks: int) -> None:
    """A rank waits (p − 1)·(T_F + T_I − T_W) between its first and last pass, and in zbv never (Qi et al. 2023)."""

    def waits(schedule: str, virtual: int) -> list[float]:
        order_of = build_schedule(schedule, ranks, virtual, 4 * ranks)
        times = simulate(order_of, stage_to_rank(schedule, ranks, virtual), TIMES)
        return [rank.last - rank.first - rank.seconds for rank in times]

    assert max(waits("interleaved-zero-bubble", 1)) == (ranks - 1) * (1 + 1 - 1)
    assert max(waits("zbv", 2)) == 0


def test_1f1b_holds_as_many_micro_batches_as_there_are_ranks_ahead() -> None:
    for rank, order in enumerate(build_schedule("1f1b", 4, 1, 12)):
        held = most = 0
        for action in order:
            held += {"F": 1, "B": -1}[action.kind]
            most = max(most, held)
        assert most == 4 - rank


def test_stages_of_a_v_go_down_and_up() -> None:
    assert all(stage_to_rank(schedule, 3, 2) == [0, 1, 2, 2, 1, 0] for schedule in V_SHAPED)
    assert stage_to_rank("interleaved", 2, 3) == [0, 1, 0, 1, 0, 1]


def test_a_schedule_that_deadlocks_is_an_error() -> None:
    wrong = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ValueError, match="schedule deadlocks"):
        add_send_recv(wrong, [0, 1])
    with pytest.raises(ValueError, match="schedule deadlocks"):
        simulate(wrong, [0, 1], TIMES)
