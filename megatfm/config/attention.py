"""The `[model.attention]` section: a variant for each attention layer, and for each attention pattern."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatfm.config.parts import ByName, PartName, expand_name
from megatfm.config.section import MAX_LENGTH, MAX_WIDTH, DropProbability, Section


class FullPatternConfig(Section):
    """All tokens of the document; in decoders, those up to the query."""

    name: Literal["full"] = "full"


class WindowPatternConfig(Section):
    """The nearest tokens (Child et al. 2019; Beltagy et al. 2020; Jiang et al. 2023)."""

    name: Literal["window"] = "window"
    width: PositiveInt = Field(examples=[4096], le=MAX_LENGTH)
    """In decoders, the number of tokens up to and with the query; in encoders, half of it on each side of the query."""
    dilation: PositiveInt = Field(default=1, le=MAX_LENGTH)
    """Stride between attended tokens, which widens the window by this factor."""
    initial_tokens: NonNegativeInt = Field(default=0, le=MAX_LENGTH)
    """In decoders, number of first tokens of the document that all see (StreamingLLM: 4; Xiao et al. 2023)."""


class ChunkedPatternConfig(Section):
    """Tokens of the same chunk of the document; in decoders, those up to the query (Llama 4)."""

    name: Literal["chunked"] = "chunked"
    size: PositiveInt = Field(examples=[8192], le=MAX_LENGTH)
    """Tokens of a chunk."""


class StridedPatternConfig(Section):
    """The last `stride` tokens, and every `stride`-th before the query (Child et al. 2019, merged heads)."""

    name: Literal["strided"] = "strided"
    stride: PositiveInt = Field(examples=[128], le=MAX_LENGTH)
    """Width of the local part, and distance between the other tokens that are seen."""


class FixedPatternConfig(Section):
    """The query's block of the document, and the ends of the other blocks (Child et al. 2019, merged heads)."""

    name: Literal["fixed"] = "fixed"
    stride: PositiveInt = Field(examples=[128], le=MAX_LENGTH)
    """Tokens of a block."""
    n_summary_tokens: PositiveInt = Field(default=8, le=MAX_LENGTH)
    """Tokens at the end of a block that all queries see; in decoders, all later queries."""


class BigBirdPatternConfig(Section):
    """Blocks around the query's, random ones, and some that see all and are seen by all (Zaheer et al. 2020)."""

    name: Literal["bigbird"] = "bigbird"
    block_size: PositiveInt = Field(default=64, le=MAX_LENGTH)
    """Tokens of a block."""
    n_random_blocks: NonNegativeInt = Field(default=3, le=MAX_WIDTH)
    """Random blocks that each block sees, drawn for each head and layer."""
    n_global_tokens: NonNegativeInt = Field(default=0, le=MAX_LENGTH)
    """Number of first tokens of the document that see all and are seen by all, in place of its first and last block
    (ETC)."""


class LongformerPatternConfig(Section):
    """A window on both sides, and global tokens that see all and are seen by all (Beltagy et al. 2020). Attention of
    the same name has separate projections for global tokens."""

    name: Literal["longformer"] = "longformer"
    width: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Number of tokens that are seen around the query, half of them on each side."""
    global_tokens: tuple[NonNegativeInt, ...] = (0,)
    """Positions in the document of the global tokens."""


class Windows2dPatternConfig(Section):
    """Square windows of an image's map, shifted by half in every other block (Liu et al. 2021); for `windowed`."""

    name: Literal["windows_2d"] = "windows_2d"
    window: PositiveInt = Field(default=7, le=MAX_WIDTH)
    """Side of a window in tokens; a map up to this size is one window."""


class PluginPatternConfig(Section):
    """A pattern that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("attention pattern")] = Field(examples=["my_pattern"])
    """The name under which it is registered."""


PatternConfig = Annotated[
    FullPatternConfig
    | WindowPatternConfig
    | ChunkedPatternConfig
    | StridedPatternConfig
    | FixedPatternConfig
    | BigBirdPatternConfig
    | LongformerPatternConfig
    | Windows2dPatternConfig
    | PluginPatternConfig,
    ByName(),
    BeforeValidator(expand_name),  # the last is called first
]


class AttentionSection(Section):
    """Keys of every attention layer."""

    name: str
    pattern: PatternConfig = FullPatternConfig()
    """Keys that a query sees: a pattern's name, or a section with its options."""
    n_heads: PositiveInt = Field(examples=[4], le=MAX_WIDTH)
    """Number of query heads."""
    dropout: DropProbability = 0.0
    """Dropout of attention probabilities."""

    head_dim_key: ClassVar[str] = "head_dim"
    """Key of a head's width; left out, the width is `d_model / n_heads`."""
    query_multiple: ClassVar[int] = 1
    """Number of queries on each rank that shares a sequence is a multiple of this."""

    @property
    def head_dim_or_none(self) -> int | None:
        """Width of a head, if set."""
        width: int | None = getattr(self, self.head_dim_key)
        return width

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_heads

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key."""
        return {"n_heads": self.n_heads, "n_kv_heads": self.kv_heads}


class HeadAttention(AttentionSection):
    """Attention whose heads have one width."""

    head_dim: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Width of a head; left out, `d_model / n_heads`."""


class ScaledAttention(AttentionSection):
    """Attention whose scores can be scaled and capped."""

    scale: PositiveFloat | None = None
    """Factor on the scores; left out, head_dim^-1/2."""
    softcap: PositiveFloat | None = None
    """Scores s become c tanh(s / c) with this c."""


