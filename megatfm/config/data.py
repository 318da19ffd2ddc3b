"""The `[data]` section: which corpora are read, in what order, and how images are prepared."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatfm.config.parts import ByName, PartName, expand_name
from megatfm.config.section import MAX_LENGTH, Fraction, PathStr, Section, find_nearest_divisor

# Images: `[data.images]`


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


# Corpora


class MixtureSource(Section):
    """One corpus of a mixture."""

    path: PathStr
    """Folder or URL of the corpus."""
    weight: NonNegativeFloat
    """Weight; the corpus's share of the rows is this over the sum of all weights. 0: not read, until
    data.mixture_schedule gives it a weight."""
    quarantine: list[str] = Field(default_factory=list)
    """Samples that become padding, as in `data.quarantine`."""


class MixtureChange(Section):
    """New weights from a number of tokens on."""

    tokens: PositiveInt
    """Tokens of the run, with padding, after which the weights apply."""
    weights: dict[str, NonNegativeFloat]
    """Weight of every source; 0: not read."""


class RampupStage(Section):
    """Steps at the start of a run with fewer or shorter rows."""

    steps: PositiveInt
    """Number of steps."""
    global_batch: PositiveInt | None = None
    """Rows of full length in each step; left out: train.global_batch."""
    sequence_length: PositiveInt | None = None
    """Length of rows, a divisor of data.sequence_length. Rows are cut, so a step has as many tokens."""


class DataConfig(Section):
    """Corpora of `megatfm prep`, and the order in which their text is read."""

    train: PathStr | None = Field(default=None, examples=["corpora/quickstart/train"])
    """Folder or URL of the training corpus (shards and manifest.json). "": none, for a mixture."""
    mixture: dict[str, MixtureSource] = Field(default_factory=dict)
    """Training corpora by name, e.g. `[data.mixture.web]` with `path = "corpora/web"` and `weight = 0.7`."""
    mixture_schedule: list[MixtureChange] = Field(default_factory=list)
    """New weights of the mixture, in the order of their tokens."""
    mixture_block_rows: PositiveInt = Field(default=1024, le=2**20)
    """Rows of a stream within which the mixture's weights hold exactly, to one row."""
    validation: dict[str, PathStr] = Field(default_factory=dict)
    """Named validation corpora, e.g. `validation.code = "corpora/code/validation"`."""
    tokenizer: PathStr | None = Field(default=None, examples=["corpora/quickstart/tokenizer.model"])
    """The tokenizer of the corpora (checked by its hash): its file, or a folder with it. Left out only if the objective
    reads no text."""
    sequence_length: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Tokens of a packed row; in an encoder-decoder, of the encoder's."""
    target_length: PositiveInt | None = Field(default=None, examples=[128], le=MAX_LENGTH)
    """Tokens of a packed row of an encoder-decoder's decoder."""
    shuffle: bool = True
    """Read in shuffled order, a new one each epoch; false: in stored order."""
    read_streams: PositiveInt | None = Field(default=None, examples=[64], le=MAX_LENGTH)
    """Number of streams, parts of the corpus that are read in turn; part of the order, so fixed for a run. Left out:
    from train.global_batch, so that no two ranks read the same text."""
    attend_across_documents: bool = False
    """Let packed documents see the ones before them in their row; positions then count through the row."""
    rampup: list[RampupStage] = Field(default_factory=list)
    """Stages at the start of the run, e.g. `[{ steps = 100, global_batch = 8, sequence_length = 128 }]`."""
    quarantine: list[str] = Field(default_factory=list, examples=[["17", "120-153"]])
    """Indices or ranges of damaged samples of `data.train`, which become padding; all others keep their order."""
    images: ImagesConfig = ImagesConfig()
    """Size and transforms of images, for objectives that read them."""
    workers: NonNegativeInt = 0
    """Worker processes of each rank that read and pack ahead. 0: threads of the rank."""
    cache_dir: PathStr | None = None
    """Folder for shards from URLs and indexes, shared by a machine's ranks; left out, `~/.cache/megatfm/shards`."""
    cache_bytes: PositiveInt = 2**36
    """Size above which the least recently read data is dropped. It should hold a shard for each stream."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_train(cls, values: Any) -> Any:
        """Drop train = "", which replaces a preset's corpus by a mixture."""
        if isinstance(values, dict) and values.get("train") == "" and values.get("mixture"):
            return {key: value for key, value in values.items() if key != "train"}
        return values

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.train is None) == (not self.mixture):
            raise ValueError(
                "train: give the training corpus as data.train, or several as data.mixture, and not both"
                if self.train
                else "train: field required; for example 'corpora/quickstart/train' (or several as data.mixture)"
            )
        if self.quarantine and self.mixture:
            raise ValueError("quarantine: in a mixture this is a key of the source, data.mixture.NAME.quarantine")
        if self.mixture_schedule and not self.mixture:
            raise ValueError("mixture_schedule: there is no data.mixture whose weights could change")
        for change in self.mixture_schedule:
            if change.weights.keys() != self.mixture.keys():
                raise ValueError(
                    f"mixture_schedule: weights for {', '.join(change.weights)}, but the mixture has "
                    f"{', '.join(self.mixture)}: give one for each (0: it is not read)"
                )
        tokens = [change.tokens for change in self.mixture_schedule]
        if sorted(set(tokens)) != tokens:
            raise ValueError(f"mixture_schedule: tokens = {tokens}: each change comes after the one before it")
        return self

    @model_validator(mode="after")
    def _check_rampup(self) -> Self:
        for number, stage in enumerate(self.rampup):
            if stage.sequence_length and self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"rampup[{number}].sequence_length = {stage.sequence_length} does not divide data.sequence_length "
                    f"= {self.sequence_length}: the nearest that does is "
                    f"{find_nearest_divisor(self.sequence_length, stage.sequence_length)}"
                )
        return self
