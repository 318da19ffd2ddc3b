"""Transforms of training images. Draws follow from a key, so a sample's pixels are the same in any process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from megatfm import rng
from megatfm.corpus.image_size import MAX_PIXELS
from megatfm.errors import SampleError
from megatfm.registry import Registry
from megatfm.rng import KeyPart

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
CROP_ATTEMPTS = 10
"""Random boxes that are tried before the centre is taken (as in torchvision)."""

Key = tuple[KeyPart, ...]
Size = tuple[int, int]
"""Width and height in pixels, as Pillow has them."""
Transform = Callable[[Image.Image, Key, Size], Image.Image]
"""Transforms an image, which is resized to a size in the end; everything random is a function of the key."""

TRANSFORMS: Registry[Callable[[Any, Image.Resampling], Transform]] = Registry("transform (data.images.transforms)")
"""Constructors, called as `transform(section, filter)`: the config's section of that name, the filter of resizes."""


class Draws:
    """Random numbers of a key, one after another."""

    def __init__(self, key: Key) -> None:
        self._raw = rng.bit_generator(*key)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * float((self._raw.random_raw() >> 11) * 2.0**-53)

    def below(self, n: int) -> int:
        """Return a whole number in [0, n)."""
        return min(int(self.uniform() * n), n - 1)

    def chance(self, p: float) -> bool:
        """Return True with probability p."""
        return self.uniform() < p

    def log_uniform(self, low: float, high: float) -> float:
        """Return a number in [low, high) whose logarithm is uniform."""
        return exp(self.uniform(log(low), log(high)))

    def permutation(self, n: int) -> list[int]:
        """Return a random order of 0 … n − 1."""
        return sorted(range(n), key=[self.uniform() for _ in range(n)].__getitem__)


def resize_image(image: Image.Image, size: Size, filter_: Image.Resampling) -> Image.Image:
    """Resize an image by its shorter side. Raises SampleError for one so long that the result would fill the memory."""
    if size[0] * size[1] > MAX_PIXELS:
        raise SampleError(
            f"has an image of {image.width} × {image.height} pixels, which would be resized to {size[0]} × {size[1]}: "
            "cut it before prep, or leave it out"
        )
    return image.resize(size, filter_)


@dataclass(frozen=True)
class SectionTransform:
    """Base of transforms that have a section of the config; picklable, for worker processes."""

    section: Any
    filter: Image.Resampling


@TRANSFORMS.register("resize")
class Resize(SectionTransform):
    """Resize the shorter side."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        scale = self.section.size / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        return resize_image(image, (width, height), self.filter)


@TRANSFORMS.register("random_resized_crop")
class RandomResizedCrop(SectionTransform):
    """Crop a random box, and resize it."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        scale, ratio = self.section.scale, self.section.ratio
        box = _draw_box(image.size, scale, ratio, Draws(key)) or _compute_central_box(image.size, ratio)
        left, top, width, height = box
        # Cropped first, or the filter would read pixels outside the box.
        return image.crop((left, top, left + width, top + height)).resize(size, self.filter)


@TRANSFORMS.register("random_crop")
class RandomCrop(SectionTransform):
    """Pad all sides with black, and crop a random square."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        draws, pad = Draws(key), self.section.padding
        left, top = (
            draws.below(max(side + 2 * pad - target_side, 0) + 1) - pad
            for side, target_side in zip(image.size, size, strict=True)
        )
        return image.crop((left, top, left + size[0], top + size[1]))  # black outside the image


@TRANSFORMS.register("horizontal_flip")
class HorizontalFlip(SectionTransform):
    """Mirror left and right."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        is_flipped = Draws(key).chance(self.section.p)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else image


@TRANSFORMS.register("color_jitter")
class ColorJitter(SectionTransform):
    """Change brightness, contrast, saturation and hue."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        draws, section = Draws(key), self.section
        if not draws.chance(section.p):
            return image
        kinds = (
            (ImageEnhance.Brightness, section.brightness),
            (ImageEnhance.Contrast, section.contrast),
            (ImageEnhance.Color, section.saturation),
        )
        order = draws.permutation(len(kinds) + 1)
        factors = [draws.uniform(1 - strength, 1 + strength) for _, strength in kinds]
        turn = draws.uniform(-section.hue, section.hue)
        for number in order:
            if number == len(kinds):
                image = shift_hue(image, turn) if section.hue else image
            elif kinds[number][1]:
                image = kinds[number][0](image).enhance(factors[number])
        return image


def shift_hue(image: Image.Image, turn: float) -> Image.Image:
    """Shift the hue by a fraction of the colour circle; a grey image has none."""
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    shifted = np.asarray(hue) + np.uint8(round(turn * 255) % 256)  # wraps around
    return Image.merge("HSV", (Image.fromarray(shifted), saturation, value)).convert("RGB")


@TRANSFORMS.register("random_erasing")
class RandomErasing(SectionTransform):
    """Fill a random rectangle."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        draws, section = Draws(key), self.section
        if not draws.chance(section.p):
            return image
        box = _draw_box(image.size, section.scale, section.ratio, draws)
        if box is None:
            return image
        left, top, width, height = box
        pixels = np.array(image)
        region = pixels[top : top + height, left : left + width]
        if section.fill == "noise":
            noise = rng.random_uint64(-(-region.size // 8), *key, "noise").view(np.uint8)
            region[:] = noise[: region.size].reshape(region.shape)
        else:
            color = [draws.below(256) if section.fill == "color" else 0 for _ in image.getbands()]
            region[:] = color if pixels.ndim == 3 else color[0]
        return Image.fromarray(pixels)


def _draw_box(
    size: Size, scale: Sequence[float], ratio: Sequence[float], draws: Draws
) -> tuple[int, int, int, int] | None:
    """Return left, top, width and height of a random box in an image; None if no attempt fits."""
    area = size[0] * size[1]
    for _ in range(CROP_ATTEMPTS):
        box_area, aspect = area * draws.uniform(*scale), draws.log_uniform(*ratio)
        width, height = max(1, round(sqrt(box_area * aspect))), max(1, round(sqrt(box_area / aspect)))
        if width <= size[0] and height <= size[1]:
            return draws.below(size[0] - width + 1), draws.below(size[1] - height + 1), width, height
    return None


def _compute_central_box(size: Size, ratio: Sequence[float]) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the largest central box within the range of ratios."""
    width, height = size
    if width < ratio[0] * height:
        height = min(height, max(1, round(width / ratio[0])))
    elif width > ratio[1] * height:
        width = min(width, max(1, round(height * ratio[1])))
    return (size[0] - width) // 2, (size[1] - height) // 2, width, height
