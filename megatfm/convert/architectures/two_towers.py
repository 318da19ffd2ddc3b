"""CLIP and SigLIP: the image towers alone (CLIPVisionModel, SiglipVisionModel), with a classifier
(SiglipForImageClassification), and both towers.

SigLIP's pooling head is not read alone; CLIP's last norm applies only to the class token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatfm.config import ContrastiveConfig, ModelConfig, TextTowerConfig
from megatfm.config.image_text import make_image_tower, make_text_tower
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.vision import (
    HALF,
    MLP,
    VISION_KEYS,
    VisionNames,
    map_vision,
    read_image_labels,
    read_vision,
    write_labels,
    write_vision,
)
from megatfm.convert.architectures.vit import CLASSIFIER
from megatfm.convert.hf_config import COMMON_KEYS, Json, Key, ignored, resolve_hf_config, supported_values, used
from megatfm.convert.hf_values import PIXEL_KEYS, read_mapped
from megatfm.convert.weight_mapping import (
    WeightMapping,
    add_leading_dims,
    concat,
    map_layers,
    map_name,
    map_tensor,
    rename_linear,
    rename_modules,
)
from megatfm.errors import UsageError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

TOWER_BLOCK = [
    *rename_linear("attn_residual.norm", "layer_norm1", bias=True),
    *rename_modules({f"attn.w{part}": f"self_attn.{part}_proj" for part in "qkv"}, bias=True),
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


def read_siglip(hf_config: Json, **options: Any) -> ModelConfig:
    return read_tower(hf_config, HALF, HALF, **{"embedding.n_class_tokens": 0}, **options)


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

# Both towers

TEXT_MAPPING = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_positions",
}
SHARED_KEYS = ("hidden_act", "layer_norm_eps", "attention_dropout")
"""Keys that both towers have, but megatfm only once."""
CLIP_TEXT_KEYS: dict[str, Key] = {
    **used(
        vocab_size=49_408, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2048,
        max_position_embeddings=77,
    ),
    **{key: CLIP_KEYS[key] for key in SHARED_KEYS},
    **supported_values(dropout=0.0),
    **ignored("initializer_factor", "initializer_range", "projection_dim"),
}  # fmt: skip
SIGLIP_TEXT_KEYS: dict[str, Key] = {
    **CLIP_TEXT_KEYS,
    **used(
        vocab_size=32_000, hidden_size=768, num_attention_heads=12, intermediate_size=3072, max_position_embeddings=64,
        projection_size=(None, int, None),
    ),
    **{key: SIGLIP_KEYS[key] for key in SHARED_KEYS},
}  # fmt: skip
PAIR_KEYS: dict[str, Key] = {
    **used(
        text_config=({}, dict, None), vision_config=({}, dict, None), image_mean=(None, list, None),
        image_std=(None, list, None),
    ),
    **ignored("initializer_factor", "text_config_dict", "vision_config_dict"),
}  # fmt: skip
CLASSIFIER_KEYS = PAIR_KEYS | {
    **ignored("text_config", "label2id"),
    **used(id2label=(None, dict, None), num_labels=(None, int, None)),
}


def read_tower_section(hf_config: Json, name: str, keys: Mapping[str, Key], model_type: str) -> Json:
    """Return the resolved keys of the tower `name`, "vision" with the mean and standard deviation of pixels or "text".

    keys: their declarations. Raises UsageError as `resolve_hf_config` does.
    """
    declared = {**COMMON_KEYS, **supported_values(model_type=(f"{model_type}_{name}_model", model_type)), **keys}
    section = hf_config[f"{name}_config"] or {}
    pixels = {key: hf_config[key] for key in PIXEL_KEYS if hf_config[key]} if name == "vision" else {}
    return resolve_hf_config({**section, **pixels}, declared, f"{model_type} {name} tower")


def nest_vision(vision: Json, model_type: str) -> Json:
    """Return the section of a tower's keys, beside the mean and standard deviation of pixels."""
    pixels = {key: vision.pop(key) for key in PIXEL_KEYS}
    return {"vision_config": {"model_type": f"{model_type}_vision_model", **vision}, **pixels}


