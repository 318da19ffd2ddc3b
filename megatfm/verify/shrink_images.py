"""Models and objectives of images made small: patches, tables of positions, images and masked squares."""

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

PLAIN_FAMILIES = ("encoder", "masked_autoencoder")
"""Families that read images of any size."""
PATCH_SIZE, PATCHES = 4, 4
"""Sides of a small patch, in pixels, and of a small image, in patches: a row holds several images."""


def shrunk_patches(model: ModelConfig) -> dict[str, Any]:
    """Sizes of an encoder's patches and of its table of positions, which is interpolated to images of `PATCHES`."""
    if not isinstance(model.embedding, PatchEmbeddingConfig) or model.family not in PLAIN_FAMILIES:
        return {}
    changes: dict[str, Any] = {
        "vocab_size": None,
        "embedding.patch_size": min(model.embedding.patch_size, PATCH_SIZE),
    }
    if isinstance(model.position, LearnedPosition2dConfig):
        rows, columns = model.position.grid
        changes["position.grid"] = (min(rows, PATCHES - 1), min(columns, PATCHES + 1))
    for name, head in model.extra_heads.items():
        if isinstance(head, PixelsHeadConfig):
            changes[f"extra_heads.{name}.stride"] = changes["embedding.patch_size"]
    return changes


def smaller_masks(config: Config, model: ModelConfig) -> ObjectiveConfig:
    """The objective, whose masked squares are of two patches a side, or of one where an image has few."""
    if not isinstance(config.objective, SimMIMObjective):
        return config.objective
    side = getattr(model.embedding, "patch_size", 1) * (2 if model.stages else 1)
    return config.objective.model_copy(update={"mask_size": side})


def smaller_images(config: Config, model: ModelConfig) -> dict[str, Any]:
    """The section of images, of `PATCHES` patches a side of the small model."""
    if not isinstance(model.embedding, PatchEmbeddingConfig) or model.family not in PLAIN_FAMILIES:
        return {}
    size = min(config.data.images.size // getattr(config.model.embedding, "patch_size", 1), PATCHES)
    sizes = {"size": size * model.embedding.patch_size}
    if (most := config.data.images.max_patches) is not None:
        sizes["max_patches"] = min(most, PATCHES**2)
    return {"images": config.data.images.model_copy(update=sizes)}
