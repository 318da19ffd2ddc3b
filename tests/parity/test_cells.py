"""What `make test` leaves out of a grid is in another case, and every row and column is seen without it."""

from tests.support.grids import SLOW, cells, dealt

GRID = {"a": ["w", "x", "y"], "b": ["x", "y", "z"], "c": ["x"], "d": ["x", "w"]}


def test_everybody_is_dealt_a_share() -> None:
    square = dict.fromkeys("abc", "xyz")
    assert dealt(square) == {"a": ["x"], "b": ["y"], "c": ["z"]}
    assert all(len(hand) == len(set(hand)) == 2 for hand in dealt(square, rounds=2).values())
    hands = dealt(GRID)
    assert all(hands.values())
    assert set().union(*hands.values()) == set("wxyz")
    assert all(set(hand) <= set(GRID[model]) for model, hand in hands.items())


def test_no_cell_is_lost() -> None:
    actual = cells(GRID, 4, always="x")
    tried = [(case.values[0], layout) for case in actual for layout in case.values[1]]
    assert sorted(tried) == sorted((model, layout) for model, layouts in GRID.items() for layout in layouts)
    now = {case.values[0]: case.values[1] for case in actual if SLOW not in case.marks}
    assert now.keys() == GRID.keys()
    assert all("x" in layouts for layouts in now.values())
    assert all(case.values[2:] == (4,) for case in actual)
