"""Sections of the model's smaller parts: norms, embedding, initial weights, further stacks, muP and LoRA."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import MAX_LAYERS, MAX_WIDTH, DropProbability, Section

POST_NORM_PLACEMENTS = ("post", "deepnorm")
"""Placements whose blocks end in a norm, so that a stack needs no final norm."""


WIDTH_POWERS = {"d_model^-1/2": -0.5, "d_model^1/2": 0.5}
"""Width-dependent factors: word → power of `d_model`. A config keeps the word, so a copy with another width has the
right factor; `ModelConfig.embedding_scale` and `head_scale` are the numbers."""
WidthFactor = PositiveFloat | Literal["d_model^-1/2", "d_model^1/2"]


class NormSection(Section):
    """Keys of every normalisation layer."""

    name: str
    eps: PositiveFloat = 1e-5
    """Epsilon of the normalisation."""
    placement: Annotated[
        str, PartName("norm placement", ("pre", "post", "res_post", "sandwich", "deepnorm", "none"))
    ] = "pre"
    """Position of the norms around a sublayer: pre, post, res_post (on its output), sandwich, deepnorm or
    none."""
    final_norm: bool | None = None
    """A norm at the end of each stack; left out, if blocks don't end in one."""
    first_attention_norm: bool = True
    """The norms of the first block's attention; false if the embedding's norm replaces them (ModernBERT)."""

    @property
    def has_final_norm(self) -> bool:
        """Whether each stack ends in a norm."""
        return self.placement not in POST_NORM_PLACEMENTS if self.final_norm is None else self.final_norm

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the norm beside its width and eps."""
        return self.model_extra or {}


class RMSNormConfig(NormSection):
    """Division by the root mean square (Zhang & Sennrich 2019)."""

    name: Literal["rms_norm"] = "rms_norm"
    zero_centered: bool = False
    """Store weights as their difference from 1 (Gemma)."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the norm beside its width and eps."""
        return {"zero_centered": self.zero_centered}


class LayerNormConfig(NormSection):
    """Normalisation by mean and variance (Ba et al. 2016)."""

    name: Literal["layer_norm"] = "layer_norm"
    bias: bool = True
    """A bias beside the weight."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the norm beside its width and eps."""
        return {"bias": self.bias}


class PluginNormConfig(NormSection):
    """A normalisation layer that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("norm")] = Field(examples=["my_norm"])
    """The name under which it is registered."""


NormConfig = Annotated[RMSNormConfig | LayerNormConfig | PluginNormConfig, ByName()]


class EmbeddingSection(Section):
    """Keys of every embedding."""

    name: str
    dim: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Width of the embeddings, projected to `d_model` (ALBERT, ELECTRA); left out, `d_model`."""
    scale: WidthFactor = 1.0
    """Factor on the token embeddings; `"d_model^1/2"` follows the width."""
    n_segments: NonNegativeInt = Field(default=0, le=MAX_WIDTH)
    """Rows of the segment embedding; 0: none."""
    norm: bool = False
    """A norm on the sum of the embeddings."""
    tied: bool = True
    """Share the token embedding with the output head. Encoder and decoder always share their embedding."""


class TokenEmbeddingConfig(EmbeddingSection):
    """A vector for each token of the vocabulary."""

    name: Literal["tokens"] = "tokens"


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PatchEmbeddingConfig(EmbeddingSection):
    """Square patches of images (Dosovitskiy et al. 2021), and learned vectors for special tokens."""

    name: Literal["patches"] = "patches"
    patch_size: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Side of a patch, in pixels."""
    channels: PositiveInt = Field(default=3, le=MAX_WIDTH)
    """Channels of a pixel."""
    n_class_tokens: NonNegativeInt = Field(default=1, le=MAX_WIDTH)
    """Class tokens before each image's patches, with learned positions (DeiT's distillation: 2)."""
    n_register_tokens: NonNegativeInt = Field(default=0, le=MAX_WIDTH)
    """Register tokens after the class tokens, without positions (Darcet et al. 2024)."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel that is subtracted from pixels in [0, 1]; left out, ImageNet's."""
    std: tuple[PositiveFloat, ...] = IMAGENET_STD
    """Standard deviation of each channel, by which pixels are then divided."""
    bias: bool = True
    """A bias in the projection of patches."""
    mask_token: bool = False
    """A learned vector in place of masked patches, for `objective.name = "simmim"` (Xie et al. 2022)."""

    @property
    def n_special_tokens(self) -> int:
        """Number of class and register tokens."""
        return self.n_class_tokens + self.n_register_tokens

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.patch_size**2

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ValueError(
                    f"{key} = {list(values)} has {len(values)} numbers, and images have channels = {self.channels}: "
                    f"give one for each, e.g. {key} = {[0.5] * self.channels}"
                )
        if self.scale != 1.0 or self.n_segments:
            key = "n_segments" if self.n_segments else "scale"
            raise ValueError(f"{key} has no meaning with name = 'patches': leave it out")
        return self


