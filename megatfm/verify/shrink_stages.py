"""Hierarchical models made small: every stage stays, on maps of which some are odd, padded, shifted or one window."""

from typing import Any

from megatfm.config import Config, ModelConfig, Windows2dPatternConfig
from megatfm.config.model_parts import PixelsHeadConfig
from megatfm.config.stages import StagesConfig

GRID, WINDOW, LAYERS = 10, 3, 2
"""Maps of 10 × 10 (padded to 12), 5 × 5 (padded to 6, and merged with padding), 3 × 3 (one window) and 2 × 2 tokens."""


def small_grid(model: ModelConfig, stages: StagesConfig) -> int:
    """Return the side of the first map: even in every stage where a head predicts the pixels below each token."""
    predicts_pixels = any(isinstance(head, PixelsHeadConfig) for head in model.extra_heads.values())
    return 2 ** len(stages.layers) if predicts_pixels else GRID


def shrunk_stages(model: ModelConfig, heads_over: int, head_dim: int) -> dict[str, Any]:
    """Return changes of a model with stages; none of another. heads_over: ranks that divide heads."""
    if (stages := model.stages) is None:
        return {}
    layers, first = [min(n, LAYERS) for n in stages.layers], 2 * heads_over
    pattern, changes = model.attention.pattern, dict[str, Any]()
    if isinstance(pattern, Windows2dPatternConfig):
        changes["attention.pattern"] = {"name": pattern.name, "window": min(pattern.window, WINDOW)}
    return changes | {
        "n_layers": sum(layers),
        "d_model": first * head_dim,
        "attention.n_heads": first,
        "stages": {
            **stages.model_dump(),
            "layers": layers,
            "heads": [first * n // stages.heads[0] for n in stages.heads],
            "grid": (small_grid(model, stages),) * 2,
        },
    }


def shrunk_rows(config: Config, stages: StagesConfig) -> tuple[int, int]:
    """Return tokens of a row, and pixels of an image's sides. A row has as many images as before, or a few that
    tensor-parallel ranks can share in every stage."""
    parallel, (rows, columns) = config.parallel, stages.grid
    images = min(config.data.sequence_length // (rows * columns), 2)
    if parallel.sequence_parallel and parallel.tp > 1:
        images = parallel.tp
    side = small_grid(config.model, stages)
    return images * side**2, side * int(getattr(config.model.embedding, "patch_size", 1))
