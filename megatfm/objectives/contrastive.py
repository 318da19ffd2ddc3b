"""Contrastive learning of images and captions: which of a global batch belong together (CLIP, SigLIP)."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ContrastiveObjective, ImagesConfig, ModelConfig
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import SampleError, UsageError
from megatfm.layers.contrastive import TERM, TOP
from megatfm.objectives.base import (
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Losses,
    Objective,
    SpecialTokens,
)
from megatfm.objectives.images import ONE_PIECE, image_reader, random_image_files
from megatfm.rng import PieceKey

if TYPE_CHECKING:
    from megatfm.data.images import ImageReader

CAPTIONS = "captions"


@OBJECTIVES.register("contrastive")
class Contrastive(Objective):
    """Images in the encoder's row, their captions in the decoder's.

    In evaluation all pairs of a validation set are compared at once, and `captions` numbers them at their first tokens:
    an image whose caption others have as well finds it in any of these.
    """

    model_families = ("two_towers",)
    reads_text, needs_files, compares_samples = True, True, True
    field_prefixes = ENCODER_DECODER
    max_tokens = ONE_PIECE

    def __init__(
        self,
        special: SpecialTokens,
        config: ContrastiveObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        if images.mixes:
            raise UsageError(
                "objective.name = 'contrastive': a mixed image has no caption: set data.images.mixup=0 and "
                "data.images.cutmix=0"
            )
        self.reader: ImageReader = image_reader(images, model, config.name, row_lengths[0], training=training)
        positions = model.text_tower.max_positions if model.text_tower else 0
        self.longest = min(positions, *row_lengths[1:]) if row_lengths[1:] else positions
        self.special, self.begin_token, self.is_padded = special, config.begin_token, config.pad_captions
        if self.is_padded and self.longest < positions:
            raise UsageError(
                f"data.target_length = {self.longest} is too short for objective.pad_captions, which fills captions up "
                f"to model.text_tower.max_positions: choose data.target_length={positions}"
            )
        if self.longest <= 1 + self.begin_token:
            raise UsageError(
                f"data.target_length = {self.longest} has no room for a caption's begin token, end token and one token "
                f"between: choose e.g. data.target_length={positions}"
            )
        self.metrics = () if training else tuple(f"top{k}" for k in TOP)
        self.loss_weights: Mapping[str, float] = {TERM: 1.0, **dict.fromkeys(self.metrics, 0.0)}
        of_images = {f"encoder_{name}": field for name, field in self.reader.layout.fields.items()}
        numbers = {} if training else {CAPTIONS: Field("int32", (2,))}
        self.fields = {**of_images, "tokens": Field(pad_value=special.pad), **numbers}
        self._for_evaluation = partial(
            Contrastive, special, config, model, row_lengths, images, training=False
        )

    def for_evaluation(self) -> Objective:
        return self._for_evaluation()

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        framed = np.minimum(n_tokens + 1 + self.begin_token, self.longest)
        of_text = np.full_like(framed, self.longest) if self.is_padded else framed
        return np.stack([np.full_like(framed, self.reader.n_tokens), of_text], axis=1)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        if not len(piece.tokens):
            raise SampleError(
                "has no caption: give prep the tokenizer (`tokenizer.file`), and images with a .txt, or a .json with "
                "the field `read.text_key`"
            )
        images = self.reader.build(piece.files, key)
        fields: dict[str, NDArray[Any]] = {f"encoder_{name}": values for name, values in images.items()}
        fields["tokens"] = self.framed(piece.tokens)
        if self.metrics:
            fields[CAPTIONS] = np.zeros((len(fields["tokens"]), 2), np.int32)
            fields[CAPTIONS][0] = caption_number(fields["tokens"])
        return fields

    def framed(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """A caption's tokens with begin and end token, cut off where it is too long, and filled up if so configured."""
        begin = [self.special.bos] * self.begin_token
        caption = np.concatenate([begin, tokens[: self.longest - len(begin) - 1], [self.special.eos]])
        padding = self.longest - len(caption) if self.is_padded else 0
        return np.pad(caption.astype(np.int64), (0, padding), constant_values=self.special.pad)

    def random_piece(self, random: np.random.Generator) -> DocumentChunk:
        tokens = random.integers(self.special.vocab_size, size=random.integers(1, self.longest))
        return DocumentChunk(tokens, files=random_image_files(random, self.reader))

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        pairs = ((batch["positions"] == 0) & (batch["documents"] >= 0)).sum()
        return dict.fromkeys(self.loss_weights, pairs)

    def features(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Unit vectors of images and captions, the temperature, and in evaluation numbers of captions."""
        inputs = {name: field for name, field in batch.items() if name != CAPTIONS}
        features = dict(model(**inputs).predictions)
        if CAPTIONS in batch:
            is_first = (batch["positions"] == 0) & (batch["documents"] >= 0)
            high, low = batch[CAPTIONS][is_first].long().unbind(-1)
            features[CAPTIONS] = (high << 32) + low
        return features

    def terms_of(self, model: nn.Module, features: dict[str, Tensor]) -> Losses:
        """The loss of all pairs of the global batch, and in evaluation how many images find their captions."""
        return cast(Losses, cast(Any, model).compare(features, features.get(CAPTIONS)))

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        return self.terms_of(model, self.features(model, batch))


def caption_number(tokens: NDArray[np.int64]) -> NDArray[np.int32]:
    """A number of 64 bits, as two, that stands for a caption: equal captions have equal ones."""
    return np.frombuffer(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), np.int32)
