"""Shrinks image models and their objectives: patches, positions, mask sizes, stages, pixel decoder and text tower."""

from collections.abc import Callable
from typing import Any

from megatfm.config import (
    Config,
    LearnedPosition2dConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    SimMIMObjective,
    Windows2dPatternConfig,
)
from megatfm.config.heads import PixelsHeadConfig
from megatfm.config.objective import ObjectiveConfig
from megatfm.config.stages import StagesConfig

PLAIN_FAMILIES = ("encoder", "masked_autoencoder", "two_towers", "vision_language")
"""Families without stages, whose images may have any size."""
PATCH_SIZE, PATCHES = 4, 4
"""Sides of a small patch, in pixels, and of a small image, in patches, so that a row holds several images."""
FEATURE_WIDTH = 24
"""Width of a small contrastive feature."""
POSITIONS = 16
"""Tokens of a small caption, so that a row holds several."""


def shrink_patches(model: ModelConfig) -> dict[str, Any]:
    """Return the small sizes of patches and of the position table, which is interpolated to `PATCHES`."""
    if not isinstance(model.embedding, PatchEmbeddingConfig) or model.family not in PLAIN_FAMILIES:
        return {}
    changes: dict[str, Any] = {"embedding.patch_size": min(model.embedding.patch_size, PATCH_SIZE)}
    if model.text_tower is None:
        changes["vocab_size"] = None
    if isinstance(model.position, LearnedPosition2dConfig):
        rows, columns = model.position.grid
        changes["position.grid"] = (min(rows, PATCHES - 1), min(columns, PATCHES + 1))
    for name, head in model.extra_heads.items():
        if isinstance(head, PixelsHeadConfig):
            changes[f"extra_heads.{name}.stride"] = changes["embedding.patch_size"]
    return changes


def shrink_masks(config: Config, model: ModelConfig) -> ObjectiveConfig:
    """Return the objective with masks of one patch a side, or two in models with stages."""
    if not isinstance(config.objective, SimMIMObjective):
        return config.objective
    side = getattr(model.embedding, "patch_size", 1) * (2 if model.stages else 1)
    return config.objective.model_copy(update={"mask_size": side})


def shrink_image_section(config: Config, model: ModelConfig) -> dict[str, Any]:
    """Return the images section with at most `PATCHES` patches a side of the small model."""
    embedding, original = model.patch_embedding, config.model.patch_embedding
    if embedding is None or original is None or model.family not in PLAIN_FAMILIES:
        return {}
    size = min(config.data.images.size // original.patch_size, PATCHES)
    sizes = {"size": size * embedding.patch_size}
    if (max_patches := config.data.images.max_patches) is not None:
        sizes["max_patches"] = min(max_patches, PATCHES**2)
    return {"images": config.data.images.model_copy(update=sizes)}


def shrink_second_tower(
    model: ModelConfig, head_ranks: int, layers: int, head_dim: int, width: Callable[[int], int]
) -> dict[str, Any]:
    """Return the small sizes of the pixel decoder and of the text or vision tower, if there are any.

    head_ranks: ranks that divide heads. width: shrinks the inner width of a feed-forward network.
    """
    changes: dict[str, Any] = {}
    for key in ("pixel_decoder", "text_tower", "vision_tower"):
        if (section := getattr(model, key)) is None:
            continue
        n_heads = min(section.n_heads, 2 * head_ranks)
        changes[key] = {
            "d_model": n_heads * min(section.d_model // section.n_heads, head_dim),
            "n_heads": n_heads,
            "d_ff": width(section.d_ff),
            "n_layers": min(section.n_layers, layers),
        }
    if (tower := model.vision_tower) is not None:
        rows, columns = tower.grid
        changes["vision_tower"] |= {
            "grid": (min(rows, PATCHES - 1), min(columns, PATCHES + 1)),
            "embedding": {"patch_size": min(tower.embedding.patch_size, PATCH_SIZE)},
        }
    if model.text_tower is not None:
        changes["text_tower"]["max_positions"] = min(model.text_tower.max_positions, POSITIONS)
    return changes


def shrink_features(model: ModelConfig, d_model: int) -> dict[str, Any]:
    """Return the small width of contrastive features; d_model: of the small image tower."""
    if model.contrastive is None:
        return {}
    is_projected = model.contrastive.project_image
    return {"contrastive.width": min(model.contrastive.width, FEATURE_WIDTH) if is_projected else d_model}


GRID, WINDOW, STAGE_LAYERS = 10, 3, 2
"""Feature maps of 10 × 10 (padded to 12), 5 × 5 (padded to 6), 3 × 3 (one window) and 2 × 2 tokens: some odd, some
padded."""


def choose_grid_side(model: ModelConfig, stages: StagesConfig) -> int:
    """Return the side of the first feature map; a power of two where a head predicts the pixels of each token."""
    predicts_pixels = any(isinstance(head, PixelsHeadConfig) for head in model.extra_heads.values())
    return 2 ** len(stages.n_layers) if predicts_pixels else GRID


def shrink_stages(model: ModelConfig, head_ranks: int, head_dim: int) -> dict[str, Any]:
    """Return the small sizes of all stages, if the model has any. head_ranks: ranks that divide heads."""
    if (stages := model.stages) is None:
        return {}
    layers, n_heads = [min(n, STAGE_LAYERS) for n in stages.n_layers], 2 * head_ranks
    pattern, changes = model.attention.pattern, dict[str, Any]()
    if isinstance(pattern, Windows2dPatternConfig):
        changes["attention.pattern"] = {"name": pattern.name, "window": min(pattern.window, WINDOW)}
    return changes | {
        "n_layers": sum(layers),
        "d_model": n_heads * head_dim,
        "attention.n_heads": n_heads,
        "stages": {
            **stages.model_dump(),
            "n_layers": layers,
            "n_heads": [n_heads * n // stages.n_heads[0] for n in stages.n_heads],
            "grid": (choose_grid_side(model, stages),) * 2,
        },
    }


def shrink_rows(config: Config, stages: StagesConfig) -> tuple[int, int]:
    """Return tokens per row and pixels per image side.

    A row has up to two images; with sequence parallelism one per tensor-parallel rank, which divides every stage.
    """
    parallel, (rows, columns) = config.parallel, stages.grid
    images = min(config.data.sequence_length // (rows * columns), 2)
    if parallel.sequence_parallel and parallel.tp > 1:
        images = parallel.tp
    side = choose_grid_side(config.model, stages)
    return images * side**2, side * int(getattr(config.model.embedding, "patch_size", 1))
