"""The `[model]` section: sizes, a section for each part, kinds of blocks, and checks by family."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from megatfm.config.attention import AttentionConfig, LinformerAttentionConfig, MLAAttentionConfig
from megatfm.config.ffn import FFNConfig
from megatfm.config.foreign_keys import reject_renamed_keys
from megatfm.config.heads import HeadConfig, HeadsConfig
from megatfm.config.image_text import ConnectorConfig, ContrastiveConfig, TextTowerConfig, VisionTowerConfig
from megatfm.config.model_checks import FAMILIES, check_combinations, suggest_family
from megatfm.config.model_parts import (
    WIDTH_POWERS,
    EmbeddingConfig,
    GeneratorConfig,
    GPT2InitConfig,
    InitConfig,
    LoRAConfig,
    MuPConfig,
    NormConfig,
    PatchEmbeddingConfig,
    PixelDecoderConfig,
    RMSNormConfig,
    TokenEmbeddingConfig,
)
from megatfm.config.parts import PartName
from megatfm.config.position import PositionConfig, RopeConfig
from megatfm.config.section import MAX_LAYERS, MAX_WIDTH, DropProbability, Section, find_nearest_divisor, unflatten
from megatfm.config.stages import StagesConfig, check_stages, fill_in_stages, make_layers_optional
from megatfm.registry import did_you_mean


class ModelConfig(Section):
    """The architecture: sizes, and a section for each part, whose `name` chooses a registered one."""

    model_config = ConfigDict(json_schema_extra=make_layers_optional)

    family: Annotated[str, PartName("model family (model.family)", tuple(FAMILIES), suggest_family)] = "decoder"
    """decoder, encoder, encoder_decoder, xlnet, electra, discriminator (ELECTRA's, alone), hierarchical (Swin),
    masked_autoencoder (MAE), two_towers (CLIP, SigLIP) or vision_language (LLaVA)."""
    vocab_size: PositiveInt | None = Field(default=None, le=MAX_WIDTH)
    """Rows of the embedding; left out, the tokenizer's size."""
    d_model: PositiveInt = Field(examples=[256], le=MAX_WIDTH)
    """Width of the residual stream."""
    n_layers: PositiveInt = Field(examples=[4], le=MAX_LAYERS)
    """Number of blocks; in an encoder-decoder, of the decoder."""
    n_encoder_layers: PositiveInt | None = Field(default=None, le=MAX_LAYERS)
    """Number of blocks of an encoder-decoder's encoder; left out, `n_layers`."""
    distinct_layers: PositiveInt | None = Field(default=None, le=MAX_LAYERS)
    """Number of distinct blocks, each used for several neighbouring layers (ALBERT: 1); left out, `n_layers`."""
    dropout: DropProbability = 0.0
    """Dropout of the embeddings and of the sublayers' outputs."""
    drop_path: DropProbability = 0.0
    """Stochastic depth: probability of skipping a sublayer of the last block, rising linearly from 0."""
    layer_scale: PositiveFloat | None = None
    """Initial value of learned factors on the channels of each sublayer's output (Touvron et al. 2021); left out,
    none."""
    n_mtp_heads: NonNegativeInt = Field(default=0, le=MAX_LAYERS)
    """Heads that predict tokens beyond the next one (Gloeckle et al. 2024), each one block."""

    layer_types: tuple[str, ...] = ()
    """Kinds of blocks, repeated over depth, e.g. `["local", "local", "global"]`; left out, all blocks are equal."""
    layer_type: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of a kind of blocks: `[model.layer_type.local]` with keys of the sections `attention`, `ffn`, `norm` and
    `position`, and `dropout`."""

    attention: AttentionConfig
    """The attention layer."""
    ffn: FFNConfig
    """The feed-forward network."""
    norm: NormConfig = RMSNormConfig()
    """The normalisation layer, and its placement."""
    position: PositionConfig = RopeConfig()
    """The position encoding."""
    embedding: EmbeddingConfig = TokenEmbeddingConfig()
    """The input embedding."""
    lm_head: HeadConfig = HeadConfig()
    """The output head."""
    extra_heads: HeadsConfig = Field(default_factory=dict)
    """Further heads, e.g. `[model.extra_heads.sentence]` with `classes = 2`."""
    init: InitConfig = GPT2InitConfig()
    """The initial weights."""
    generator: GeneratorConfig | None = None
    """The generator of `family = "electra"`."""
    pixel_decoder: PixelDecoderConfig | None = None
    """The decoder of `family = "masked_autoencoder"`."""
    text_tower: TextTowerConfig | None = None
    """The text encoder of `family = "two_towers"`; the other keys are the image encoder's."""
    contrastive: ContrastiveConfig | None = None
    """Features and loss of `family = "two_towers"`."""
    vision_tower: VisionTowerConfig | None = None
    """The image encoder of `family = "vision_language"`; the other keys are the decoder's."""
    connector: ConnectorConfig | None = None
    """The map from the image encoder to the decoder of `family = "vision_language"`."""
    stages: StagesConfig | None = None
    """The stages of `family = "hierarchical"`."""
    mup: MuPConfig | None = None
    """Maximal update parametrisation; left out, the standard one."""
    lora: LoRAConfig | None = None
    """Low-rank adapters, trained in place of the model's weights; left out, none."""

    @model_validator(mode="before")
    @classmethod
    def _migrate_keys(cls, values: Any) -> Any:
        reject_renamed_keys(values)
        return fill_in_stages(values)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        attention = self.attention
        if attention.head_dim_or_none is None and self.d_model % attention.n_heads:
            raise ValueError(
                f"attention.n_heads = {attention.n_heads} does not divide d_model = {self.d_model}: choose n_heads = "
                f"{find_nearest_divisor(self.d_model, attention.n_heads)}, or give attention.{attention.head_dim_key}"
            )
        if attention.n_heads % attention.kv_heads:
            raise ValueError(
                f"attention.n_kv_heads = {attention.kv_heads} does not divide n_heads = {attention.n_heads}: choose "
                f"n_kv_heads = {find_nearest_divisor(attention.n_heads, attention.kv_heads)}"
            )
        if isinstance(self.position, RopeConfig):
            is_mla = isinstance(attention, MLAAttentionConfig)
            width = attention.qk_rope_head_dim if isinstance(attention, MLAAttentionConfig) else self.head_width
            self.position.check_width("qk_rope_head_dim" if is_mla else "head_dim", width)
        if self.distinct_layers and self.distinct_layers > self.n_layers:
            raise ValueError(
                f"distinct_layers = {self.distinct_layers} is more than n_layers = {self.n_layers}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        check_combinations(self)
        check_stages(self)
        return self

    @model_validator(mode="after")
    def _check_layer_types(self) -> Self:
        used = self.layer_types[: max(self.n_layers, self.encoder_layers)]
        for kind in self.layer_types:
            if kind not in self.layer_type:
                raise ValueError(
                    f"layer_types names the kind {kind!r}{did_you_mean(kind, self.layer_type)}, which has no section: "
                    f"add [model.layer_type.{kind}], without keys if its blocks are as the other sections say"
                )
        for kind, keys in self.layer_type.items():
            if kind not in used:
                raise ValueError(
                    f"layer_type.{kind}: none of the {self.n_layers} blocks is of this kind: name it in "
                    "model.layer_types, or leave the section out"
                )
            for key in unflatten(keys):
                if key not in PER_LAYER_KEYS:
                    raise ValueError(
                        f"layer_type.{kind}.{key}: blocks of one model can differ in {', '.join(PER_LAYER_KEYS)}: "
                        "leave it out"
                    )
            try:
                self.type_config(kind)
            except ValidationError as error:
                first = error.errors()[0]
                path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function"))
                raise ValueError(f"layer_type.{kind}{path and '.'}{path}: {first['msg']}") from None
        if self.layer_types and self.distinct_layers:
            raise ValueError(
                "distinct_layers uses a block's weights in several layers, and layer_types says that layers differ: "
                "leave one of the two out"
            )
        return self

    def get_layer_type(self, depth: int) -> str | None:
        """Return the kind of the block at a depth, from 0; None if all blocks are equal."""
        return self.layer_types[depth % len(self.layer_types)] if self.layer_types else None

    def layer_config(self, depth: int) -> "ModelConfig":
        """Return this config with the settings of the block at a depth, from 0."""
        if self.stages is not None:
            return self.stage_config(self.stages.stage_at(depth))
        kind = self.get_layer_type(depth)
        return self if kind is None else self.type_config(kind)

    def stage_config(self, stage: int) -> "ModelConfig":
        """Return this config with the heads and widths of a stage, from 0."""
        if self.stages is None:
            return self
        if stage not in self._block_configs:
            self._block_configs[stage] = self.with_changes(self.stages.find_changes_at(stage, self))
        return self._block_configs[stage]

    def type_config(self, kind: str) -> "ModelConfig":
        """Return this config with the settings of a kind of blocks."""
        if kind not in self._block_configs:
            changes = {**self.layer_type[kind], "layer_types": (), "layer_type": {}}
            self._block_configs[kind] = self.with_changes(changes)
        return self._block_configs[kind]

    @cached_property
    def _block_configs(self) -> dict[int | str, "ModelConfig"]:
        """Stage or kind of blocks → config, validated once."""
        return {}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, without the configs of blocks, which the update may change."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("_block_configs", None)
        return copied

    @property
    def layer_cycle(self) -> list["ModelConfig"]:
        """Configs of the blocks at the first depths, one for each entry of `layer_types`."""
        return [self.layer_config(depth) for depth in range(max(1, len(self.layer_types)))]

    @property
    def layer_kinds(self) -> list["ModelConfig"]:
        """This config, and the config of every kind of blocks."""
        return [self, *(self.type_config(kind) for kind in self.layer_type)]

    @property
    def tp_dims(self) -> dict[str, int]:
        """Key → size that tensor parallelism divides, of all kinds of blocks."""
        parts = {"attention": self.attention.tp_dims, "ffn": self.ffn.tp_dims}
        for name in ("generator", "pixel_decoder", "text_tower", "vision_tower"):
            if stack := getattr(self, name):
                parts[name] = {"n_heads": stack.n_heads, "d_ff": stack.d_ff}
        sizes = {f"{part}.{key}": n for part, divided in parts.items() for key, n in divided.items()}
        for kind in self.layer_type:
            kind_config = self.type_config(kind)
            for part, divided in (("attention", kind_config.attention.tp_dims), ("ffn", kind_config.ffn.tp_dims)):
                sizes |= {
                    f"layer_type.{kind}.{part}.{key}": n
                    for key, n in divided.items()
                    if n != sizes.get(f"{part}.{key}")
                }
        stage_heads = self.stages.n_heads if self.stages else ()
        return sizes | {f"stages.n_heads[{stage}]": heads for stage, heads in enumerate(stage_heads)}

    def tp_dims_for(self, expert_tp: str) -> dict[str, int]:
        """Return `tp_dims` under a division of experts, `parallel.expert_tp`."""
        if expert_tp == "by_expert":
            return self.tp_dims
        sizes = {key: n for key, n in self.tp_dims.items() if not key.endswith("n_experts")}
        kinds = {"": self, **{f"layer_type.{kind}.": self.type_config(kind) for kind in self.layer_type}}
        for prefix, kind_config in kinds.items() if expert_tp == "by_channel" else ():
            if "n_experts" in kind_config.ffn.tp_dims:
                sizes[f"{prefix}ffn.d_ff"] = kind_config.ffn.d_ff
        return sizes

    @property
    def head_width(self) -> int:
        """Width of a head; in multi-head latent attention, of the channels without position."""
        return self.attention.head_dim_or_none or self.d_model // self.attention.n_heads

    @property
    def patch_embedding(self) -> PatchEmbeddingConfig | None:
        """Patch embedding of an image encoder or the vision tower; None if the model reads no images."""
        if self.vision_tower is not None:
            return self.vision_tower.embedding
        return self.embedding if isinstance(self.embedding, PatchEmbeddingConfig) else None

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings and of the output head's input."""
        return self.embedding.dim or self.d_model

    @property
    def embedding_scale(self) -> float:
        """Factor on the token embeddings at this width."""
        return compute_factor(self.embedding.scale, self.d_model)

    @property
    def head_scale(self) -> float:
        """Factor on the hidden vectors before the output matrix at this width."""
        return compute_factor(self.lm_head.scale, self.d_model)

    def with_resolved_factors(self) -> "ModelConfig":
        """Return a copy with numbers in place of width-dependent factors such as `d_model^-1/2`."""
        return self.with_changes({"embedding.scale": self.embedding_scale, "lm_head.scale": self.head_scale})

    @property
    def max_row_length(self) -> tuple[int | None, str]:
        """Maximal tokens of a row, and the key that limits it; None: unlimited."""
        limits: list[tuple[int, str]] = []
        for kind in self.layer_kinds:
            if (limit := kind.position.limit) is not None:
                limits.append((limit, "position.max_positions"))
            if isinstance(kind.attention, LinformerAttentionConfig):
                limits.append((kind.attention.max_length, "attention.max_length"))
        return min(limits, default=(None, ""))

    @property
    def encoder_layers(self) -> int:
        """Number of blocks of the encoder."""
        return self.n_encoder_layers or self.n_layers


def compute_factor(factor: float | str, width: int) -> float:
    """Return a factor at a width. factor: a number, or a word such as `d_model^-1/2`."""
    return float(width ** WIDTH_POWERS[factor]) if isinstance(factor, str) else factor


PER_LAYER_KEYS = ("attention", "ffn", "norm", "position", "dropout")
"""Keys that may differ from block to block."""
