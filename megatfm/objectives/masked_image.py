"""Masked image modelling: with an asymmetric autoencoder (MAE), and on whole rows with mask tokens (SimMIM)."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import ImagesConfig, MaskedImageObjective, ModelConfig, SimMIMObjective
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import UsageError
from megatfm.objectives.base import (
    ENCODER_DECODER,
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
"""Name of SimMIM's head, and of its term."""


@OBJECTIVES.register("masked_image")
class MaskedImage(ImageBasedObjective):
    """Visible patches in the encoder's row, all patches in the decoder's (MAE; He et al. 2022).

    `source` is the index of a decoder token in the encoder's sequence; −1: masked.
    """

    model_families = ("masked_autoencoder",)
    reads_text = False
    field_prefixes = ENCODER_DECODER
    loss_weights: Mapping[str, float] = MappingProxyType({"reconstruction": 1.0})

    def __init__(
        self,
        special: SpecialTokens | None,
        config: MaskedImageObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(special, config, model, row_lengths, images)
        self.reader = make_image_reader(images, model, config.name, row_lengths[-1], training=training)
        layout = self.reader.layout
        n_patches = self.reader.n_tokens - layout.n_special
        self.n_kept = int(n_patches * (1 - config.mask_ratio))
        if not self.n_kept or self.n_kept == n_patches:
            raise UsageError(
                f"objective.mask_ratio = {config.mask_ratio:g} keeps {self.n_kept} of {n_patches} patches: choose one "
                f"that masks some and keeps some, e.g. {1 - max(1, n_patches // 4) / n_patches:g}"
            )
        if layout.n_special + self.n_kept > row_lengths[0]:
            raise UsageError(
                f"data.sequence_length = {row_lengths[0]} is too short for the {layout.n_special + self.n_kept} tokens "
                f"of an image that the encoder sees: choose data.sequence_length={layout.n_special + self.n_kept}"
            )
        encoder_fields = {f"encoder_{name}": field for name, field in layout.fields.items()}
        self.fields = {**encoder_fields, **layout.fields, "source": Field(pad_value=-1)}

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        side_lengths = (self.reader.layout.n_special + self.n_kept, self.reader.n_tokens)
        return np.tile(np.array(side_lengths, np.int64), (len(n_tokens), 1))

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        fields, n_special = self.reader.build(chunk.files, key), self.reader.layout.n_special
        kept_patches = np.sort(rng.permutation(self.reader.n_tokens - n_special, *key, "mask")[: self.n_kept])
        visible = np.concatenate([np.arange(n_special), n_special + kept_patches])
        source = np.full(self.reader.n_tokens, -1)
        source[visible] = np.arange(len(visible))
        encoder_fields = {f"encoder_{name}": values[visible] for name, values in fields.items()}
        return {**encoder_fields, **fields, "source": source}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        is_masked, documents = batch["source"] < 0, batch.get("documents")  # None: each row is one image
        return {"reconstruction": (is_masked if documents is None else is_masked & (documents >= 0)).sum()}


@OBJECTIVES.register("simmim")
class SimMIM(ImageBasedObjective):
    """Predict the pixels of masked squares of an image by a linear head (SimMIM; Xie et al. 2022).

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
