"""The `[model.position]` section: a variant for each position encoding."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import MAX_LENGTH, MAX_WIDTH, Section


class PositionSection(Section):
    """Keys of every position encoding."""

    name: str

    @property
    def limit(self) -> int | None:
        """Number of positions; None: any number."""
        return None


class LinearScaling(Section):
    """Positions divided by `factor` (Chen et al. 2023)."""

    name: Literal["linear"] = "linear"
    factor: PositiveFloat = Field(examples=[8.0])
    """Ratio of the longer context to the original one."""


class NtkScaling(Section):
    """A larger base, so that the slowest channel is stretched by `factor` and the fastest not at all (bloc97 2023)."""

    name: Literal["ntk"] = "ntk"
    factor: PositiveFloat = Field(examples=[8.0])
    """Ratio of the longer context to the original one."""


class YarnScaling(Section):
    """YaRN (Peng et al. 2023): slow channels are interpolated, fast ones kept, a ramp between, and scores scaled."""

    name: Literal["yarn"] = "yarn"
    factor: PositiveFloat = Field(examples=[8.0])
    """Ratio of the longer context to the original one."""
    original_length: PositiveInt = Field(examples=[4096], le=MAX_LENGTH)
    """The original context, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Channels with at least this many turns within the original context are kept."""
    beta_slow: PositiveFloat = 1.0
    """Channels with at most this many turns within the original context are interpolated."""
    attention_factor: PositiveFloat | None = None
    """Factor on rotated queries and keys; left out, 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the ends of the ramp to channel indices (gpt-oss: false)."""

    @model_validator(mode="after")
    def _check_ramp(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast = {self.beta_fast:g} is below beta_slow = {self.beta_slow:g}, so no channel would be "
                f"between: choose a larger one, e.g. beta_fast = {32 * self.beta_slow:g}"
            )
        return self


class Llama3Scaling(Section):
    """Llama 3.1's scaling (Grattafiori et al. 2024; the formula is in its released code)."""

    name: Literal["llama3"] = "llama3"
    factor: PositiveFloat = Field(examples=[8.0])
    """Factor by which slow channels are slowed."""
    original_length: PositiveInt = Field(default=8192, examples=[8192], le=MAX_LENGTH)
    """The original context, in tokens."""
    low_freq_factor: PositiveFloat = 1.0
    """Channels with wavelengths above original_length / low_freq_factor are slowed by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """Channels with wavelengths below original_length / high_freq_factor are kept."""

    @model_validator(mode="after")
    def _check_ramp(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor:g} is not below high_freq_factor = "
                f"{self.high_freq_factor:g}, so the fast channels would be slowed: choose a smaller one, e.g. "
                f"low_freq_factor = {self.high_freq_factor / 4:g}"
            )
        return self


RopeScaling = Annotated[LinearScaling | NtkScaling | YarnScaling | Llama3Scaling, Field(discriminator="name")]


class RopeConfig(PositionSection):
    """Queries and keys rotated by their positions (Su et al. 2021)."""

    name: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for longer contexts."""

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ValueError(
                f"theta = {self.theta:g} turns all channels alike or the later ones faster, and scaling.name = 'yarn' "
                "slows the slow ones: choose a larger one, e.g. theta = 10000"
            )
        return self

    def check_width(self, key: str, width: int) -> None:
        """Raise ValueError for a head width that can't be rotated. key: its key in `[model.attention]`."""
        if width % 2:
            raise ValueError(
                f"rope turns pairs of channels, so attention.{key} = {width} must be even: choose {key} = {width + 1}"
            )
        if isinstance(self.scaling, NtkScaling) and width == 2:
            raise ValueError(
                f"position.scaling.name = 'ntk' slows all pairs of channels but the fastest, and attention.{key} = 2 "
                f"has one pair: choose {key} = 4 or more, or scaling.name = 'linear'"
            )


class LearnedPositionConfig(PositionSection):
    """A learned vector for each position, added to the embeddings."""

    name: Literal["learned"] = "learned"
    max_positions: PositiveInt = Field(examples=[1024], le=MAX_LENGTH)
    """Number of positions."""
    offset: NonNegativeInt = Field(default=0, le=MAX_WIDTH)
    """Unused rows of the table before position 0 (RoBERTa: 2)."""

    @property
    def limit(self) -> int | None:
        """Number of positions."""
        return self.max_positions


class SinusoidalConfig(PositionSection):
    """Sines and cosines added to the embeddings (Vaswani et al. 2017)."""

    name: Literal["sinusoidal"] = "sinusoidal"


class AlibiConfig(PositionSection):
    """A bias of scores proportional to the distance, with a slope for each head (Press et al. 2022)."""

    name: Literal["alibi"] = "alibi"


class NoPositionConfig(PositionSection):
    """No position encoding."""

    name: Literal["none"] = "none"


