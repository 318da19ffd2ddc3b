"""Predict an image's text, each token from the image and the text before it (LLaVA; Liu et al. 2023)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import ImagesConfig, ImageToTextObjective, ModelConfig
from megatfm.config.image_text import make_image_tower
from megatfm.corpus.images import ImageIndex
from megatfm.data.sequences import BEGINS, DocumentChunk, Field
from megatfm.errors import SampleError, UsageError
from megatfm.objectives.base import (
    ENCODER_DECODER,
    OBJECTIVES,
    Example,
    IntArray,
    RandomKeys,
    RowLengths,
    SpecialTokens,
)
from megatfm.objectives.images import ImageBasedObjective, draw_image_files, make_image_reader
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey


@OBJECTIVES.register("image_to_text")
class ImageToText(ImageBasedObjective):
    """Images in the encoder's row; in the decoder's, a token for each of their patches, and the text to predict.

    A sample has one image or several, in the order of their tokens in the text, or all before it. A text that is longer
    than the row is truncated, and loses its end token.
    """

    model_families = ("vision_language",)
    predicts_tokens = True
    field_prefixes = ENCODER_DECODER
    loss_weights: Mapping[str, float] = {"causal": 1.0}

    def __init__(
        self,
        special: SpecialTokens,
        config: ImageToTextObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(special, config, model, row_lengths, images)
        if images.mixes:
            raise UsageError(
                "objective.name = 'image_to_text': a mixed image has no text: set data.images.mixup=0 and "
                "data.images.cutmix=0"
            )
        if model.connector is None:
            raise UsageError(
                f"objective.name = 'image_to_text' does not train model.family = {model.family!r}, but "
                "vision_language: change one of the two"
            )
        tower = make_image_tower(model)
        self.reader = make_image_reader(
            images, tower, config.name, row_lengths[0], training=training, section="model.vision_tower"
        )
        self.n_patches = self.reader.n_tokens - self.reader.layout.n_special
        self.special, self.begin_token = special, config.begin_token
        self.image_in_text = config.image_placement == "in_text"
        self.image_token = model.connector.image_token_id
        self.prompt_end = config.prompt_end_token_id
        if self.image_token in (special.bos, special.eos, special.pad):
            raise UsageError(
                f"model.connector.image_token_id = {self.image_token} is the tokenizer's begin, end or padding token: "
                "choose an id that no text has"
            )
        if self.prompt_end is not None and self.prompt_end in (self.image_token, special.bos):
            raise UsageError(
                f"objective.prompt_end_token_id = {self.prompt_end} is the image's token or the begin token: choose an "
                "id that only ends prompts"
            )
        self.max_image_tokens = row_lengths[0]
        self.max_text_tokens = row_lengths[1] if row_lengths[1:] else 2**31
        if self.max_text_tokens < self.n_patches + self.begin_token + 1 + (self.prompt_end is not None):
            raise UsageError(
                f"data.target_length = {self.max_text_tokens} is too short for an image, which takes {self.n_patches} "
                f"tokens of the text's row, and a token of text: choose e.g. data.target_length={self.n_patches + 64}"
            )
        image_fields = {f"encoder_{name}": field for name, field in self.reader.layout.fields.items()}
        image_fields[f"encoder_{BEGINS}"] = Field()
        self.fields = {
            **image_fields, "tokens": Field(pad_value=special.pad), "targets": Field(pad_value=IGNORE)
        }  # fmt: skip

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return self.add_image_lengths(n_tokens, np.ones_like(n_tokens))

    def add_image_lengths(self, n_tokens: IntArray, n_images: IntArray) -> IntArray:
        """Return sequence lengths [n, 2] of texts of `n_tokens` [n] with `n_images` [n]."""
        text_lengths = np.minimum(self._measure_texts(n_tokens, n_images), self.max_text_tokens)
        # A sample of too many images is refused by name when it is built.
        image_lengths = np.minimum(n_images * self.reader.n_tokens, self.max_image_tokens)
        return np.stack([image_lengths, text_lengths], axis=1)

    def count_truncated(self, n_tokens: IntArray, images: ImageIndex) -> int:
        """Return how many texts of `n_tokens` [n], with their images, are truncated."""
        return int((self._measure_texts(n_tokens, images.image_counts) > self.max_text_tokens).sum())

    def _measure_texts(self, n_tokens: IntArray, n_images: IntArray) -> IntArray:
        """Return the lengths of whole texts [n] with their images' patches, which replace the image tokens."""
        n_text = np.maximum(n_tokens - n_images * self.image_in_text, 0)
        return self.begin_token + n_images * self.n_patches + n_text

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        """Return image fields, `tokens` [begin, image token × patches, text], and `targets`: next text tokens, after a
        prompt if there is one."""
        images = self.reader.build_several(chunk.files, key)
        fields: dict[str, NDArray[Any]] = {f"encoder_{name}": values for name, values in images.items()}
        sequence = self.insert_images(chunk.tokens, self._count_images(images))
        fields["tokens"] = sequence[:-1][: self.max_text_tokens]
        targets = np.where(sequence == self.image_token, IGNORE, sequence)
        if self.prompt_end is not None:
            targets[: self.measure_prompt(sequence)] = IGNORE
        fields["targets"] = targets[1:][: self.max_text_tokens]
        return fields

    def measure_prompt(self, sequence: IntArray) -> int:
        """Return the number of tokens up to the end of the prompt.

        Raises SampleError for a text without exactly one end in the row.
        """
        ends = np.flatnonzero(sequence == self.prompt_end)
        if len(ends) != 1:
            raise SampleError(
                f"has {len(ends)} prompt ends (token {self.prompt_end}), and objective.prompt_end_token_id wants 1"
            )
        if ends[0] >= self.max_text_tokens:
            raise SampleError(
                f"has a prompt of {ends[0] + 1} tokens, its image's included, and a row has "
                f"{self.max_text_tokens}: raise data.target_length"
            )
        return int(ends[0]) + 1

    def _count_images(self, images: dict[str, NDArray[Any]]) -> int:
        """Return the number of images. Raises SampleError for more than fit a row."""
        n_tokens = len(images["grid"])
        if n_tokens > self.max_image_tokens:
            raise SampleError(
                f"has {n_tokens // self.reader.n_tokens} images of {self.reader.n_tokens} tokens, and their row has "
                f"{self.max_image_tokens}: choose data.sequence_length={n_tokens}"
            )
        return n_tokens // self.reader.n_tokens

    def insert_images(self, text: NDArray[np.integer], n_images: int = 1) -> IntArray:
        """Return begin token, text [n] with the images' tokens, and end token.

        Raises SampleError for a wrong number of image tokens in the text, or an image that would be truncated.
        """
        positions, expected = np.flatnonzero(text == self.image_token), n_images * self.image_in_text
        if len(positions) != expected:
            setting, images = ("in_text", f"{n_images} images") if self.image_in_text else ("before_text", "")
            raise SampleError(
                f"names its image{'s' * (n_images > 1)} {len(positions)} times (token {self.image_token}), and "
                f"objective.image_placement = {setting!r} wants {expected}{', for ' * bool(images)}{images}"
            )
        counts = np.where(text == self.image_token, self.n_patches, 1)
        last_image = int(positions[-1]) if self.image_in_text else 0
        n_before = int(counts[:last_image].sum()) + (0 if self.image_in_text else (n_images - 1) * self.n_patches)
        if self.begin_token + n_before + self.n_patches > self.max_text_tokens:
            raise SampleError(
                f"has {n_before} tokens before its {'last ' * (n_images > 1)}image of {self.n_patches} patches, and a "
                f"row has {self.max_text_tokens}: raise data.target_length"
            )
        leading_image_tokens = [] if self.image_in_text else [self.image_token] * (n_images * self.n_patches)
        begin_tokens = [self.special.bos] * self.begin_token
        sequence = np.concatenate([begin_tokens, leading_image_tokens, np.repeat(text, counts), [self.special.eos]])
        return sequence.astype(np.int64)

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        room = min(self.max_text_tokens - self.n_patches - self.begin_token, 64)
        has_prompt = self.prompt_end is not None
        text = random.integers(self.special.vocab_size, size=random.integers(1 + has_prompt, room + 1))
        numbers = (self.image_token + offset for offset in (1, 2))
        plain = next(n for n in numbers if n % self.special.vocab_size != self.prompt_end)
        text[(text == self.image_token) | (text == self.prompt_end)] = plain % self.special.vocab_size
        if self.image_in_text:
            text = np.insert(text[: max(len(text) - 1, 0)], 0, self.image_token)
        if self.prompt_end is not None:
            text[random.integers(int(self.image_in_text), len(text))] = self.prompt_end
        return DocumentChunk(text, files=draw_image_files(random, self.reader))
