"""Transforms of training images. Draws follow from a key, so a sample's pixels are the same in any process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, exp, log, pi, radians, sin, sqrt
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from megatfm import rng
from megatfm.corpus.images import MAX_PIXELS
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


FILL = {"RGB": (124, 116, 104), "L": (117,)}
"""ImageNet's mean, by mode of the image."""
Operation = Callable[[Image.Image, float, Image.Resampling], Image.Image]
"""Transforms an image with a strength from −1 to 1; operations without a direction use its absolute value."""


def rotate_image(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
    """Rotate around the centre."""
    angle = radians(30 * strength)
    a, b = cos(angle), sin(angle)
    x, y = image.width / 2, image.height / 2
    return _transform_affinely(image, (a, -b, x - a * x + b * y, b, a, y - b * x - a * y), filter_)


def shear_x(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
    """Shear along the rows."""
    return _transform_affinely(image, (1, 0.3 * strength, 0, 0, 1, 0), filter_)


def shear_y(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
    """Shear along the columns."""
    return _transform_affinely(image, (1, 0, 0, 0.3 * strength, 1, 0), filter_)


def translate_x(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
    """Translate along the rows."""
    return _transform_affinely(image, (1, 0, 0.45 * strength * image.width, 0, 1, 0), filter_)


def translate_y(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
    """Translate along the columns."""
    return _transform_affinely(image, (1, 0, 0, 0, 1, 0.45 * strength * image.height), filter_)


def _transform_affinely(image: Image.Image, matrix: tuple[float, ...], filter_: Image.Resampling) -> Image.Image:
    """Map (x, y) of the result to (a x + b y + c, d x + e y + f) of the image. matrix: a to f."""
    fill: Any = FILL[image.mode] if image.mode == "RGB" else FILL[image.mode][0]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=filter_, fillcolor=fill)


def _make_enhancement(kind: Callable[[Image.Image], Any]) -> Operation:
    def apply(image: Image.Image, strength: float, filter_: Image.Resampling) -> Image.Image:
        enhanced: Image.Image = kind(image).enhance(1 + 0.9 * strength)
        return enhanced

    return apply


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, strength, filter_: image,
    "auto_contrast": lambda image, strength, filter_: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, filter_: ImageOps.equalize(image),
    "rotate": rotate_image,
    "solarize": lambda image, strength, filter_: ImageOps.solarize(image, round(256 * (1 - abs(strength)))),
    "posterize": lambda image, strength, filter_: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "color": _make_enhancement(ImageEnhance.Color),
    "contrast": _make_enhancement(ImageEnhance.Contrast),
    "brightness": _make_enhancement(ImageEnhance.Brightness),
    "sharpness": _make_enhancement(ImageEnhance.Sharpness),
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
}
NAMES = tuple(OPERATIONS)


@TRANSFORMS.register("rand_augment")
class RandAugment(SectionTransform):
    """Apply random operations."""

    def __call__(self, image: Image.Image, key: Key, size: Size) -> Image.Image:
        draws, section, filter_ = Draws(key), self.section, self.filter
        if filter_ == Image.Resampling.LANCZOS:  # which Pillow's affine transforms lack
            filter_ = Image.Resampling.BICUBIC
        for _ in range(section.n_ops):
            name, sign = NAMES[draws.below(len(NAMES))], 1 if draws.chance(0.5) else -1
            noise = sqrt(-2 * log(1 - draws.uniform())) * cos(2 * pi * draws.uniform())  # Box & Muller
            strength = min(max(section.magnitude + section.magnitude_std * noise, 0.0), 10.0) / 10
            image = OPERATIONS[name](image, sign * strength, filter_)
        return image
