"""Parts of an architecture that have options of their own."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatfm.config.base import Section


class LinearScaling(Section):
    """Positions divided by `factor` (Chen et al. 2023)."""

    name: Literal["linear"] = "linear"
    factor: PositiveFloat = Field(examples=[8.0])
    """Longer by so much than the original context."""


class NtkScaling(Section):
    """A larger base, so that the slowest channel is stretched by `factor` and the fastest not at all (bloc97 2023)."""

    name: Literal["ntk"] = "ntk"
    factor: PositiveFloat = Field(examples=[8.0])
    """Longer by so much than the original context."""


class YarnScaling(Section):
    """YaRN (Peng et al. 2023): slow channels are interpolated, fast ones kept, a ramp between, and scores scaled."""

    name: Literal["yarn"] = "yarn"
    factor: PositiveFloat = Field(examples=[8.0])
    """Longer by so much than the original context."""
    original_length: PositiveInt = Field(examples=[4096])
    """The context that the model was first trained on, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Channels that turn at least so often within the original context are kept."""
    beta_slow: PositiveFloat = 1.0
    """Channels that turn at most so often within it are interpolated."""
    attention_factor: PositiveFloat | None = None
    """Factor on rotated queries and keys; left out, 0.1 ln(factor) + 1."""


class Llama3Scaling(Section):
    """Llama 3.1's scaling (Grattafiori et al. 2024; the formula is in its released code)."""

    name: Literal["llama3"] = "llama3"
    factor: PositiveFloat = Field(examples=[8.0])
    """By how much slow channels are slowed."""
    original_length: PositiveInt = Field(default=8192, examples=[8192])
    """The context that the model was first trained on, in tokens."""
    low_freq_factor: PositiveFloat = 1.0
    """Channels with wavelengths above original_length / low_freq_factor are slowed by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """Channels with wavelengths below original_length / high_freq_factor are kept."""


RopeScaling = Annotated[LinearScaling | NtkScaling | YarnScaling | Llama3Scaling, Field(discriminator="name")]


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1)."""

    kv_rank: PositiveInt = Field(examples=[512])
    """Width of the latent from which keys and values are made."""
    q_rank: PositiveInt | None = None
    """Width of the queries' latent; left out, queries are projected directly."""
    rope_dim: PositiveInt = Field(examples=[64])
    """Channels of a head that carry the position, their keys shared by all heads."""
    v_dim: PositiveInt | None = None
    """Width of a head's values; left out, `head_dim`."""


class GeneratorConfig(Section):
    """The generator of an ELECTRA pair; everything else is as in the discriminator."""

    d_model: PositiveInt = Field(examples=[64])
    """Width of the generator."""
    n_heads: PositiveInt = Field(examples=[1])
    """Attention heads of the generator."""
    d_ff: PositiveInt = Field(examples=[256])
    """Inner width of the generator's feed-forward network."""
    n_layers: PositiveInt | None = None
    """Blocks of the generator; left out, as many as in the discriminator."""


class MuPConfig(Section):
    """Maximal update parametrisation (Yang et al. 2022, table 8): hyperparameters tuned at a base width carry over."""

    base_width: PositiveInt = Field(examples=[256])
    """The d_model at which learning rate and init_std were chosen."""
