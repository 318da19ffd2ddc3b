"""Masked image modelling with an asymmetric autoencoder (MAE; He et al. 2022)."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import ImagesConfig, MaskedImageObjective, ModelConfig
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


@OBJECTIVES.register("masked_image")
class MaskedImage(ImageBasedObjective):
    """Visible patches in the encoder's row, all patches in the decoder's.

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
