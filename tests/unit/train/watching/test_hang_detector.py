"""Whom a judge blames, from signs and ends at times that the test gives."""

import pytest

from megatfm.train.watching.hang_detector import SETTLE_SECONDS, Diagnosis, HangDetector, Heartbeat

HOSTS = ["n0", "n0", "n1", "n1"]


@pytest.fixture
def judge() -> HangDetector:
    return HangDetector(HOSTS, limit=10.0, silence=4.0, start=0.0)


def everybody(judge: HangDetector, now: float, **signs: Heartbeat) -> None:
    """All ranks say that they are well; those given as r1=… say something else, and r1=None nothing."""
    for rank in range(len(HOSTS)):
        sign = signs.get(f"r{rank}", Heartbeat(7, "step", 8, now % 1, True, "engines/native.py:1"))
        if sign is not None:
            judge.hears(rank, sign, now)


def given(judge: HangDetector, now: float) -> Diagnosis:
    verdict = judge.verdict(now)
    assert verdict is not None
    return verdict


def test_while_all_move_there_is_none(judge: HangDetector) -> None:
    for second in range(30):
        everybody(judge, float(second))
        assert judge.verdict(second + 0.5) is None


def test_a_rank_that_is_silent_is_blamed_and_not_those_that_wait_for_it(judge: HangDetector) -> None:
    everybody(judge, 0.0)
    for second in range(1, 11):
        everybody(judge, second, r2=None, r0=Heartbeat(7, "step", 8, second, True))  # type: ignore[arg-type]
        if second < 10:
            assert judge.verdict(second) is None
    verdict = given(judge, 10.1)
    assert (verdict.ranks, verdict.hosts, verdict.step, verdict.hung, verdict.reporter) == (
        [2],
        ["n1"],
        7,
        True,
        0,
    )
    assert (
        verdict.text
        == "rank 2 on n1 at step 7, step: no sign of life for 10 s: it was stopped, or its machine is gone"
    )


def stalled(judge: HangDetector, *signs: Heartbeat) -> Diagnosis:
    for rank, sign in enumerate(signs):
        judge.hears(rank, sign, 20.0)
    return given(judge, 20.1)


def test_of_those_at_the_same_place_the_one_outside_a_collective_is_blamed(judge: HangDetector) -> None:
    waits = Heartbeat(7, "step", 8, 11.0, True, "megatfm/engines/native/engine.py:50, in step")
    works = Heartbeat(7, "step", 8, 11.0, False, "megatfm/data/loader.py:9, in row")
    verdict = stalled(judge, waits, waits, waits, works)
    assert (verdict.ranks, verdict.hung, verdict.reporter) == ([3], True, 0)
    assert (
        "rank 3 on n1 at step 7, step: has not moved for 11 s (megatfm/data/loader.py:9, in row)"
        in verdict.text
    )


def test_whoever_is_behind_is_blamed_although_it_waits_as_well(judge: HangDetector) -> None:
    ahead, behind = Heartbeat(7, "save", 9, 11.0, True), Heartbeat(7, "step", 8, 11.5, True)
    verdict = stalled(judge, behind, ahead, ahead, ahead)
    assert (verdict.ranks, verdict.reporter) == ([0], 1)


def test_where_nobody_stands_out_all_are_named(judge: HangDetector) -> None:
    verdict = stalled(judge, *[Heartbeat(7, "step", 8, 11.0, True)] * 4)
    assert verdict.ranks == [0, 1, 2, 3]
    assert verdict.text.startswith("rank 0 on n0 at step 7, step, rank 1 on n0 at step 7, step, rank 2")


def test_many_ranks_are_not_all_listed() -> None:
    judge = HangDetector(["n"] * 20, limit=10.0, silence=4.0, start=0.0)
    verdict = stalled(judge, *[Heartbeat(age=11.0)] * 20)
    assert len(verdict.ranks) == 20
    assert "rank 7 on n at step 0, start and 12 more: has" in verdict.text


def test_a_failure_is_settled_before_it_is_told_and_the_cause_beats_its_victims(judge: HangDetector) -> None:
    everybody(judge, 0.0)
    judge.fails(0, "RuntimeError: Connection closed by peer", 1.0, victim=True)
    assert judge.verdict(1.1) is None
    judge.fails(3, None, 1.2)
    judge.fails(1, "RuntimeError: Connection closed by peer", 1.3, victim=True)
    verdict = given(judge, 1.1 + SETTLE_SECONDS)
    assert (verdict.ranks, verdict.hosts, verdict.hung, verdict.reporter) == ([3], ["n1"], False, 0)
    assert verdict.text == "rank 3 on n1 at step 7, step: ended without a word: it was killed, or it crashed"


def test_of_two_causes_the_first_is_blamed(judge: HangDetector) -> None:
    judge.fails(2, "ValueError: first", 1.0)
    judge.fails(1, None, 1.2)
    assert given(judge, 3.0).text == "rank 2 on n1 at step 0, start: failed: ValueError: first"


def test_what_all_say_alike_is_nobodys(judge: HangDetector) -> None:
    for rank in range(4):
        judge.fails(rank, "run: another process is training", 1.0)
    verdict = given(judge, 1.0)
    assert (verdict.ranks, verdict.text) == ([], "run: another process is training")


def test_ranks_that_waited_in_vain_accuse_the_one_that_says_nothing(judge: HangDetector) -> None:
    everybody(judge, 5.0, r1=Heartbeat(7, "step", 8, 4.0, False, "megatfm/x.py:1, in f"))
    for rank in (0, 2, 3):
        judge.fails(rank, "RuntimeError: Timed out", 6.0, victim=True)
    verdict = given(judge, 7.0)
    assert (verdict.ranks, verdict.hung, verdict.reporter) == ([1], True, 0)


def test_only_victims_are_better_than_nobody(judge: HangDetector) -> None:
    for rank in range(4):
        judge.fails(rank, f"gloo {rank}", 1.0 + rank / 10, victim=True)
    assert given(judge, 2.0).ranks == [0]


def test_who_has_left_is_neither_awaited_nor_blamed(judge: HangDetector) -> None:
    for rank in range(3):
        judge.leaves(rank)
        judge.fails(rank, None, 1.0)  # its connection closes, as it should
    everybody(judge, 5.0)
    assert judge.verdict(6.0) is None
    judge.leaves(3)
    assert judge.all_gone
    assert judge.verdict(100.0) is None


def test_a_judge_that_was_stopped_itself_blames_nobody_for_it(judge: HangDetector) -> None:
    everybody(judge, 0.0)
    judge.was_stopped(60.0)
    assert judge.verdict(61.0) is None
    assert judge.verdict(75.0) is not None
