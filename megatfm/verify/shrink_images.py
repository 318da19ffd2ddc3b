"""Models and objectives of images made small: patches, positions, masked squares, a decoder, a text tower."""

from collections.abc import Callable
from typing import Any

from megatfm.config import (
    Config,
    LearnedPosition2dConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    SimMIMObjective,
)
from megatfm.config.model_parts import PixelsHeadConfig
from megatfm.config.objective import ObjectiveConfig

PLAIN_FAMILIES = ("encoder", "masked_autoencoder", "two_towers", "vision_language")
"""Families that read images of any size."""
PATCH_SIZE, PATCHES = 4, 4
"""Sides of a small patch, in pixels, and of a small image, in patches: a row holds several images."""
FEATURE_WIDTH = 24
"""Numbers of a small feature."""
POSITIONS = 16
"""Tokens of a small caption: a row holds several."""


def shrunk_patches(model: ModelConfig) -> dict[str, Any]:
    """Return sizes of an encoder's patches, and of its table of positions, which is interpolated to `PATCHES`."""
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


def shrunk_masks(config: Config, model: ModelConfig) -> ObjectiveConfig:
    """Return the objective, whose masked squares are of two patches a side, or of one where an image has few."""
    if not isinstance(config.objective, SimMIMObjective):
        return config.objective
    side = getattr(model.embedding, "patch_size", 1) * (2 if model.stages else 1)
    return config.objective.model_copy(update={"mask_size": side})


def shrunk_images(config: Config, model: ModelConfig) -> dict[str, Any]:
    """Return the section of images, of `PATCHES` patches a side of the small model."""
    embedding, original = model.patch_embedding, config.model.patch_embedding
    if embedding is None or original is None or model.family not in PLAIN_FAMILIES:
        return {}
    size = min(config.data.images.size // original.patch_size, PATCHES)
    sizes = {"size": size * embedding.patch_size}
    if (most := config.data.images.max_patches) is not None:
        sizes["max_patches"] = min(most, PATCHES**2)
    return {"images": config.data.images.model_copy(update=sizes)}


def shrunk_second_stack(
    model: ModelConfig, heads_over: int, layers: int, head_dim: int, width: Callable[[int], int]
) -> dict[str, Any]:
    """Return sizes of the pixels' decoder, the text tower or the vision tower; none where there is none.

    heads_over: ranks that divide heads. width: the small inner width of a feed-forward network.
    """
    changes: dict[str, Any] = {}
    for key in ("pixel_decoder", "text_tower", "vision_tower"):
        if (section := getattr(model, key)) is None:
            continue
        n_heads = min(section.n_heads, 2 * heads_over)
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


def shrunk_features(model: ModelConfig, d_model: int) -> dict[str, Any]:
    """Return the small width of features; d_model: of the small image tower."""
    if model.contrastive is None:
        return {}
    is_projected = model.contrastive.project_image
    return {"contrastive.width": min(model.contrastive.width, FEATURE_WIDTH) if is_projected else d_model}
