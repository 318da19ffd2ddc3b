"""Rows that are cut over ranks: loss and every gradient are those of one device, in float64."""

import pytest

from tests.support.context_models import CONTEXT_LAYOUTS, CONTEXT_MODELS_BY_RANKS, context_layouts_of
from tests.support.context_parity import compare_context_layouts
from tests.support.grids import SLOW, cells
from tests.support.workers import Workers

LATER = (
    ("patterns of encoders", 8),
    ("patterns of decoders, rows of 11 tokens", 8),
    ("patterns of encoders, rows of 11 tokens", 8),
    ("t5 positions, patterns", 4),
    ("deberta v3", 4),
    ("deberta, rows of 11 tokens", 2),
)
"""Dear ones that others are much like."""
CASES = [
    case
    for ranks, names in CONTEXT_MODELS_BY_RANKS.items()
    for case in cells({name: context_layouts_of(name, ranks) for name in names}, ranks, label=f" on {ranks}")
    if (case.values[0], ranks) not in LATER
]
CASES += [pytest.param(name, [*context_layouts_of(name, ranks)], ranks, marks=SLOW) for name, ranks in LATER]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: CONTEXT_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_context_layouts, ranks, name, tried, timeout=180.0)[0] == layouts
