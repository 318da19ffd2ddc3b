"""Vision transformers: ViT, DeiT, DINOv2 with and without registers, each with a classifier or without, and DINOv3.

Files have the hub's names (`encoder.layer.0.attention.attention.query`); the names that transformers 5 has in memory
(`layers.0.attention.q_proj`) are read, too.
"""

from collections.abc import Sequence
from functools import partial

from megatfm.config import GQAAttentionConfig, ModelConfig, PatchEmbeddingConfig, require_variant
from megatfm.config.model_parts import IMAGENET_MEAN, IMAGENET_STD
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.vision import (
    HALF,
    MLP,
    TRAINED_KEYS,
    TRAINED_MAPPING,
    VISION_KEYS,
    VisionNames,
    map_vision,
    read_image_labels,
    read_vision,
    write_labels,
    write_vision,
)
from megatfm.convert.hf_config import Json, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import GATED, activation_from_hf, activation_to_hf, read_mapped
from megatfm.convert.weight_mapping import WeightMapping, map_name, rename_linear
from megatfm.errors import UsageError

HUB_ATTENTION = [
    *rename_linear("attn.wq", "attention.attention.query", bias=True),
    *rename_linear("attn.wk", "attention.attention.key", bias=True),
    *rename_linear("attn.wv", "attention.attention.value", bias=True),
    *rename_linear("attn.wo", "attention.output.dense", bias=True),
]
NORMS_AND_FFN = [
    *rename_linear("attn_residual.norm", "layernorm_before", bias=True),
    *rename_linear("ffn_residual.norm", "layernorm_after", bias=True),
    *rename_linear("ffn.w_up", "intermediate.dense", bias=True),
    *rename_linear("ffn.w_down", "output.dense", bias=True),
]
"""A block of ViT or Swin outside of attention."""
VIT_BLOCK = [*HUB_ATTENTION, *NORMS_AND_FFN]
CLASSIFIER = rename_linear("classifier.classifier", "classifier", bias=True)
IN_MEMORY_NAMES = (
    (r"\.layers\.(\d+)\.", r".encoder.layer.\1."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
"""Names that transformers has in memory → in files."""
MLP_IN_MEMORY_NAMES = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))

# ViT and DeiT, whose second special token is for distillation; the classifier reads the first

VIT_KEYS = {
    **VISION_KEYS,
    **TRAINED_KEYS,
    **used(intermediate_size=3072),
    **supported_values(qkv_bias=True),
    **ignored("encoder_stride", "pooler_output_size", "pooler_act"),
}
VIT_MAPPING = {**TRAINED_MAPPING, "intermediate_size": "ffn.d_ff"}


def register_vit(
    name: str, base: str, kind: str, special: Sequence[str], mean: Sequence[float], std: Sequence[float]
) -> None:
    """Register a ViT with a classifier, and its backbone. special: names of its special tokens."""
    names = VisionNames(
        f"{kind}.", "encoder.layer.", VIT_BLOCK, [(f"embeddings.{token}", 1) for token in special], head=CLASSIFIER
    )

    def read(hf_config: Json) -> ModelConfig:
        sizes = {"ffn.d_ff": hf_config["intermediate_size"], "embedding.n_class_tokens": len(special)}
        return read_vision(hf_config, mean, std, **sizes, **read_image_labels(hf_config, "class"))

    def write(config: ModelConfig) -> Json:
        labels = write_labels(config) if config.extra_heads else {}
        return {**write_vision(config, VIT_MAPPING), "qkv_bias": True, **labels}

    register_architecture(
        name,
        Architecture(
            kind,
            VIT_KEYS,
            read,
            write,
            partial(map_vision, names),
            base_model_prefix=f"{kind}.",
            ignored_tensors=(rf"^{kind}\.pooler\.",),
            legacy_names=(*IN_MEMORY_NAMES, *MLP_IN_MEMORY_NAMES),
            fingerprint={"embedding.name": "patches", "embedding.n_class_tokens": len(special)},
        ),
        base=base,
    )


