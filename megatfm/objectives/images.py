"""Objectives of images: their base class, and their image readers, from `[data.images]` and the model's patches."""

import io
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.objectives.base import Objective

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
