"""Layouts under which models of images are compared with one device, and the cells of the grid."""

from megatfm.config import ParallelConfig
from tests.support.grids import cells
from tests.support.image_models import IMAGE_MODELS

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "tp2": ParallelConfig(tp=2),
        "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2),
        "cp2": ParallelConfig(cp=2),
    },
    3: {
        "tp3 without sequence parallel": ParallelConfig(tp=3, sequence_parallel=False),
        "tp3": ParallelConfig(tp=3),
        "cp3": ParallelConfig(cp=3),
    },
    4: {"tp2 × cp2": ParallelConfig(tp=2, cp=2)},
    5: {"cp5": ParallelConfig(cp=5)},
}
WITHOUT_CONTEXT = ("simmim swin",)
"""Models whose parts need whole rows."""


def is_compared(name: str, parallel: ParallelConfig) -> bool:
    """Return whether this model's gradients are compared under this layout."""
    return parallel.cp == 1 or name not in WITHOUT_CONTEXT


def grid(ranks: int) -> dict[str, list[str]]:
    """Models and the layouts of so many ranks under which they are compared."""
    layouts = LAYOUTS[ranks].items()
    compared = {name: [key for key, value in layouts if is_compared(name, value)] for name in IMAGE_MODELS}
    return {name: keys for name, keys in compared.items() if keys}


ALWAYS = ["one process", "cp2", "tp2", "tp3", "tp3 without sequence parallel"]
"""Layouts that no model goes without: a masked autoencoder's lookup can be wrong under some of these alone."""
CASES = [
    case
    for ranks in LAYOUTS
    for case in cells(grid(ranks), ranks, rounds=3, always=ALWAYS, label=f" on {ranks}")
]
