"""A grid of models and layouts, dealt out: the cells that `make test` tries, and those that `make test-all` adds."""

from collections import Counter
from collections.abc import Collection, Mapping

import pytest
from _pytest.mark import ParameterSet

SLOW = pytest.mark.slow
Grid = Mapping[str, Collection[str]]
"""Model → the layouts that it is tried under."""


def dealt(grid: Grid, rounds: int = 1) -> dict[str, list[str]]:
    """A share for each model: every layout goes to `rounds` of its models in turn, and no model goes without."""
    hands: dict[str, list[str]] = {model: [] for model in grid}
    layouts = dict.fromkeys(layout for layouts_of_model in grid.values() for layout in layouts_of_model)
    for turn in range(rounds):
        order = [*grid][:: -1 if turn % 2 else 1]  # to and fro, or the first had two cards and the last none
        for layout in layouts:
            takers = [model for model in order if layout in grid[model] and layout not in hands[model]]
            if takers:
                hands[min(takers, key=lambda model: len(hands[model]))].append(layout)
    for model, hand in hands.items():
        if not hand:
            often = Counter(layout for hand_layouts in hands.values() for layout in hand_layouts)
            hand.append(min(grid[model], key=lambda layout: often[layout]))
    return hands


def cells(
    grid: Grid, *more: object, rounds: int = 1, always: Collection[str] = (), label: str = ""
) -> list[ParameterSet]:
    """Cases (model, layouts, *more) for `parametrize`: what each is dealt and always has; slow, all others."""
    actual = []
    for model, hand in dealt(grid, rounds).items():
        now = [layout for layout in grid[model] if layout in hand or layout in always]
        later = [layout for layout in grid[model] if layout not in now]
        actual.append(pytest.param(model, now, *more, id=f"{model}{label}"))
        if later:
            actual.append(pytest.param(model, later, *more, id=f"{model}{label}, the others", marks=SLOW))
    return actual


def cells_by_ranks(
    models: Collection[str],
    layouts: Mapping[int, Collection[str]],
    rounds: int = 1,
    always: Collection[str] = (),
) -> list[ParameterSet]:
    """Cases (model, layouts, ranks) of a grid for each number of ranks."""
    return [
        case
        for ranks, names in layouts.items()
        for case in cells(
            dict.fromkeys(models, names), ranks, rounds=rounds, always=always, label=f" on {ranks}"
        )
    ]
