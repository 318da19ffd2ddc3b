"""Contrastive learning of images and captions: which pairs of a global batch belong together (CLIP, SigLIP)."""

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ContrastiveObjective, ImagesConfig, ModelConfig
from megatfm.corpus.images import ImageIndex
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import SampleError, UsageError
from megatfm.models.two_towers import TERM, TOP_K
from megatfm.objectives.base import (
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    Losses,
    RandomKeys,
    RowLengths,
    SpecialTokens,
)
from megatfm.objectives.images import ImageBasedObjective, draw_image_files, make_image_reader
from megatfm.rng import ChunkKey

CAPTIONS = "captions"


@OBJECTIVES.register("contrastive")
class Contrastive(ImageBasedObjective):
    """Images in the encoder's row, their captions in the decoder's.

    Evaluation compares all pairs of a validation set. The field `captions` has a hash of each caption at its first
    token: any of several equal captions counts as the image's own.
    """

    model_families = ("two_towers",)
    compares_samples = True
    field_prefixes = ENCODER_DECODER

    def __init__(
        self,
        special: SpecialTokens,
        config: ContrastiveObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(special, config, model, row_lengths, images)
        if images.mixes:
            raise UsageError(
                "objective.name = 'contrastive': a mixed image has no caption: set data.images.mixup=0 and "
                "data.images.cutmix=0"
            )
        self.reader = make_image_reader(images, model, config.name, row_lengths[0], training=training)
        positions = model.text_tower.max_positions if model.text_tower else 0
        self.max_caption_tokens = min(positions, *row_lengths[1:]) if row_lengths[1:] else positions
        self.special, self.begin_token, self.pads_captions = special, config.begin_token, config.pad_captions
        if self.pads_captions and self.max_caption_tokens < positions:
            raise UsageError(
                f"data.target_length = {self.max_caption_tokens} is too short for objective.pad_captions, which fills "
                f"captions up to model.text_tower.max_positions: choose data.target_length={positions}"
            )
        if self.max_caption_tokens <= 1 + self.begin_token:
            raise UsageError(
                f"data.target_length = {self.max_caption_tokens} has no room for a caption's begin token, end token "
                f"and one token between: choose e.g. data.target_length={positions}"
            )
        self.metrics = () if training else tuple(f"top{k}" for k in TOP_K)
        self.loss_weights: Mapping[str, float] = {TERM: 1.0, **dict.fromkeys(self.metrics, 0.0)}
        image_fields = {f"encoder_{name}": field for name, field in self.reader.layout.fields.items()}
        caption_fields = {} if training else {CAPTIONS: Field("int32", (2,))}
        self.fields = {**image_fields, "tokens": Field(pad_value=special.pad), **caption_fields}

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        lengths = np.minimum(n_tokens + 1 + self.begin_token, self.max_caption_tokens)
        text_lengths = np.full_like(lengths, self.max_caption_tokens) if self.pads_captions else lengths
        return np.stack([np.full_like(lengths, self.reader.n_tokens), text_lengths], axis=1)

    def count_truncated(self, n_tokens: IntArray, images: ImageIndex) -> int:
        """Return how many captions of `n_tokens` [n] are truncated."""
        return int((n_tokens + 1 + self.begin_token > self.max_caption_tokens).sum())

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        if not len(chunk.tokens):
            raise SampleError(
                "has no caption: give prep the tokenizer (`tokenizer.file`), and images with a .txt, or a .json with "
                "the field `read.text_key`"
            )
        images = self.reader.build(chunk.files, key)
        fields: dict[str, NDArray[Any]] = {f"encoder_{name}": values for name, values in images.items()}
        fields["tokens"] = self.frame_caption(chunk.tokens)
        if self.metrics:
            fields[CAPTIONS] = np.zeros((len(fields["tokens"]), 2), np.int32)
            fields[CAPTIONS][0] = hash_caption(fields["tokens"])
        return fields

    def frame_caption(self, tokens: NDArray[np.integer]) -> IntArray:
        """Return a caption with begin and end token, truncated to `max_caption_tokens`, padded if so configured."""
        begin_tokens = [self.special.bos] * self.begin_token
        caption = np.concatenate(
            [begin_tokens, tokens[: self.max_caption_tokens - len(begin_tokens) - 1], [self.special.eos]]
        )
        padding = self.max_caption_tokens - len(caption) if self.pads_captions else 0
        return np.pad(caption.astype(np.int64), (0, padding), constant_values=self.special.pad)

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        tokens = random.integers(self.special.vocab_size, size=random.integers(1, self.max_caption_tokens))
        return DocumentChunk(tokens, files=draw_image_files(random, self.reader))

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.loss_weights, _find_first_tokens(batch).sum())

    def features(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return unit vectors of images and captions, the temperature, and in evaluation the captions' hashes."""
        inputs = {name: field for name, field in batch.items() if name != CAPTIONS}
        features = dict(model(**inputs).predictions)
        if CAPTIONS in batch:
            high, low = batch[CAPTIONS][_find_first_tokens(batch)].long().unbind(-1)
            features[CAPTIONS] = (high << 32) + low
        return features

    def compute_terms(self, model: nn.Module, features: dict[str, Tensor]) -> Losses:
        """Return the loss of all pairs of the global batch, and in evaluation the images that find their captions."""
        return cast(Losses, cast(Any, model).compare(features, features.get(CAPTIONS)))

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        return self.compute_terms(model, self.features(model, batch))


def _find_first_tokens(batch: Batch) -> Tensor:
    """Return whether each token is the first one of a caption, bool [B, T]."""
    is_first, documents = batch["positions"] == 0, batch.get("documents")
    return is_first if documents is None else is_first & (documents >= 0)  # None: each row is one caption


def hash_caption(tokens: IntArray) -> NDArray[np.int32]:
    """Return a caption's 64-bit hash as two int32 [2]. Equal captions have equal hashes."""
    return np.frombuffer(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), np.int32)
