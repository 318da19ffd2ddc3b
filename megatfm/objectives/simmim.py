"""Masked image modelling on whole rows, with mask tokens and a linear head (SimMIM; Xie et al. 2022)."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import ImagesConfig, ModelConfig, SimMIMObjective
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import UsageError
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    RandomKeys,
    RowLengths,
    SpecialTokens,
)
from megatfm.objectives.images import ImageBasedObjective, make_image_reader
from megatfm.rng import ChunkKey

HEAD = "pixels"


@OBJECTIVES.register("simmim")
class SimMIM(ImageBasedObjective):
    """Predict the pixels of masked squares of an image.

    `masked` is 1 for tokens of masked squares, `patches` is zero there, and `target_patches` has all pixels.
    """

    model_families = ("encoder", "hierarchical")
    reads_text = False
    loss_weights: Mapping[str, float] = MappingProxyType({HEAD: 1.0})

    def __init__(
        self,
        special: SpecialTokens | None,
        config: SimMIMObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(special, config, model, row_lengths, images)
        if HEAD not in model.extra_heads or not getattr(model.embedding, "mask_token", False):
            raise UsageError(
                "objective.name = 'simmim' needs a model with a mask token and a head for pixels: set "
                f"model.embedding.mask_token = true and add [model.extra_heads.{HEAD}]"
            )
        stride = getattr(model.extra_heads[HEAD], "stride", 0)
        if model.stages is None and stride != getattr(model.embedding, "patch_size", stride):
            raise UsageError(
                f"model.extra_heads.{HEAD}.stride = {stride}: a token stands for its patch: choose "
                f"model.extra_heads.{HEAD}.stride = {model.embedding.patch_size}"  # type: ignore[union-attr]
            )
        self.reader = make_image_reader(images, model, config.name, row_lengths[0], training=training)
        layout, mask_size = self.reader.layout, config.mask_size
        if mask_size % layout.patch_size or images.size % mask_size:
            raise UsageError(
                f"objective.mask_size = {mask_size}: masked squares are whole patches of {layout.patch_size} pixels "
                f"and fill images of data.images.size = {images.size}: choose a multiple of the one that divides the "
                "other"
            )
        self.squares_per_side = images.size // mask_size
        self.patches_per_square_side = mask_size // layout.patch_size
        self.n_masked = math.ceil(self.squares_per_side**2 * config.mask_ratio)
        if self.n_masked == self.squares_per_side**2:
            raise UsageError(
                f"objective.mask_ratio = {config.mask_ratio:g} masks all {self.n_masked} squares of an image: choose "
                "less, or a smaller objective.mask_size"
            )
        self.fields = {
            **layout.fields,
            "masked": Field("uint8"),
            "target_patches": Field("uint8", (layout.patch_values,)),
        }

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.full(len(n_tokens), self.reader.n_tokens)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        fields, n_special = self.reader.build(chunk.files, key), self.reader.layout.n_special
        squares = np.zeros(self.squares_per_side**2, np.uint8)
        squares[rng.permutation(self.squares_per_side**2, *key, "mask")[: self.n_masked]] = 1
        ones = np.ones((self.patches_per_square_side, self.patches_per_square_side), np.uint8)
        masked = np.zeros(len(fields["grid"]), np.uint8)
        masked[n_special:] = np.kron(squares.reshape(self.squares_per_side, -1), ones).flatten()
        visible = np.where(masked[:, None], np.uint8(0), fields["patches"])
        return {**fields, "patches": visible, "masked": masked, "target_patches": fields["patches"]}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {HEAD: (batch["masked"] > 0).sum()}