class OverlappingPatchesConfig(PatchEmbeddingConfig):
    """Square patches of images, each embedded with a margin of its neighbours (Li et al. 2022)."""

    name: Literal["overlapping_patches"] = "overlapping_patches"  # type: ignore[assignment]
    margin: PositiveInt = Field(default=3, le=MAX_WIDTH)
    """Pixels of the margin; the convolution's side is 2 · margin + 1."""


class PluginEmbeddingConfig(EmbeddingSection):
    """An embedding that a package in `plugins` registers, for inputs other than tokens, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("embedding (model.embedding.name)")] = Field(examples=["my_vectors"])
    """The name under which it is registered."""


EmbeddingConfig = Annotated[
    TokenEmbeddingConfig | PatchEmbeddingConfig | OverlappingPatchesConfig | PluginEmbeddingConfig, ByName()
]


class InitSection(Section):
    """Keys of every initialisation."""

    name: str


class NormalInitSection(InitSection):
    """Keys of normally distributed initial weights."""

    std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""


class GPT2InitConfig(NormalInitSection):
    """GPT-2's initialisation: projections to the residual stream shrink with the number of layers."""

    name: Literal["gpt2"] = "gpt2"


class NormalInitConfig(NormalInitSection):
    """One normal distribution for all matrices."""

    name: Literal["normal"] = "normal"


class BertInitConfig(NormalInitSection):
    """BERT's initialisation: a truncated normal distribution."""

    name: Literal["bert"] = "bert"


class T5InitConfig(InitSection):
    """T5's initialisation, scaled by fan-in."""

    name: Literal["t5"] = "t5"


class XavierInitConfig(InitSection):
    """Xavier initialisation, scaled by fan-in and fan-out (Glorot & Bengio 2010)."""

    name: Literal["xavier"] = "xavier"


class DeepnormInitConfig(InitSection):
    """DeepNorm's initialisation (Wang et al. 2022), for `norm.placement = "deepnorm"`."""

    name: Literal["deepnorm"] = "deepnorm"


class PluginInitConfig(InitSection):
    """An initialisation that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("initialisation (model.init)")] = Field(examples=["my_init"])
    """The name under which it is registered."""


InitConfig = Annotated[
    GPT2InitConfig
    | NormalInitConfig
    | BertInitConfig
    | T5InitConfig
    | XavierInitConfig
    | DeepnormInitConfig
    | PluginInitConfig,
    ByName(),
]


class GeneratorConfig(Section):
    """The generator of an ELECTRA pair; other settings are the discriminator's."""

    d_model: PositiveInt = Field(examples=[64], le=MAX_WIDTH)
    """Width of the generator."""
    n_heads: PositiveInt = Field(examples=[1], le=MAX_WIDTH)
    """Attention heads of the generator."""
    d_ff: PositiveInt = Field(examples=[256], le=MAX_WIDTH)
    """Inner width of the generator's feed-forward network."""
    n_layers: PositiveInt | None = Field(default=None, le=MAX_LAYERS)
    """Number of blocks of the generator; left out, the discriminator's."""


class PixelDecoderConfig(Section):
    """The decoder of a masked autoencoder; other settings are the encoder's (He et al. 2022, section 3)."""

    d_model: PositiveInt = Field(default=512, le=MAX_WIDTH)
    """Width of the decoder."""
    n_layers: PositiveInt = Field(default=8, le=MAX_LAYERS)
    """Number of blocks."""
    n_heads: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Attention heads of the decoder."""
    d_ff: PositiveInt = Field(default=2048, le=MAX_WIDTH)
    """Inner width of the decoder's feed-forward network."""
    normalize_targets: bool = True
    """Predict each patch's pixels relative to their mean and deviation."""


class MuPConfig(Section):
    """Maximal update parametrisation (Yang et al. 2022, table 8): hyperparameters tuned at a base width carry over."""

    base_width: PositiveInt = Field(examples=[256], le=MAX_WIDTH)
    """The d_model at which learning rate and init.std were chosen."""
    latent_ranks: Literal["fixed", "scaled"] = "fixed"
    """Whether q_lora_rank and kv_lora_rank of latent attention are fixed, or scale with the width."""


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2022): W x + alpha / rank · B A x, where A and B are trained and W is not."""

    rank: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: the factor on B A x is alpha / rank."""
    dropout: DropProbability = 0.0
    """Dropout of A's input."""
    targets: list[str] = Field(default_factory=list, examples=[["wq", "wv"], ["decoder.layers.*.ffn.experts.w_*"]])
    """Patterns of the names, or ends of names, of the matrices with adapters; left out, all linear layers of the
    blocks, to which the matrices of experts don't belong."""
    trained: list[str] = Field(default_factory=list, examples=[["head.*"]])
    """Patterns of the names of further trained weights; `megatfm finetune` adds the task's head."""
