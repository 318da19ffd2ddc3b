"""Two sides by turns: who goes when, and what is divided by what."""

from typing import Any

import pytest

from tests.unit.benchmarks.scripts import script


@pytest.fixture
def interleaved() -> Any:
    return script("interleaved")


def test_sides_take_turns_and_theirs_is_divided_by_ours(
    interleaved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, order = [0.0], []

    def step(side: str, seconds: float) -> None:
        order.append(side)
        now[0] += seconds

    monkeypatch.setattr(interleaved, "CLOCKS", {"wall": lambda: now[0]})
    sides = [interleaved.timed(lambda: step("ours", 2.0)), interleaved.timed(lambda: step("theirs", 3.0))]
    ratios = interleaved.compare(*sides, 3)
    assert order == [
        "ours",
        "ours",
        "theirs",
        "theirs",
        *("theirs", "ours"),
        *("ours", "theirs"),
        *("theirs", "ours"),
    ]
    assert ratios == {"wall": [1.5, 1.5, 1.5]}


def test_the_middle_of_the_rounds_is_told_with_both_ends(interleaved: Any) -> None:
    found = interleaved.summary({"wall": [1.0, 4.0, 2.0]})
    assert found == {"wall": 2.0, "wall_lowest": 1.0, "wall_highest": 4.0}
