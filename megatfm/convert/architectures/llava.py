"""LLaVA (Liu et al. 2023): LlavaForConditionalGeneration with the image encoder of CLIP or SigLIP, and a Llama."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatfm.config import ConnectorConfig, ModelConfig, VisionTowerConfig
from megatfm.config.image_text import make_image_tower
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.llama import LLAMA_KEYS, map_llama, read_llama, write_llama
from megatfm.convert.architectures.two_towers import (
    CLIP_KEYS,
    SIGLIP_KEYS,
    TOWER,
    map_clip,
    read_clip,
    read_siglip,
    write_clip,
    write_siglip,
)
from megatfm.convert.architectures.vision import map_vision
from megatfm.convert.hf_config import COMMON_KEYS, Json, Key, ignored, resolve_hf_config, supported_values, used
from megatfm.convert.hf_values import PIXEL_KEYS
from megatfm.convert.weight_mapping import WeightMapping, add_prefix, rename_linear
from megatfm.errors import UsageError

LLAVA_KEYS: dict[str, Key] = {
    **used(
        vision_config=({}, dict, None), text_config=({}, dict, None), image_mean=(None, list, None),
        image_std=(None, list, None), image_token_index=32000, image_seq_length=(576, int, None),
        multimodal_projector_bias=True, vision_feature_layer=(-2, int, list), tie_word_embeddings=False,
    ),
    **supported_values(projector_hidden_act="gelu", vision_feature_select_strategy=("default", "full")),
    **ignored("ignore_index", "vocab_size", kinds=[int]),
}  # fmt: skip
CLIP_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""Sizes of an image encoder that config.json leaves out (CLIP's ViT-L/14 at 336 pixels)."""


@dataclass(frozen=True)
class ImageEncoder:
    """Conversion of one kind of image encoder.

    selected: `vision_feature_select_strategy` that passes on all patches and nothing else: "default" leaves out the
    class token, "full" nothing. sizes: of an encoder that config.json does not give.
    """

    keys: Mapping[str, Key]
    read: Callable[[Json], ModelConfig]
    write: Callable[[ModelConfig], Json]
    map_weights: Callable[[ModelConfig], list[WeightMapping]]
    selected: str
    sizes: Json = field(default_factory=dict)


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
ENCODERS = {
    CLIP: ImageEncoder(
        CLIP_KEYS | ignored("vocab_size", kinds=[int]), read_clip, write_clip, map_clip, "default", CLIP_SIZES
    ),
    SIGLIP: ImageEncoder(SIGLIP_KEYS, read_siglip, write_siglip, partial(map_vision, TOWER), "full"),
}
"""Image encoders by `vision_config.model_type`."""


def count_used_layers(vision: Json, layer: Any) -> int:
    """Return the number of blocks before the output that the connector reads.

    layer: `vision_feature_layer`, where 0 is the embedding, negative ones count from the end. Raises UsageError for
    several layers, and for one that doesn't exist.
    """
    n_layers = vision["num_hidden_layers"]
    n_used = layer if not isinstance(layer, int) or layer >= 0 else n_layers + 1 + layer
    if not isinstance(n_used, int) or not 1 <= n_used <= n_layers:
        raise UsageError(
            f"config.json: vision_feature_layer = {layer!r}: the connector reads the output of one of {n_layers} "
            "blocks: give the number of one, such as -2"
        )
    return n_used


def read_section(hf_config: Json, name: str, keys: Mapping[str, Key], model_type: str, **sizes: Any) -> Json:
    """Return a section of config.json with defaults filled in. Raises UsageError for an unsupported key or type."""
    declared = {**COMMON_KEYS, **supported_values(model_type=model_type), **keys}
    return resolve_hf_config({**sizes, **(hf_config[name] or {})}, declared, f"LLaVA's {name}")


def find_encoder(hf_config: Mapping[str, Any]) -> tuple[str, ImageEncoder]:
    """Return the kind of image encoder that config.json names, by default CLIP's. Raises UsageError for another."""
    model_type = (hf_config.get("vision_config") or {}).get("model_type", CLIP)
    if model_type not in ENCODERS:
        raise UsageError(
            f"config.json: vision_config.model_type = {model_type!r}: megatfm reads LLaVA with {' or '.join(ENCODERS)}"
        )
    return model_type, ENCODERS[model_type]


def read_vision_tower(hf_config: Json) -> Json:
    """Return our section of the image encoder. Raises UsageError where the decoder would not get its patches."""
    model_type, encoder = find_encoder(hf_config)
    if (strategy := hf_config["vision_feature_select_strategy"]) != encoder.selected:
        passed = "its class token too" if encoder.selected == "default" else "all but the first patch"
        raise UsageError(
            f"config.json: vision_feature_select_strategy = {strategy!r} passes on {passed} of a {model_type}: "
            f"megatfm passes on its patches, {encoder.selected!r}"
        )
    pixels = {key: hf_config[key] for key in PIXEL_KEYS if hf_config[key]}
    vision = read_section(hf_config, "vision_config", encoder.keys, model_type, **encoder.sizes, **pixels)
    tower = encoder.read(vision)
    return {
        "d_model": tower.d_model,
        "n_layers": count_used_layers(vision, hf_config["vision_feature_layer"]),
        "n_heads": tower.attention.n_heads,
        "d_ff": tower.ffn.d_ff,
        "activation": tower.ffn.activation,
        "norm_eps": tower.norm.eps,
        "embedding": tower.embedding.model_dump(),
        "grid": getattr(tower.position, "grid", None),
    }


