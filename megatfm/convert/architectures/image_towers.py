"""Image towers of SigLIP, without its pooling head, and of CLIP, whose last norm applies only to the class token."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatfm.config import ModelConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.vision import (
    HALF,
    MLP,
    VISION_KEYS,
    VisionNames,
    map_vision,
    read_vision,
    write_vision,
)
from megatfm.convert.hf_config import Json, ignored, used
from megatfm.convert.hf_values import read_mapped
from megatfm.convert.weight_mapping import WeightMapping, map_tensor, rename_linear

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

TOWER_BLOCK = [
    *rename_linear("attn_residual.norm", "layer_norm1", bias=True),
    *rename_linear("attn.wq", "self_attn.q_proj", bias=True),
    *rename_linear("attn.wk", "self_attn.k_proj", bias=True),
    *rename_linear("attn.wv", "self_attn.v_proj", bias=True),
    *rename_linear("attn.wo", "self_attn.out_proj", bias=True),
    *rename_linear("ffn_residual.norm", "layer_norm2", bias=True),
    *MLP,
]
TOWER_KEYS = VISION_KEYS | used(intermediate_size=3072, attention_dropout=0.0)
TOWER_MAPPING = {"intermediate_size": "ffn.d_ff", "attention_dropout": "attention.dropout"}
SIGLIP_KEYS = TOWER_KEYS | {
    **used(layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh"),
    **ignored("vision_use_head"),
}
CLIP_KEYS = TOWER_KEYS | {
    **used(layer_norm_eps=1e-5, hidden_act="quick_gelu", patch_size=(32, int, list), initializer_range=0.02),
    **ignored("initializer_factor", "projection_dim"),
}
TOWER = VisionNames(
    "vision_model.", "encoder.layers.", TOWER_BLOCK, (), "embeddings.patch_embedding",
    "embeddings.position_embedding.weight", "post_layernorm",
)  # fmt: skip


def read_tower(hf_config: Json, mean: Sequence[float], std: Sequence[float], **options: Any) -> ModelConfig:
    """Read a tower's config. options: megatfm's keys that differ from `read_vision`."""
    return read_vision(hf_config, mean, std, **read_mapped(hf_config, TOWER_MAPPING), **options)


def read_siglip(hf_config: Json) -> ModelConfig:
    return read_tower(hf_config, HALF, HALF, **{"embedding.n_class_tokens": 0})


def write_siglip(config: ModelConfig) -> Json:
    hf_config = write_vision(config, TOWER_MAPPING)
    if config.ffn.activation == "gelu_tanh":
        hf_config["hidden_act"] = "gelu_pytorch_tanh"  # as in SigLIP's files
    return {**hf_config, "vision_use_head": False}


def read_clip(hf_config: Json) -> ModelConfig:
    return read_tower(hf_config, CLIP_MEAN, CLIP_STD, **{"embedding.bias": False, "embedding.norm": True})


def write_clip(config: ModelConfig) -> Json:
    return write_vision(config, {**TOWER_MAPPING, "initializer_range": "init.std"})


def map_clip(config: ModelConfig) -> list[WeightMapping]:
    megatfm_name, hf_name = "encoder.embedding.patches.special", "vision_model.embeddings.class_embedding"
    return [
        map_tensor(megatfm_name, hf_name, lambda token: token[0], lambda token: token[None]),
        *rename_linear("encoder.embedding.norm", "vision_model.pre_layrnorm", bias=True),
        *map_vision(TOWER, config),
    ]


register_architecture(
    "SiglipVisionModel",
    Architecture(
        "siglip_vision_model",
        SIGLIP_KEYS,
        read_siglip,
        write_siglip,
        partial(map_vision, TOWER),
        base_model_prefix="vision_model.",
        ignored_tensors=(r"^vision_model\.head\.",),
        fingerprint={"embedding.name": "patches", "embedding.n_class_tokens": 0},
    ),
)
register_architecture(
    "CLIPVisionModel",
    Architecture(
        "clip_vision_model",
        CLIP_KEYS,
        read_clip,
        write_clip,
        map_clip,
        base_model_prefix="vision_model.",
        fingerprint={"embedding.name": "patches", "embedding.norm": True, "embedding.bias": False},
    ),
)
