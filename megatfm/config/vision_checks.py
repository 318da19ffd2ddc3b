"""Cross-checks of the parts of image models."""

from typing import TYPE_CHECKING

from megatfm.config.image_text import check_two_towers, check_vision_language
from megatfm.config.model_parts import ClassifierHeadConfig, PatchEmbeddingConfig, PixelsHeadConfig
from megatfm.config.position import GRID_POSITIONS
from megatfm.config.section import find_nearest_divisor

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig


def check_image_parts(model: "ModelConfig") -> None:
    """Raise ValueError for positions or heads that the model's embedding doesn't support."""
    position, embedding = model.position.name, model.embedding
    if position in GRID_POSITIONS and not isinstance(embedding, PatchEmbeddingConfig):
        raise ValueError(
            f"position.name = {position!r} is for patches of images: set embedding.name = 'patches', or "
            "another position"
        )
    if model.family == "masked_autoencoder":
        _check_autoencoder(model)
    if model.family == "two_towers":
        check_two_towers(model)
    if model.family == "vision_language":
        check_vision_language(model)
    by_head = position == "rope_2d"
    key, width = ("attention.head_dim", model.head_width) if by_head else ("d_model", model.embedding_width)
    if position in ("rope_2d", "sinusoidal_2d") and width % 4:
        raise ValueError(
            f"position.name = {position!r} takes channels by fours, and {key} = {width}: choose {key} = "
            f"{width + 4 - width % 4}"
        )
    for name, head in model.extra_heads.items():
        if isinstance(head, PixelsHeadConfig):
            _check_stride(model, name, head)
        if not isinstance(head, ClassifierHeadConfig) or "class" not in head.pool:
            continue
        if isinstance(embedding, PatchEmbeddingConfig) and not embedding.n_class_tokens:
            raise ValueError(
                f"extra_heads.{name}.pool = {head.pool!r} reads a class token, and embedding.n_class_tokens = 0: "
                "choose pool = 'mean', or n_class_tokens = 1"
            )


def _check_stride(model: "ModelConfig", name: str, head: PixelsHeadConfig) -> None:
    patch_size = getattr(model.embedding, "patch_size", None)
    if patch_size is None or model.embedding.name != "patches":
        raise ValueError(
            f"extra_heads.{name} predicts pixels of patches: set embedding.name = 'patches', or leave it out"
        )
    if model.stages is None and head.stride % patch_size == 0:
        return  # perhaps a stage of a model
    stride = patch_size * 2 ** (len(model.stages.layers) - 1 if model.stages else 0)
    if head.stride != stride:
        raise ValueError(
            f"extra_heads.{name}.stride = {head.stride}: a token of the last map stands for a square of {stride} "
            f"pixels: choose extra_heads.{name}.stride = {stride}"
        )


def _check_autoencoder(model: "ModelConfig") -> None:
    decoder = model.pixel_decoder
    if decoder is None or not isinstance(model.embedding, PatchEmbeddingConfig):
        raise ValueError(
            "family = 'masked_autoencoder' needs embedding.name = 'patches' and the section pixel_decoder: give "
            "[model.pixel_decoder], without keys for MAE's own"
        )
    if decoder.d_model % decoder.n_heads:
        raise ValueError(
            f"pixel_decoder.n_heads = {decoder.n_heads} does not divide pixel_decoder.d_model = {decoder.d_model}: "
            f"choose n_heads = {find_nearest_divisor(decoder.d_model, decoder.n_heads)}"
        )