def read_llava(hf_config: Json) -> ModelConfig:
    text = read_section(hf_config, "text_config", LLAMA_KEYS, "llama")
    text["tie_word_embeddings"] = text["tie_word_embeddings"] or hf_config["tie_word_embeddings"]
    return read_llama(text).with_changes(
        {
            "family": "vision_language",
            "vision_tower": read_vision_tower(hf_config),
            "connector": {
                "bias": hf_config["multimodal_projector_bias"],
                "image_token_id": hf_config["image_token_index"],
            },
        }
    )


def get_llava_sections(config: ModelConfig) -> tuple[VisionTowerConfig, ConnectorConfig]:
    """Return the sections of image encoder and connector. Raises UsageError for features that LLaVA lacks."""
    tower, connector = config.vision_tower, config.connector
    if config.family != "vision_language" or tower is None or connector is None:
        raise UsageError(f"model.family = {config.family!r} reads no images beside text")
    if connector.name != "mlp" or tower.final_norm:
        key = "connector.name = 'linear'" if connector.name != "mlp" else "vision_tower.final_norm = true"
        raise UsageError(f"model.{key}: LLaVA's connector has two matrices, and its image encoder no last norm")
    return tower, connector


def choose_encoder(tower: VisionTowerConfig) -> tuple[str, ImageEncoder]:
    """Choose the kind of image encoder that has a tower's parts: CLIP's has a class token."""
    model_type = CLIP if tower.embedding.n_class_tokens else SIGLIP
    return model_type, ENCODERS[model_type]


def write_llava(config: ModelConfig) -> Json:
    tower, connector = get_llava_sections(config)
    model_type, encoder = choose_encoder(tower)
    vision = encoder.write(make_image_tower(config))
    pixels = {key: vision.pop(key) for key in PIXEL_KEYS}
    text = write_llama(extract_decoder(config))
    return {
        "vision_config": {"model_type": model_type, **vision},
        "text_config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **text},
        **pixels,
        "image_token_index": connector.image_token_id,
        "image_seq_length": tower.grid[0] * tower.grid[1],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": connector.bias,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": encoder.selected,
        "tie_word_embeddings": config.embedding.tied,
    }


def extract_decoder(config: ModelConfig) -> ModelConfig:
    """Return the config of the decoder alone."""
    return config.with_changes({"family": "decoder", "vision_tower": None, "connector": None})


def map_llava(config: ModelConfig) -> list[WeightMapping]:
    vision, connector = get_llava_sections(config)
    _, encoder = choose_encoder(vision)
    tower = [
        replace(mapping, hf=tuple("vision_tower." + name.removeprefix("vision_model.") for name in mapping.hf))
        for mapping in encoder.map_weights(make_image_tower(config))
        if not mapping.megatfm[0].startswith("encoder.norm.")
    ]
    projector = "multi_modal_projector.linear_"
    return [
        *tower,
        *rename_linear("connector.w_in", f"{projector}1", bias=connector.bias),
        *rename_linear("connector.w_out", f"{projector}2", bias=connector.bias),
        *add_prefix("", "language_model.", map_llama(extract_decoder(config))),
    ]


def list_unused_layers(hf_config: Mapping[str, Any], names: Container[str]) -> Sequence[str]:
    """Return patterns of the image encoder's blocks above those used, its last norm and its pool."""
    _, encoder = find_encoder(hf_config)
    n_layers = {"num_hidden_layers": encoder.keys["num_hidden_layers"].default}
    values = {**n_layers, **encoder.sizes, **(hf_config.get("vision_config") or {})}
    n_used = count_used_layers(values, hf_config.get("vision_feature_layer", -2))
    above = "|".join(map(str, range(n_used, values["num_hidden_layers"])))
    layers = [rf"^vision_tower\.encoder\.layers\.({above})\."] if above else []
    return [*layers, r"^vision_tower\.(post_layernorm|head)\."]


register_architecture(
    "LlavaForConditionalGeneration",
    Architecture(
        "llava",
        LLAVA_KEYS,
        read_llava,
        write_llava,
        map_llava,
        ignored_tensors=(r"\.position_ids$", r"rotary_emb\.inv_freq$"),
        legacy_names=(
            (r"^vision_tower\.vision_model\.", "vision_tower."),
            (r"^model\.vision_tower\.", "vision_tower."),
            (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        fingerprint={"family": "vision_language"},
        unused_tensors=list_unused_layers,
    ),
)
