"""The `[data.images]` section: sizes, augmentation and mixing of images."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatfm.config.parts import ByName, PartName, expand_name
from megatfm.config.section import Fraction, Section


def _check_order(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if low > high:
        raise ValueError(f"from {low:g} to {high:g}: give the smaller number first")
    return bounds


AreaShare = Annotated[float, Field(gt=0, le=1)]
AreaRange = Annotated[tuple[AreaShare, AreaShare], AfterValidator(_check_order)]
Range = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_check_order)]


class TransformSection(Section):
    """One transform of a training image. Draws are a function of seed, epoch and sample."""

    name: str


class ResizeTransform(TransformSection):
    """Resize so that the shorter side has `size` pixels."""

    name: Literal["resize"] = "resize"
    size: PositiveInt = Field(examples=[256])
    """Pixels of the shorter side."""


class RandomResizedCropTransform(TransformSection):
    """Crop a random part and resize it to `data.images.size` (Szegedy et al. 2015)."""

    name: Literal["random_resized_crop"] = "random_resized_crop"
    scale: AreaRange = (0.08, 1.0)
    """Share of the image's area, from and to."""
    ratio: Range = (3 / 4, 4 / 3)
    """Width over height, from and to, drawn on a logarithmic scale."""


class RandomCropTransform(TransformSection):
    """Pad all sides, and crop a random square of `data.images.size` (the recipe of CIFAR)."""

    name: Literal["random_crop"] = "random_crop"
    padding: Annotated[int, Field(ge=0)] = 4
    """Black pixels added to each side."""


class HorizontalFlipTransform(TransformSection):
    """Mirror left and right."""

    name: Literal["horizontal_flip"] = "horizontal_flip"
    p: Fraction = 0.5
    """Probability."""


class RandAugmentTransform(TransformSection):
    """Random operations of fourteen, all of one strength (Cubuk et al. 2020)."""

    name: Literal["rand_augment"] = "rand_augment"
    n_ops: PositiveInt = 2
    """Operations applied one after another."""
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Their strength, from 0 to 10."""
    magnitude_std: NonNegativeFloat = 0.0
    """Standard deviation of each operation's strength (timm: 0.5)."""


class ColorJitterTransform(TransformSection):
    """Change brightness, contrast, saturation and hue by random factors, in random order."""

    name: Literal["color_jitter"] = "color_jitter"
    brightness: Fraction = 0.4
    """Factors are from 1 − this to 1 + this."""
    contrast: Fraction = 0.4
    """Likewise."""
    saturation: Fraction = 0.4
    """Likewise."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest shift of the hue, in turns of the colour circle."""
    p: Fraction = 1.0
    """Probability of the transform."""


class RandomErasingTransform(TransformSection):
    """Fill a random rectangle with noise or with one colour (Zhong et al. 2020)."""

    name: Literal["random_erasing"] = "random_erasing"
    p: Fraction = 0.25
    """Probability."""
    scale: AreaRange = (0.02, 1 / 3)
    """Share of the image's area, from and to."""
    ratio: Range = (0.3, 1 / 0.3)
    """Width over height, from and to, drawn on a logarithmic scale."""
    fill: Literal["noise", "color", "black"] = "noise"
    """Noise for every pixel, one random colour, or black."""


class PluginTransform(TransformSection):
    """A transform that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("transform (data.images.transforms)")] = Field(examples=["my_transform"])
    """The name under which it is registered."""


TransformConfig = Annotated[
    ResizeTransform
    | RandomResizedCropTransform
    | RandomCropTransform
    | HorizontalFlipTransform
    | RandAugmentTransform
    | ColorJitterTransform
    | RandomErasingTransform
    | PluginTransform,
    ByName(),
]


class ImagesConfig(Section):
    """Transforms from stored images to rows of patches. The side of a patch is `model.embedding.patch_size`."""

    size: PositiveInt = Field(default=224, le=2**14)
    """Side of an image in pixels, a multiple of the patch's."""
    max_patches: PositiveInt | None = Field(default=None, examples=[256], le=2**20)
    """Native resolution in place of `size`: each image keeps its shape, cut to complete patches, and shrinks if it has
    more patches than this. Rows hold as many images as fit."""
    transforms: list[Annotated[TransformConfig, BeforeValidator(expand_name)]] = Field(
        default_factory=list, examples=[["random_resized_crop", "horizontal_flip"]]
    )
    """Transforms of training images in this order: names, or tables with a `name`. An image of another size is then
    resized and cropped as in evaluation."""
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    """In evaluation, the shorter side is resized to size / crop_pct, and the centre is cropped."""
    mixup: NonNegativeFloat = 0.0
    """α of mixup: images are averaged with weights from Beta(α, α), and so are their labels; 0: never."""
    cutmix: NonNegativeFloat = 0.0
    """α of cutmix: a rectangle of the other image, of 1 − λ of the area with λ from Beta(α, α); 0: never. With both,
    each image gets one of the two with equal probability."""
    mix_probability: Fraction = 1.0
    """Share of images that are mixed, if mixup or cutmix is on."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    """Filter of every resize."""

    @model_validator(mode="after")
    def _check_mixing(self) -> Self:
        if self.max_patches is not None and self.mixes:
            raise ValueError(
                "mixup and cutmix need images of one size: leave out max_patches, or set mixup = 0 and cutmix = 0"
            )
        return self

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0
