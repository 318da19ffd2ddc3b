"""Objectives of images: their base class and image readers, from `[data.images]` and the model's patches, and
supervised classification (Dosovitskiy et al. 2021)."""

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ImageClassificationObjective, ImagesConfig, ModelConfig
from megatfm.corpus.webdataset_images import parse_class_number
from megatfm.data.dataset import RowDataset
from megatfm.data.sequences import IGNORE_INDEX, DocumentChunk, Field
from megatfm.errors import SampleError, UsageError
from megatfm.layers.classifier import TOP_K
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    Losses,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
)
from megatfm.rng import ChunkKey

if TYPE_CHECKING:
    from megatfm.data.image_mixing import Mixing
    from megatfm.data.images import ImageReader, PatchLayout

ONE_CHUNK = 2**40
"""Chunk length of image objectives: a sample is one image, and its caption is never cut."""


class ImageBasedObjective(Objective):
    """Base of objectives whose samples hold images. arguments: those of the subclass's constructor.

    The constructor also takes `training`; false for evaluation, without random changes of images.
    """

    needs_files = reads_images = True
    max_tokens = ONE_CHUNK
    reader: "ImageReader"

    def __init__(self, *arguments: Any) -> None:
        self._make_evaluation_objective = partial(cast(Any, type(self)), *arguments, training=False)

    def for_evaluation(self) -> Objective:
        objective: Objective = self._make_evaluation_objective()
        return objective

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        files = draw_image_files(random, self.reader)
        return DocumentChunk(np.zeros(self.reader.n_tokens, np.uint16), files=files)


def make_patch_layout(model: ModelConfig, objective: str) -> "PatchLayout":
    """Return the patch layout of a model's images. Raises UsageError without a patch embedding or Pillow."""
    try:
        from megatfm.data.images import MODES, PatchLayout
    except ImportError as error:
        raise UsageError(
            f"objective.name = {objective!r} reads images, which needs Pillow ({error}): pip install 'megatfm[vision]'"
        ) from error

    embedding = model.embedding
    patch_size = getattr(embedding, "patch_size", None)
    if patch_size is None:
        raise UsageError(
            f"objective.name = {objective!r} reads images, but model.embedding.name = {embedding.name!r} reads no "
            "patches: set model.embedding.name=patches"
        )
    channels = getattr(embedding, "channels", 3)
    if channels not in MODES:
        raise UsageError(f"model.embedding.channels = {channels}: images are decoded to 3 channels (RGB) or 1 (grey)")
    n_special = getattr(embedding, "n_special_tokens", 0)
    return PatchLayout(patch_size, channels, n_special)


def make_image_reader(
    images: ImagesConfig,
    model: ModelConfig,
    objective: str,
    row_length: int,
    *,
    training: bool,
    any_shape: bool = False,
    section: str = "model",
) -> "ImageReader":
    """Return a reader of images. training: apply `data.images.transforms`.

    any_shape: whether objective and model take images of different shapes. section: config section of the image
    encoder. Raises UsageError for sizes that are no multiple of the patches, or images that don't fit a row.
    """
    layout = make_patch_layout(model, objective)
    from megatfm.data.image_transforms import INTERPOLATIONS, TRANSFORMS
    from megatfm.data.images import ImageReader

    size, patch_size = images.size, layout.patch_size
    if images.max_patches is not None and not any_shape:
        raise UsageError(
            f"data.images.max_patches = {images.max_patches}: objective.name = {objective!r} with model.family = "
            f"{model.family!r} takes images of one size: set data.images.size in its place"
        )
    if images.max_patches is None and size % patch_size:
        multiple_below = size - size % patch_size
        alternatives = f"{multiple_below} or {multiple_below + patch_size}" if multiple_below else str(patch_size)
        raise UsageError(
            f"data.images.size = {size} is not a multiple of {section}.embedding.patch_size = {patch_size}: "
            f"choose {alternatives}"
        )
    interpolation = INTERPOLATIONS[images.interpolation]
    transforms = [TRANSFORMS.get(config.name)(config, interpolation) for config in images.transforms]
    reader = ImageReader(
        layout,
        size if images.max_patches is None else None,
        images.max_patches or 0,
        transforms if training else (),
        images.crop_pct,
        interpolation,
        crops_all=not training,
    )
    if reader.n_tokens > row_length:
        key = f"size = {size}" if images.max_patches is None else f"max_patches = {images.max_patches}"
        raise UsageError(
            f"data.sequence_length = {row_length} is too short for an image of data.images.{key}, which takes "
            f"{reader.n_tokens} tokens: choose data.sequence_length={reader.n_tokens}"
        )
    return reader


def make_image_mixing(images: ImagesConfig, reader: "ImageReader") -> "Mixing | None":
    """Return mixup and cutmix of `[data.images]`; None if both are off."""
    from megatfm.data.image_mixing import Mixing

    if not images.mixes:
        return None
    layout = reader.layout
    return Mixing(images.mixup, images.cutmix, images.mix_probability, images.size, layout.patch_size, layout.n_special)


def draw_image_files(random: np.random.Generator, reader: "ImageReader") -> Mapping[str, bytes]:
    """Return a stored image of noise, by extension, of random shape up to twice the size that fits a row."""
    from PIL import Image

    channels, patch_size = reader.layout.channels, reader.layout.patch_size
    max_side = 2 * (reader.size or patch_size * round(reader.max_patches**0.5))
    height, width = random.integers(1, max_side + 1, 2).tolist()
    shape = (height, width, 3) if channels == 3 else (height, width)
    out = io.BytesIO()
    Image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(out, "PNG", compress_level=0)  # noise
    return {"png": out.getvalue()}


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
