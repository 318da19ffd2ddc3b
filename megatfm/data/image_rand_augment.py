"""RandAugment: a few of fourteen operations, all of one strength (Cubuk et al. 2020).

At strength 10 of 10: rotations by 30°, shears by 0.3, translations by 0.45 of the side, factors of 1 ± 0.9, solarize
with a threshold of 0, posterize to 4 bits. As in timm's "increasing" variant, a higher strength always changes an image
more. Signs are drawn. Pixels from outside the image have ImageNet's mean colour.
"""

from collections.abc import Callable
from math import cos, log, pi, radians, sin, sqrt
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

from megatfm.data.image_transforms import TRANSFORMS, Draws, Key, SectionTransform, Size

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