class T5PositionConfig(PositionSection):
    """A learned bias for each head and bucket of distances (Raffel et al. 2020)."""

    name: Literal["t5"] = "t5"
    buckets: PositiveInt = Field(default=32, le=MAX_WIDTH)
    """Buckets of relative positions."""
    max_distance: PositiveInt = Field(default=128, le=MAX_LENGTH)
    """Distance from which all positions are taken as equally far."""

    def check_buckets(self, *, causal: bool, bidirectional: bool) -> None:
        """Raise ValueError unless some buckets hold single distances, and others ranges of larger ones."""
        min_buckets = 4 if bidirectional else 2
        if self.buckets < min_buckets:
            raise ValueError(
                f"position.buckets = {self.buckets} are too few to tell distances apart: choose {min_buckets} or more"
            )
        single = self.buckets // 2 if causal else self.buckets // 4
        if self.max_distance <= single:
            raise ValueError(
                f"position.max_distance = {self.max_distance} leaves no ranges beyond the {single} distances that have "
                f"one of position.buckets = {self.buckets} each: choose {single + 1} or more, or fewer buckets"
            )


class ShawConfig(PositionSection):
    """Learned vectors of relative positions, added to keys and values (Shaw et al. 2018)."""

    name: Literal["shaw"] = "shaw"
    max_distance: PositiveInt = Field(default=128, le=MAX_LENGTH)
    """Distance from which all positions are taken as equally far."""


class DebertaPositionConfig(PositionSection):
    """The table of relative positions of `attention.name = "deberta"` (He et al. 2021)."""

    name: Literal["deberta"] = "deberta"
    max_distance: PositiveInt = Field(default=128, le=MAX_LENGTH)
    """Distance from which all positions are taken as equally far."""


class DebertaV2PositionConfig(PositionSection):
    """Relative positions of `attention.name = "deberta_v2"`, in buckets that grow with the distance."""

    name: Literal["deberta_v2"] = "deberta_v2"
    buckets: PositiveInt = Field(default=32, le=MAX_WIDTH)
    """Buckets of relative positions, for each direction."""
    max_distance: PositiveInt = Field(default=128, le=MAX_LENGTH)
    """Distance from which all positions are taken as equally far."""

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        if self.buckets < 2:
            raise ValueError(f"buckets = {self.buckets} is too few to tell distances apart: choose 2 or more")
        if self.max_distance - 1 <= self.buckets // 2:
            raise ValueError(
                f"max_distance = {self.max_distance} leaves no ranges for buckets = {self.buckets}: choose "
                f"{self.buckets // 2 + 2} or more, or fewer buckets"
            )
        return self


class TransformerXLPositionConfig(PositionSection):
    """Sines and cosines of relative positions (Dai et al. 2019), for `attention.name = "two_stream"`."""

    name: Literal["transformer_xl"] = "transformer_xl"


class Relative2dConfig(PositionSection):
    """A learned bias for each head and offset of rows and columns in a window, in every block (Liu et al. 2021)."""

    name: Literal["relative_2d"] = "relative_2d"


class LogRelative2dConfig(PositionSection):
    """A bias by a small network of log-spaced offsets of rows and columns in a window (Swin-V2; Liu et al. 2022)."""

    name: Literal["log_relative_2d"] = "log_relative_2d"
    pretrained_windows: tuple[PositiveInt, ...] | None = Field(default=None, examples=[(12, 12, 12, 6)])
    """Side of each stage's windows in pretraining, by which offsets are scaled; left out, the side of today's
    windows."""


class RelativeAxesConfig(PositionSection):
    """Learned vectors of offsets of rows and of columns, times the query (MViTv2); for `attention.name = "pooled"`."""

    name: Literal["relative_axes"] = "relative_axes"


class LearnedPosition2dConfig(PositionSection):
    """A learned vector for each cell of a grid of patches, interpolated to each image's grid."""

    name: Literal["learned_2d"] = "learned_2d"
    grid: tuple[PositiveInt, PositiveInt] = Field(default=(14, 14), examples=[(14, 14)])
    """Rows and columns of the table."""
    antialias: bool = False
    """Antialias the interpolation to fewer patches (DINOv2 with registers)."""


class Sinusoidal2dConfig(PositionSection):
    """Sines and cosines of a patch's column and row, added to the embeddings (MAE; He et al. 2022)."""

    name: Literal["sinusoidal_2d"] = "sinusoidal_2d"


class Rope2dConfig(PositionSection):
    """Queries and keys rotated by a patch's row in one half of the channels, by its column in the other."""

    name: Literal["rope_2d"] = "rope_2d"
    theta: PositiveFloat = 100.0
    """Base of the rotary frequencies."""
    normalized: bool = False
    """Measure rows and columns from −1 to 1 in each image, times 2π (DINOv3); false: in patches."""


GRID_POSITIONS = ("learned_2d", "sinusoidal_2d", "rope_2d")
"""Names of positions on an image's grid of patches."""


class PluginPositionConfig(PositionSection):
    """A position encoding that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("position")] = Field(examples=["my_position"])
    """The name under which it is registered."""


PositionConfig = Annotated[
    RopeConfig
    | LearnedPositionConfig
    | SinusoidalConfig
    | AlibiConfig
    | NoPositionConfig
    | T5PositionConfig
    | ShawConfig
    | DebertaPositionConfig
    | DebertaV2PositionConfig
    | TransformerXLPositionConfig
    | Relative2dConfig
    | LogRelative2dConfig
    | RelativeAxesConfig
    | LearnedPosition2dConfig
    | Sinusoidal2dConfig
    | Rope2dConfig
    | PluginPositionConfig,
    ByName(),
]