register_vit("ViTForImageClassification", "ViTModel", "vit", ["cls_token"], HALF, HALF)
register_vit(
    "DeiTForImageClassification", "DeiTModel", "deit", ["cls_token", "distillation_token"], IMAGENET_MEAN, IMAGENET_STD
)

# DINOv2: layer scale; the classifier reads the class token and the mean of patches

DINOV2_BLOCK = [
    *HUB_ATTENTION,
    *rename_linear("attn_residual.norm", "norm1", bias=True),
    map_name("attn_residual.branch.layer_scale.weight", "layer_scale1.lambda1"),
    *rename_linear("ffn_residual.norm", "norm2", bias=True),
    *MLP,
    map_name("ffn_residual.branch.layer_scale.weight", "layer_scale2.lambda1"),
]
DINOV2_KEYS = {
    **VISION_KEYS,
    **TRAINED_KEYS,
    **used(
        patch_size=(14, int, list), layer_norm_eps=1e-6, mlp_ratio=(4, int, float), layerscale_value=1.0,
        drop_path_rate=0.0,
    ),
    **supported_values(qkv_bias=True, use_swiglu_ffn=False, apply_layernorm=True),
    **ignored("out_features", "out_indices", "stage_names", "reshape_hidden_states", "use_mask_token"),
}  # fmt: skip


def register_dinov2(name: str, base: str, kind: str, *, registers: bool) -> None:
    """Register a DINOv2 with a classifier, and its backbone. registers: whether it has register tokens."""
    names = VisionNames(
        f"{kind}.", "encoder.layer.", DINOV2_BLOCK, head=CLASSIFIER,
        unused="embeddings.mask_token" if registers else "",
    )  # fmt: skip

    def read(hf_config: Json) -> ModelConfig:
        options = {
            "ffn.d_ff": round(hf_config["hidden_size"] * hf_config["mlp_ratio"]),
            "layer_scale": hf_config["layerscale_value"],
            "drop_path": hf_config["drop_path_rate"],
            "position.antialias": registers,
            "embedding.n_register_tokens": hf_config.get("num_register_tokens", 0),
        }
        return read_vision(
            hf_config, IMAGENET_MEAN, IMAGENET_STD, **options, **read_image_labels(hf_config, "class_mean")
        )

    def write(config: ModelConfig) -> Json:
        if config.ffn.d_ff % config.d_model:
            raise UsageError(
                f"model.ffn.d_ff = {config.ffn.d_ff}: a {name} stores a whole multiple of d_model = {config.d_model}"
            )
        embedding = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
        tokens = {"num_register_tokens": embedding.n_register_tokens} if registers else {"use_mask_token": False}
        return {
            **write_vision(config, TRAINED_MAPPING),
            **tokens,
            "mlp_ratio": config.ffn.d_ff // config.d_model,
            "layerscale_value": config.layer_scale,
            "drop_path_rate": config.drop_path,
            **(write_labels(config) if config.extra_heads else {}),
        }

    register_keys = used(num_register_tokens=4, patch_size=(16, int, list))
    keys = DINOV2_KEYS | (register_keys if registers else {})
    register_architecture(
        name,
        Architecture(
            kind,
            keys,
            read,
            write,
            partial(map_vision, names),
            base_model_prefix=f"{kind}.",
            ignored_tensors=() if registers else (r"embeddings\.mask_token$",),
            legacy_names=IN_MEMORY_NAMES[1:],
            fingerprint={"embedding.name": "patches", "norm.eps": 1e-6, "ffn.activation": "gelu"},
        ),
        base=base,
    )


register_dinov2("Dinov2ForImageClassification", "Dinov2Model", "dinov2", registers=False)
register_dinov2(
    "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel", "dinov2_with_registers", registers=True
)


# DINOv3: rotary positions, keys without bias, no classifier

