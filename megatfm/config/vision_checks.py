"""Checks that the parts of a model for images go together."""

from typing import TYPE_CHECKING

from megatfm.config.model_parts import ClassifierHeadConfig, PatchEmbeddingConfig
from megatfm.config.position import GRID_POSITIONS

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig


def check_image_parts(model: "ModelConfig") -> None:
    """Raise a ValueError for positions or heads that the model's embedding doesn't serve."""
    position, embedding = model.position.name, model.embedding
    if position in GRID_POSITIONS and not isinstance(embedding, PatchEmbeddingConfig):
        raise ValueError(
            f"position.name = {position!r} is for patches of images: set embedding.name = 'patches', or "
            "another position"
        )
    of_head = position == "rope_2d"
    key, width = ("attention.head_dim", model.head_width) if of_head else ("d_model", model.embedding_width)
    if position in ("rope_2d", "sinusoidal_2d") and width % 4:
        raise ValueError(
            f"position.name = {position!r} takes channels by fours, and {key} = {width}: choose {key} = "
            f"{width + 4 - width % 4}"
        )
    for name, head in model.extra_heads.items():
        if not isinstance(head, ClassifierHeadConfig) or "class" not in head.pool:
            continue
        if isinstance(embedding, PatchEmbeddingConfig) and not embedding.n_class_tokens:
            raise ValueError(
                f"extra_heads.{name}.pool = {head.pool!r} reads a class token, and embedding.n_class_tokens = 0: "
                "choose pool = 'mean', or n_class_tokens = 1"
            )