class GQAAttentionConfig(ScaledAttention, HeadAttention):
    """Query heads that share key and value heads in groups: MHA, GQA and MQA (Ainslie et al. 2023)."""

    name: Literal["gqa"] = "gqa"
    n_kv_heads: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Number of key and value heads (grouped-query attention); left out, `n_heads`."""
    qk_norm: bool | Literal["all_heads"] = False
    """RMSNorm on each head's queries and keys; `"all_heads"`: over all heads together (OLMoE)."""
    bias: bool = False
    """Biases in the projections."""
    key_bias: bool | None = None
    """A bias in the projection of keys; left out, the value of `bias`."""
    output_bias: bool | None = None
    """A bias in the projection of the heads' outputs; left out, the value of `bias` (Qwen2: false)."""
    sinks: bool = False
    """A learned score for each head that takes part in the softmax without a key (gpt-oss)."""

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key; also the key heads that are normalised together."""
        normalised_heads = {"n_kv_heads (qk_norm = 'all_heads')": self.kv_heads} if self.qk_norm == "all_heads" else {}
        return {**super().tp_dims, **normalised_heads}


class MLAAttentionConfig(ScaledAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1)."""

    name: Literal["mla"] = "mla"
    kv_lora_rank: PositiveInt = Field(examples=[512], le=MAX_WIDTH)
    """Width of the latent from which keys and values are made."""
    q_lora_rank: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Width of the queries' latent; left out, queries are projected directly."""
    qk_nope_head_dim: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Channels of a head's queries and keys that carry no position; left out, `d_model / n_heads`."""
    qk_rope_head_dim: PositiveInt = Field(examples=[64], le=MAX_WIDTH)
    """Channels of a head that carry the position, their keys shared by all heads."""
    v_head_dim: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Width of a head's values; left out, `qk_nope_head_dim`."""

    head_dim_key: ClassVar[str] = "qk_nope_head_dim"


class LongformerAttentionConfig(GQAAttentionConfig):
    """Grouped-query attention with separate projections for global tokens (Beltagy et al. 2020, section 3.1)."""

    name: Literal["longformer"] = "longformer"  # type: ignore[assignment]


class LinformerAttentionConfig(HeadAttention):
    """Keys and values of a document are projected to a fixed number of them (Wang et al. 2020)."""

    name: Literal["linformer"] = "linformer"
    max_length: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Number of positions that are projected; no row may be longer."""
    projected_length: PositiveInt = Field(default=128, le=MAX_WIDTH)
    """Number of keys and values of a document."""
    share: Literal["none", "headwise", "key_value", "layerwise"] = "headwise"
    """Sharing of a projection: none; by all heads of a layer; also by its keys and values; also by all layers."""
    scale: PositiveFloat | None = None
    """Factor on the scores; left out, head_dim^-1/2."""
    bias: bool = False
    """Biases in the projections of tokens."""


class CompressedAttentionConfig(ScaledAttention, HeadAttention):
    """Keys and values of neighbouring tokens are merged by a convolution, in decoders (Liu et al. 2018)."""

    name: Literal["compressed"] = "compressed"
    factor: PositiveInt = Field(default=3, le=MAX_WIDTH)
    """Number of tokens that become one key and one value."""
    bias: bool = False
    """Biases in the projections of tokens."""


class WindowedAttentionConfig(ScaledAttention, HeadAttention):
    """Attention within windows of a map (Liu et al. 2021); its pattern is `windows_2d`."""

    name: Literal["windowed"] = "windowed"
    n_heads: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Number of heads of the first stage; left out, the first of `model.stages.n_heads`."""
    pattern: PatternConfig = Windows2dPatternConfig()
    """The windows."""
    bias: bool = True
    """Biases in the projections."""
    cosine: bool = False
    """Scores are cosines of queries and keys, times a learned factor of each head (Swin-V2; keys have no bias)."""


class PooledAttentionConfig(ScaledAttention, HeadAttention):
    """Attention with queries, keys and values pooled over the map (MViTv2; Li et al. 2022)."""

    name: Literal["pooled"] = "pooled"
    n_heads: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Number of heads of the first stage; left out, the first of `model.stages.n_heads`."""
    bias: bool = True
    """Biases in the projections."""
    kv_stride: PositiveInt = Field(default=4, le=MAX_WIDTH)
    """Stride of the pooling of keys and values in the first stage; halved in each further stage, at least 1."""
    widening: Literal["attention", "ffn"] = "attention"
    """Layer that widens vectors between stages: the first attention of a stage, or the last feed-forward network
    before it."""


class DebertaAttentionConfig(HeadAttention):
    """DeBERTa's attention (He et al. 2021); it reads `position.name = "deberta"`."""

    name: Literal["deberta"] = "deberta"


class DebertaV2AttentionConfig(HeadAttention):
    """DeBERTa's attention from version 2 on; it reads `position.name = "deberta_v2"`."""

    name: Literal["deberta_v2"] = "deberta_v2"


class TwoStreamAttentionConfig(HeadAttention):
    """XLNet's attention (Yang et al. 2019); it reads `position.name = "transformer_xl"`."""

    name: Literal["two_stream"] = "two_stream"
    query_multiple: ClassVar[int] = 16


class PluginAttentionConfig(GQAAttentionConfig):
    """An attention layer that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("attention")] = Field(examples=["my_attention"])  # type: ignore[assignment]
    """The name under which it is registered."""


AttentionConfig = Annotated[
    GQAAttentionConfig
    | MLAAttentionConfig
    | LongformerAttentionConfig
    | LinformerAttentionConfig
    | CompressedAttentionConfig
    | WindowedAttentionConfig
    | PooledAttentionConfig
    | DebertaAttentionConfig
    | DebertaV2AttentionConfig
    | TwoStreamAttentionConfig
    | PluginAttentionConfig,
    ByName(),
]