def read_towers(
    hf_config: Json,
    keys: tuple[Mapping[str, Key], Mapping[str, Key]],
    model_type: str,
    read_image: Callable[[Json], ModelConfig],
) -> tuple[ModelConfig, Json]:
    """Return the config of the image tower, and the resolved keys of the text tower.

    keys: declarations for vision and text. Raises UsageError if the towers differ in a key that megatfm has once.
    """
    vision, text = (
        read_tower_section(hf_config, name, tower_keys, model_type)
        for name, tower_keys in zip(("vision", "text"), keys, strict=True)
    )
    for key in SHARED_KEYS:
        if vision[key] != text[key]:
            raise UsageError(
                f"config.json: text_config.{key} = {text[key]!r} and vision_config.{key} = {vision[key]!r}: "
                "megatfm has one for both"
            )
    return read_image(vision), text


def add_text_tower(image: ModelConfig, text: Json, contrastive: Json, *, causal: bool) -> ModelConfig:
    """Return the config of both towers."""
    return image.with_changes(
        {
            "family": "two_towers",
            "vocab_size": text["vocab_size"],
            "text_tower": {**read_mapped(text, TEXT_MAPPING), "causal": causal},
            "contrastive": contrastive,
        }
    )


def get_tower_sections(config: ModelConfig, causal: bool, loss: str) -> tuple[TextTowerConfig, ContrastiveConfig]:
    """Return the sections of text tower and contrastive loss. Raises UsageError for another family or kind."""
    text, contrastive = config.text_tower, config.contrastive
    if config.family != "two_towers" or text is None or contrastive is None:
        raise UsageError(f"model.family = {config.family!r} has no two towers")
    if text.causal != causal or contrastive.loss != loss:
        raise UsageError(
            f"model.text_tower.causal = {text.causal} and model.contrastive.loss = {contrastive.loss!r}: the class of "
            f"transformers has causal = {causal} and loss = {loss!r}"
        )
    return text, contrastive


def write_towers(
    config: ModelConfig, text: TextTowerConfig, write_image: Callable[[ModelConfig], Json], model_type: str
) -> Json:
    """Return the sections of both towers in config.json, and mean and standard deviation of pixels."""
    vision = write_image(make_image_tower(config))
    sizes = {hf_key: getattr(text, key) for hf_key, key in TEXT_MAPPING.items()}
    shared = {key: vision[key] for key in SHARED_KEYS}
    text_section = {"model_type": f"{model_type}_text_model", **sizes, **shared, "vocab_size": config.vocab_size}
    return {"text_config": text_section, **nest_vision(vision, model_type)}


# CLIP


def read_clip_model(hf_config: Json) -> ModelConfig:
    image, text = read_towers(hf_config, (CLIP_KEYS, CLIP_TEXT_KEYS), "clip", read_clip)
    contrastive = {
        "loss": "softmax",
        "width": hf_config["projection_dim"],
        "scale": float(torch.tensor(hf_config["logit_scale_init_value"]).double().exp()),
    }
    return add_text_tower(image, text, contrastive, causal=True)


def write_clip_model(config: ModelConfig) -> Json:
    text, contrastive = get_tower_sections(config, causal=True, loss="softmax")
    scale = torch.tensor(contrastive.scale, dtype=torch.float64)
    return {
        **write_towers(config, text, write_clip, "clip"),
        "projection_dim": contrastive.width,
        "logit_scale_init_value": round(float(scale.log()), 4),
    }


def map_text_tower(config: ModelConfig) -> list[WeightMapping]:
    """Map the text tower."""
    hf_prefix = "text_model.embeddings."
    return [
        map_name("text.embedding.tokens.weight", f"{hf_prefix}token_embedding.weight"),
        map_name("text.embedding.positions.weight", f"{hf_prefix}position_embedding.weight"),
        *map_layers(make_text_tower(config).n_layers, "text.layers.", "text_model.encoder.layers.", TOWER_BLOCK),
        *rename_linear("text.norm", "text_model.final_layer_norm", bias=True),
    ]