DINOV3_KEYS = {
    **omit_keys(VISION_KEYS, "id2label", "num_labels", "label2id", "image_size"),
    **used(
        initializer_range=0.02, attention_dropout=0.0, hidden_size=384, intermediate_size=1536, num_attention_heads=6,
        layer_norm_eps=1e-5, rope_theta=100.0, key_bias=False, layerscale_value=1.0, drop_path_rate=0.0,
        use_gated_mlp=False, num_register_tokens=0,
    ),
    **supported_values(query_bias=True, value_bias=True, proj_bias=True, mlp_bias=True, apply_layernorm=True),
    **ignored("image_size", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    **ignored("out_features", "out_indices", "stage_names", "reshape_hidden_states"),
}  # fmt: skip
"""image_size is ignored, since rotary positions fit any size; so are their random shifts in training."""
DINOV3_MAPPING = {
    "initializer_range": "init.std",
    "attention_dropout": "attention.dropout",
    "intermediate_size": "ffn.d_ff",
    "layerscale_value": "layer_scale",
    "drop_path_rate": "drop_path",
    "rope_theta": "position.theta",
    "num_register_tokens": "embedding.n_register_tokens",
}


def read_dinov3(hf_config: Json) -> ModelConfig:
    """Read a DINOv3 backbone."""
    return read_vision(
        hf_config,
        IMAGENET_MEAN,
        IMAGENET_STD,
        **read_mapped(hf_config, DINOV3_MAPPING),
        **{
            "position.name": "rope_2d",
            "position.normalized": True,
            "attention.key_bias": hf_config["key_bias"],
            "ffn.activation": activation_from_hf(hf_config["hidden_act"], gated=hf_config["use_gated_mlp"]),
        },
    )


def write_dinov3(config: ModelConfig) -> Json:
    """Write config.json, the inverse of `read_dinov3`."""
    attention = require_variant(config.attention, GQAAttentionConfig, "model.attention")
    is_gated = config.ffn.activation in GATED.values()
    activation = activation_to_hf(config.ffn.activation, gated=is_gated)
    plain = config.with_changes({"ffn.activation": activation_from_hf(activation)})
    return {
        **write_vision(plain, DINOV3_MAPPING),
        "key_bias": attention.bias if attention.key_bias is None else attention.key_bias,
        "use_gated_mlp": is_gated,
    }


def map_dinov3(config: ModelConfig) -> list[WeightMapping]:
    """Map a DINOv3 backbone."""
    attention = require_variant(config.attention, GQAAttentionConfig, "model.attention")
    has_key_bias = attention.bias if attention.key_bias is None else attention.key_bias
    is_gated = config.ffn.activation in GATED.values()
    block = [
        *rename_linear("attn.wq", "attention.q_proj", bias=True),
        *rename_linear("attn.wk", "attention.k_proj", bias=has_key_bias),
        *rename_linear("attn.wv", "attention.v_proj", bias=True),
        *rename_linear("attn.wo", "attention.o_proj", bias=True),
        *rename_linear("attn_residual.norm", "norm1", bias=True),
        map_name("attn_residual.branch.layer_scale.weight", "layer_scale1.lambda1"),
        *rename_linear("ffn_residual.norm", "norm2", bias=True),
        *(rename_linear("ffn.w_gate", "mlp.gate_proj", bias=True) if is_gated else []),
        *rename_linear("ffn.w_up", "mlp.up_proj", bias=True),
        *rename_linear("ffn.w_down", "mlp.down_proj", bias=True),
        map_name("ffn_residual.branch.layer_scale.weight", "layer_scale2.lambda1"),
    ]
    names = VisionNames(
        "",
        "layer.",
        block,
        patches="embeddings.patch_embeddings",
        final_norm="norm",
        unused="embeddings.mask_token",
        unused_dims=(1, 1),
    )
    return map_vision(names, config)


register_architecture(
    "DINOv3ViTModel",
    Architecture(
        "dinov3_vit",
        DINOV3_KEYS,
        read_dinov3,
        write_dinov3,
        map_dinov3,
        legacy_names=((r"^model\.layer\.", "layer."),),
        fingerprint={"embedding.name": "patches", "position.name": "rope_2d"},
    ),
)
