"""The architecture: one flat section that names its parts."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.base import Section
from megatfm.config.model_parts import GeneratorConfig, LatentConfig, MuPConfig, RopeScaling

Rate = Annotated[float, Field(ge=0, lt=1)]
"""A probability of dropping something."""

NORM_AFTER = ("post", "deepnorm")
"""Norm positions whose blocks end in a norm, so that a stack needs none at its end."""


class ModelConfig(Section):
    """The architecture. Parts are named by their registry names."""

    family: str = "decoder"
    """decoder, encoder, encoder_decoder, xlnet, electra or discriminator (ELECTRA's, alone)."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; left out, the tokenizer's size."""
    d_model: PositiveInt = Field(examples=[256])
    """Width of the residual stream."""
    n_layers: PositiveInt = Field(examples=[4])
    """Number of blocks, of the decoder in an encoder-decoder."""
    n_encoder_layers: PositiveInt | None = None
    """Number of blocks of an encoder-decoder's encoder; left out, `n_layers`."""
    distinct_layers: PositiveInt | None = None
    """Blocks with weights of their own, each used for a run of neighbouring layers (ALBERT: 1); left out, all."""
    n_heads: PositiveInt = Field(examples=[4])
    """Number of query heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); left out, `n_heads`."""
    head_dim: PositiveInt | None = None
    """Width of a head; left out, `d_model / n_heads`."""
    d_ff: PositiveInt = Field(examples=[1024])
    """Inner width of the feed-forward network."""

    norm: str = "rms_norm"
    """Normalisation layer."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the normalisation."""
    norm_position: str = "pre"
    """Where the norms stand around a sublayer: pre, post, sandwich or deepnorm."""
    final_norm: bool | None = None
    """A norm at the end of each stack; left out, only where blocks don't end in one."""
    embedding_norm: bool = False
    """A norm on the sum of the embeddings."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys."""
    activation: str = "swiglu"
    """Activation of the feed-forward network."""
    attention: str = "heads"
    """Attention layer: heads (MHA, GQA and MQA by n_kv_heads), latent (MLA), disentangled (DeBERTa),
    disentangled_shared (its versions from 2 on) or two_stream (XLNet)."""
    latent: LatentConfig | None = None
    """Options of `attention = "latent"`."""
    attention_bias: bool = False
    """Biases in the projections of attention."""
    ffn_bias: bool = False
    """Biases in the feed-forward network."""
    attention_scale: PositiveFloat | None = None
    """Factor on the scores; left out, head_dim^-1/2."""
    attention_softcap: PositiveFloat | None = None
    """Scores s become c tanh(s / c) with this c."""

    position: str = "rope"
    """Position encoding: sinusoidal, learned, rope, alibi, t5, shaw, none; disentangled or disentangled_buckets, which
    attention of that name reads; transformer_xl, which two_stream reads."""
    max_positions: PositiveInt | None = Field(default=None, examples=[1024])
    """Rows of learned positions that can be used; other encodings have no limit."""
    position_offset: NonNegativeInt = 0
    """Rows of learned positions before that of position 0 (RoBERTa: 2)."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are changed for longer contexts."""
    relative_buckets: PositiveInt = 32
    """Buckets of t5's relative positions; of disentangled_buckets, for each direction."""
    relative_distance: PositiveInt = 128
    """Distance from which t5, shaw and both disentangled ones take all positions as equally far."""

    embedding_dim: PositiveInt | None = None
    """Width of the embeddings, projected to `d_model` (ALBERT, ELECTRA); left out, `d_model`."""
    embedding_scale: PositiveFloat = 1.0
    """Factor on the token embeddings."""
    n_segments: NonNegativeInt = 0
    """Rows of the segment embedding; 0: none."""
    tie_embeddings: bool = True
    """Share the token embedding with the output head. Encoder and decoder always share theirs."""

    head: Literal["linear", "transform"] = "linear"
    """Output head: a matrix, or BERT's dense layer, activation and norm before it."""
    head_bias: bool = False
    """A bias for each token of the vocabulary."""
    head_scale: PositiveFloat = 1.0
    """Factor on the hidden vectors before the output matrix."""
    logit_softcap: PositiveFloat | None = None
    """Logits l become c tanh(l / c) with this c."""
    label_smoothing: Rate = 0.0
    """Share of a target's probability that is spread over the vocabulary, in training."""
    sentence_classes: NonNegativeInt = 0
    """Classes told from the first token of a sequence through a tanh pooler (NSP and SOP: 2); 0: no pooler."""
    boundary_head: bool = False
    """SpanBERT's head, which predicts a span from the tokens around it."""
    future_tokens: NonNegativeInt = 0
    """Heads that predict tokens beyond the next one (Gloeckle et al. 2024), each one block."""
    generator: GeneratorConfig | None = None
    """The generator of `family = "electra"`."""

    dropout: Rate = 0.0
    """Dropout of the embeddings and of what sublayers add to the residual stream."""
    attention_dropout: Rate = 0.0
    """Dropout of attention probabilities."""
    ffn_dropout: Rate = 0.0
    """Dropout inside the feed-forward network."""
    drop_path: Rate = 0.0
    """Stochastic depth: probability of skipping a sublayer of the last block, rising linearly from 0."""

    init: str = "gpt2"
    """Initial weights: gpt2, normal, bert, t5, xavier or deepnorm."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights where `init` uses one."""
    mup: MuPConfig | None = None
    """Maximal update parametrisation; left out, the standard one."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads = {self.n_heads} does not divide d_model = {self.d_model}: choose n_heads = "
                f"{_nearest_divisor(self.d_model, self.n_heads)}, or give head_dim"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads = {self.kv_heads} does not divide n_heads = {self.n_heads}: choose n_kv_heads = "
                f"{_nearest_divisor(self.n_heads, self.kv_heads)}"
            )
        if self.position == "rope" and self.attention != "latent" and self.head_width % 2:
            raise ValueError(
                f"rope turns pairs of channels, so head_dim = {self.head_width} must be even: choose head_dim = "
                f"{self.head_width + 1}"
            )
        if self.distinct_layers and self.distinct_layers > self.n_layers:
            raise ValueError(
                f"distinct_layers = {self.distinct_layers} is more than n_layers = {self.n_layers}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _options_belong_to_parts(self) -> Self:
        for option, wanted, key, value in (
            (self.latent, self.attention == "latent", "latent", "attention = 'latent'"),
            (self.generator, self.family == "electra", "generator", "family = 'electra'"),
            (self.max_positions, self.position == "learned", "max_positions", "position = 'learned'"),
        ):
            if wanted and option is None:
                raise ValueError(f"{value} needs model.{key}: give it")
            if option is not None and not wanted:
                raise ValueError(f"{key} belongs to {value}: leave it out, or set model.{value}")
        for keys, key, names in (
            (("n_kv_heads", "qk_norm", "attention_bias"), "attention", ("heads",)),
            (("attention_softcap", "attention_scale"), "attention", ("heads", "latent")),
            (("position_offset",), "position", ("learned",)),
            (("rope_theta", "rope_scaling"), "position", ("rope",)),
            (("relative_buckets",), "position", ("t5", "disentangled_buckets")),
            (("relative_distance",), "position", ("t5", "shaw", "disentangled", "disentangled_buckets")),
            (("n_encoder_layers",), "family", ("encoder_decoder",)),
            (("n_segments",), "family", ("decoder", "encoder", "discriminator", "electra")),
        ):
            self._refuse_unused(keys, key, names)
        only_encoder = {"sentence_classes": self.sentence_classes, "boundary_head": self.boundary_head}
        for key, given in only_encoder.items():
            if given and self.family != "encoder":
                raise ValueError(f"{key} is a head of encoders: set family = 'encoder', or leave it out")
        if self.future_tokens and self.family != "decoder":
            raise ValueError("future_tokens is a head of decoders: set family = 'decoder', or leave it out")
        xlnet = {"family": "xlnet", "attention": "two_stream", "position": "transformer_xl"}
        if len({getattr(self, key) == name for key, name in xlnet.items()}) > 1:
            raise ValueError(
                "family = 'xlnet', attention = 'two_stream' and position = 'transformer_xl' belong together: set all "
                "three, or none"
            )
        if self.mup and (self.embedding_dim or self.family == "electra"):
            raise ValueError(
                "mup is for models of one width: leave out embedding_dim, and take another family than electra"
            )
        if (self.init == "deepnorm") != (self.norm_position == "deepnorm"):
            raise ValueError(
                "norm_position = 'deepnorm' and init = 'deepnorm' belong together: set both, or neither"
            )
        return self

    def _refuse_unused(self, keys: tuple[str, ...], part: str, names: tuple[str, ...]) -> None:
        """Options that the part at hand would leave unread; parts of plugins may read what they like."""
        known = {
            "heads",
            "latent",
            "disentangled",
            "disentangled_shared",
            "disentangled_buckets",
            "two_stream",
            "transformer_xl",
            "xlnet",
            "encoder_decoder",
            "decoder",
            "encoder",
            "electra",
            "discriminator",
        }
        known |= {"sinusoidal", "learned", "rope", "alibi", "t5", "shaw", "none"}
        chosen = getattr(self, part)
        for key in keys:
            default = type(self).model_fields[key].default
            if chosen in known - set(names) and getattr(self, key) != default:
                wanted = " or ".join(f"{part} = {name!r}" for name in names)
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} has no meaning with {part} = {chosen!r}: leave it out, or choose "
                    f"{wanted}"
                )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.d_model

    @property
    def encoder_layers(self) -> int:
        """Blocks of the encoder."""
        return self.n_encoder_layers or self.n_layers

    @property
    def drops(self) -> list[str]:
        """The fields that drop something in training."""
        rates = ("dropout", "attention_dropout", "ffn_dropout", "drop_path")
        return [name for name in rates if getattr(self, name)]

    @property
    def has_final_norm(self) -> bool:
        return self.norm_position not in NORM_AFTER if self.final_norm is None else self.final_norm


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
