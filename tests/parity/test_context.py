"""Rows that are cut over ranks: loss and every gradient are those of one device, in float64."""

import pytest

from megatfm.config import ParallelConfig
from tests.support.context_models import (
    CONTEXT_LAYOUTS,
    CONTEXT_MODELS,
    CP2_ALONE,
    OTHERS,
    OWN_ATTENTION,
    PATTERN_NAMES,
)
from tests.support.context_parity import compare_context_layouts
from tests.support.grids import SLOW, cells
from tests.support.layouts import PIPELINE_SCHEDULES
from tests.support.workers import Workers

BIASED = ("alibi, patterns", "t5 positions, patterns")
TOGETHER = ("cp4", "cp2 × tp2", "pp2 1f1b × cp2", "zero3 × cp2")
EXPERTS = ("patterns of decoders, experts", "patterns of encoders, experts")
"""Where nothing is sent by heads."""
SOME: dict[tuple[str, int], tuple[str, ...]] = {
    **{(name, 2): CP2_ALONE for name in ("window", "compressed", "shaw", *OWN_ATTENTION, *OTHERS)},
    **{(f"{name}, rows of 11 tokens", 2): CP2_ALONE for name in ("window", "deberta", "xlnet", "soft experts")},
    ("window, prefixes", 2): CP2_ALONE,
    **{(name, 2): ("ep2 × cp2",) for name in EXPERTS},
    ("soft experts", 2): ("cp2", "ep2 × cp2"),
    ("soft experts", 4): ("cp4", "pp2 1f1b × cp2", "pp2 zbv × cp2", "zero3 × cp2", "ep4 of 2 × cp2", "replicas × cp2"),
    ("patterns of encoders", 2): CP2_ALONE,
    ("latent, patterns", 2): CP2_ALONE,
    ("patterns of encoders, rows of 11 tokens", 2): CP2_ALONE,
    ("llama", 4): (
        "cp4 by heads", "cp4 by a ring", "cp2 × tp2 without sequence parallel", "replicas × cp2",
        *(f"zero{zero} × cp2" for zero in range(3)),
    ),
    ("patterns of decoders", 4): (*TOGETHER, *(f"pp2 {each} × cp2" for each in PIPELINE_SCHEDULES)),
    ("patterns of encoders", 4): TOGETHER,
    ("t5", 4): TOGETHER,
    **{
        (f"{name}, rows of 11 tokens", 4): (
            "cp4", "cp2 × tp2 without sequence parallel", "pp2 1f1b × cp2", "zero3 × cp2"
        )
        for name in PATTERN_NAMES
    },
    **{(name, 4): (*TOGETHER, "pp2 zbv × cp2") for name in (*BIASED, *OWN_ATTENTION, "bert")},
    ("latent, patterns", 4): (*TOGETHER, "pp2 zbv × cp2"),
    ("alibi, patterns, rows of 11 tokens", 4): ("cp4",),
    ("latent, patterns, rows of 11 tokens", 4): ("cp4", "cp2 × tp2 without sequence parallel"),
    **{(name, 8): ("zero3 × cp2 × tp2",) for name in PATTERN_NAMES},
    **{
        (f"{name}, rows of 11 tokens", 8): ("zero3 × cp2 × tp2 without sequence parallel",)
        for name in PATTERN_NAMES
    },
    ("llama", 8): ("replicas × zero3 × cp2",),
}  # fmt: skip
"""Models that are not compared under all layouts of so many ranks."""
ON_FOUR = ("latent, patterns, rows of 11 tokens", "alibi, patterns, rows of 11 tokens")
MANY = {
    2: tuple(name for name in CONTEXT_MODELS if name not in ON_FOUR),
    3: (
        "llama, rows of 11 tokens",
        "patterns of decoders, rows of 11 tokens",
        "soft experts, rows of 11 tokens",
    ),
    4: (
        "llama",
        *PATTERN_NAMES,
        *(f"{name}, rows of 11 tokens" for name in (*PATTERN_NAMES, "latent, patterns", "alibi, patterns")),
        "t5",
        "latent, patterns",
        *BIASED,
        *OWN_ATTENTION,
        "bert",
        "soft experts",
    ),
    8: ("llama", *PATTERN_NAMES, *(f"{name}, rows of 11 tokens" for name in PATTERN_NAMES)),
}
"""Models by ranks; those of equally many share one call, and so the reference."""


def layouts_of(name: str, ranks: int) -> dict[str, ParallelConfig]:
    """The layouts of so many ranks under which a model is compared."""
    usual = [layout for layout, parallel in CONTEXT_LAYOUTS[ranks].items() if parallel.ep == 1]
    return {each: CONTEXT_LAYOUTS[ranks][each] for each in SOME.get((name, ranks), usual)}


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
    for ranks, names in MANY.items()
    for case in cells({name: layouts_of(name, ranks) for name in names}, ranks, label=f" on {ranks}")
    if (case.values[0], ranks) not in LATER
]
CASES += [pytest.param(name, [*layouts_of(name, ranks)], ranks, marks=SLOW) for name, ranks in LATER]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: CONTEXT_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_context_layouts, ranks, name, tried, timeout=180.0)[0] == layouts
