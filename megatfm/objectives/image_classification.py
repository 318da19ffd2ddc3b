"""Supervised classification of images (Dosovitskiy et al. 2021)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ImageClassificationObjective, ImagesConfig, ModelConfig
from megatfm.corpus.webdataset_images import parse_class_number
from megatfm.data.dataset import RowDataset
from megatfm.data.sequences import IGNORE_INDEX, DocumentChunk, Field
from megatfm.errors import SampleError, UsageError
from megatfm.layers.classifier import TOP_K
from megatfm.objectives.base import OBJECTIVES, Batch, Example, IntArray, Losses, RandomKeys, RowLengths, SpecialTokens
from megatfm.objectives.images import ImageBasedObjective, draw_image_files, make_image_mixing, make_image_reader
from megatfm.rng import ChunkKey

HEAD = "classifier"
ACCURACIES = frozenset(f"top{k}" for k in TOP_K)


@OBJECTIVES.register("image_classification")
class ImageClassification(ImageBasedObjective):
    """Predict each image's class, which a sample's file "cls" holds: in `labels` at its first token, −100 elsewhere."""

    model_families = ("encoder", "hierarchical")
    reads_text = False

    def __init__(
        self,
        special: SpecialTokens | None,
        config: ImageClassificationObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
        images: ImagesConfig,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(special, config, model, row_lengths, images)
        self.n_classes = get_n_classes(model)
        self.reader = make_image_reader(
            images, model, config.name, row_lengths[0], training=training, any_shape=model.family != "hierarchical"
        )
        self.metrics = () if training else tuple(f"top{k}" for k in TOP_K if k < self.n_classes)
        self.loss_weights = {HEAD: 1.0, **dict.fromkeys(self.metrics, 0.0)}
        self.mixing = make_image_mixing(images, self.reader) if training else None
        self.fields = {**self.reader.layout.fields, "labels": Field(pad_value=IGNORE_INDEX)}
        if self.mixing is not None:
            self.fields |= {"mixed_labels": Field(pad_value=IGNORE_INDEX), "label_weights": Field("float32")}

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.full(len(n_tokens), self.reader.n_tokens)

    @property
    def image_lengths(self) -> Callable[[IntArray], IntArray] | None:
        """Sequence lengths [n] from heights and widths [n, 2], if images keep their shape; else None."""
        return self.reader.image_lengths if self.reader.size is None else None

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        fields: dict[str, NDArray[Any]] = self.reader.build(chunk.files, key)
        labels = np.full(len(fields["grid"]), IGNORE_INDEX)
        labels[0] = read_label(chunk.files, self.n_classes)
        if self.mixing is not None:  # mixed with itself until MixedImages has a second image
            weights = np.zeros(len(labels), np.float32)
            weights[0] = 1
            fields |= {"mixed_labels": labels.copy(), "label_weights": weights}
        return {**fields, "labels": labels}

    def prepare_rows(self, rows: RowDataset, turn: int) -> RowDataset:
        if self.mixing is None:
            return rows
        from megatfm.data.image_mixing import MixedImages

        return MixedImages(rows, self.mixing, turn)

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        files = draw_image_files(random, self.reader)
        label = b"%d" % random.integers(self.n_classes)
        return DocumentChunk(np.zeros(self.reader.n_tokens, np.uint16), files={**files, "cls": label})

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.loss_weights, (batch["labels"] != IGNORE_INDEX).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the sum of each term; accuracies only of the evaluation objective."""
        losses = dict(model(**batch).losses)
        return {term: value for term, value in losses.items() if term in self.loss_weights or term not in ACCURACIES}


def read_label(files: Mapping[str, bytes], n_classes: int) -> int:
    """Return a sample's class. Raises SampleError if it has none, or one beyond the model's."""
    if "cls" not in files:
        raise SampleError(
            "has no .cls with the number of its class: give prep the labels (see `read.labels` in the guide to prep)"
        )
    label = parse_class_number(files["cls"])
    if label is None or label >= n_classes:
        excerpt = files["cls"].strip()[:20].decode("utf-8", "replace")
        raise SampleError(
            f"has the class {excerpt!r}, and model.extra_heads.{HEAD}.n_classes = {n_classes}: classes are 0 to "
            f"{n_classes - 1}"
        )
    return label


def get_n_classes(model: ModelConfig) -> int:
    """Return the number of classes of the model's head. Raises UsageError if there is no head."""
    head: Any = model.extra_heads.get(HEAD)
    if head is None:
        raise UsageError(
            f"objective.name = 'image_classification' needs a model with the head: add [model.extra_heads.{HEAD}] with "
            "n_classes"
        )
    return int(head.n_classes)