def map_clip_model(config: ModelConfig) -> list[WeightMapping]:
    return [
        *map_clip(make_image_tower(config)),
        *map_text_tower(config),
        map_name("image_features.projection.weight", "visual_projection.weight"),
        map_name("text_features.projection.weight", "text_projection.weight"),
        map_tensor("temperature.log_scale", "logit_scale", lambda scale: scale[0], lambda scale: scale[None]),
    ]


# SigLIP


def read_siglip_model(hf_config: Json) -> ModelConfig:
    image, text = read_towers(hf_config, (SIGLIP_KEYS, SIGLIP_TEXT_KEYS), "siglip", read_siglip)
    contrastive = {
        "loss": "sigmoid",
        "width": text["projection_size"] or text["hidden_size"],
        "image_pool": "attention",
        "project_image": False,
        "projection_bias": True,
        "scale": 10.0,
    }
    return add_text_tower(image, text, contrastive, causal=False)


def write_siglip_model(config: ModelConfig) -> Json:
    text, contrastive = get_tower_sections(config, causal=False, loss="sigmoid")
    hf_config = write_towers(config, text, write_siglip, "siglip")
    del hf_config["vision_config"]["vision_use_head"]
    hf_config["text_config"]["projection_size"] = contrastive.width
    return hf_config


def map_siglip_model(config: ModelConfig) -> list[WeightMapping]:
    pool, hf_pool, d_model = "image_features.pool", "vision_model.head", config.d_model
    projections = [f"{pool}.w{part}" for part in "qkv"]
    return [
        *map_vision(TOWER, make_image_tower(config)),
        add_leading_dims(f"{pool}.query", f"{hf_pool}.probe"),
        concat([f"{name}.weight" for name in projections], f"{hf_pool}.attention.in_proj_weight", [d_model] * 3),
        concat([f"{name}.bias" for name in projections], f"{hf_pool}.attention.in_proj_bias", [d_model] * 3),
        *rename_linear(f"{pool}.wo", f"{hf_pool}.attention.out_proj", bias=True),
        *rename_linear(f"{pool}.norm", f"{hf_pool}.layernorm", bias=True),
        *rename_linear(f"{pool}.w_up", f"{hf_pool}.mlp.fc1", bias=True),
        *rename_linear(f"{pool}.w_down", f"{hf_pool}.mlp.fc2", bias=True),
        *map_text_tower(config),
        *rename_linear("text_features.projection", "text_model.head", bias=True),
        map_name("temperature.log_scale", "logit_scale"),
        map_name("temperature.bias", "logit_bias"),
    ]


# A classifier of the mean of SigLIP's patches


def read_siglip_classifier(hf_config: Json) -> ModelConfig:
    return read_siglip(
        read_tower_section(hf_config, "vision", SIGLIP_KEYS, "siglip"), **read_image_labels(hf_config, "mean")
    )


def write_siglip_classifier(config: ModelConfig) -> Json:
    return write_labels(config) | nest_vision(write_siglip(config), "siglip")


POSITION_IDS = (r"\.position_ids$",)
register_architecture(
    "CLIPModel",
    Architecture(
        "clip",
        PAIR_KEYS | used(projection_dim=512, logit_scale_init_value=2.6592),
        read_clip_model,
        write_clip_model,
        map_clip_model,
        ignored_tensors=POSITION_IDS,
        fingerprint={"family": "two_towers", "contrastive.loss": "softmax"},
    ),
)
register_architecture(
    "SiglipModel",
    Architecture(
        "siglip",
        PAIR_KEYS,
        read_siglip_model,
        write_siglip_model,
        map_siglip_model,
        ignored_tensors=POSITION_IDS,
        fingerprint={"family": "two_towers", "contrastive.loss": "sigmoid"},
    ),
)
register_architecture(
    "SiglipForImageClassification",
    Architecture(
        "siglip",
        CLASSIFIER_KEYS,
        read_siglip_classifier,
        write_siglip_classifier,
        partial(map_vision, replace(TOWER, head=CLASSIFIER)),
        ignored_tensors=(*POSITION_IDS, r"^vision_model\.head\."),
        fingerprint={"embedding.name": "patches", "embedding.n_class_tokens": 0, "extra_heads.classifier.pool": "mean"},
    ),
)
