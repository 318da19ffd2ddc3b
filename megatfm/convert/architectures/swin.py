"""Swin and Swin-V2 with classifiers (SwinForImageClassification, Swinv2ForImageClassification), and SimMIM's classes
ForMaskedImageModeling (Xie et al. 2022): the backbones of classifiers, ViT's too, with a head for pixels.

Files have the hub's names (`attention.self.query`); the names that transformers 5 has in memory (`attention.q_proj`)
are read, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatfm.config import (
    LogRelative2dConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    WindowedAttentionConfig,
    Windows2dPatternConfig,
    require_variant,
)
from megatfm.config.heads import PixelsHeadConfig
from megatfm.config.model_parts import IMAGENET_MEAN, IMAGENET_STD
from megatfm.config.stages import StagesConfig
from megatfm.convert.architecture import ARCHITECTURES, Architecture, register_architecture
from megatfm.convert.architectures.vision import (
    TRAINED_KEYS,
    map_convolution,
    read_image_labels,
    read_side,
    write_labels,
)
from megatfm.convert.architectures.vit import CLASSIFIER, NORMS_AND_FFN
from megatfm.convert.hf_config import Json, Key, ignored, supported_values, used
from megatfm.convert.hf_values import (
    activation_from_hf,
    activation_to_hf,
    check_implied_values,
    read_mapped,
    write_mapped,
)
from megatfm.convert.weight_mapping import (
    WeightMapping,
    add_leading_dims,
    add_prefix,
    map_name,
    map_tensor,
    rename_linear,
)
from megatfm.errors import UsageError

FIXED_NORM_EPS = 1e-5
"""ε of the norms of embedding and merging in transformers, which config.json doesn't change."""
SWIN_KEYS: dict[str, Key] = {
    **TRAINED_KEYS,
    **used(
        image_size=(224, int, list), patch_size=(4, int, list), num_channels=3, embed_dim=96,
        depths=([2, 2, 6, 2], list), num_heads=([3, 6, 12, 24], list), window_size=7, mlp_ratio=(4.0, int, float),
        drop_path_rate=(0.1, int, float), hidden_act="gelu", hidden_size=(None, int, None),
        num_layers=(None, int, None), image_mean=(None, list, None), image_std=(None, list, None),
        id2label=(None, dict, None), num_labels=(None, int, None),
    ),
    **supported_values(qkv_bias=True, use_absolute_embeddings=False, layer_norm_eps=FIXED_NORM_EPS),
    **ignored("label2id", "encoder_stride", "out_features", "out_indices", "stage_names", "path_norm"),
}  # fmt: skip
SWIN_V2_KEYS = {**SWIN_KEYS, **used(pretrained_window_sizes=([0, 0, 0, 0], list))}
SWIN_MAPPING = {
    "embed_dim": "d_model",
    "drop_path_rate": "drop_path",
    "num_channels": "embedding.channels",
    "initializer_range": "init.std",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention.dropout",
}


def read_swin(hf_config: Json, **options: Any) -> ModelConfig:
    """Read a hierarchical model. options: megatfm's keys that differ. Raises UsageError for unsupported features."""
    depths, patch_size = hf_config["depths"], read_side(hf_config, "patch_size")
    last_width = hf_config["embed_dim"] * 2 ** (len(depths) - 1)
    check_implied_values(hf_config, hidden_size=last_width, num_layers=len(depths))
    side = -(-read_side(hf_config, "image_size") // patch_size)
    common = {
        **read_mapped(hf_config, SWIN_MAPPING),
        "family": "hierarchical",
        "stages.n_layers": tuple(depths),
        "stages.n_heads": tuple(hf_config["num_heads"]),
        "stages.grid": (side, side),
        "attention.name": "windowed",
        "attention.pattern": {"name": "windows_2d", "window": hf_config["window_size"]},
        "position.name": "relative_2d",
        "ffn.d_ff": int(hf_config["mlp_ratio"] * hf_config["embed_dim"]),
        "ffn.activation": activation_from_hf(hf_config["hidden_act"]),
        "ffn.bias": True,
        "norm.name": "layer_norm",
        "norm.eps": FIXED_NORM_EPS,
        "embedding.name": "patches",
        "embedding.patch_size": patch_size,
        "embedding.n_class_tokens": 0,
        "embedding.norm": True,
        "embedding.mean": tuple(hf_config["image_mean"] or IMAGENET_MEAN),
        "embedding.std": tuple(hf_config["image_std"] or IMAGENET_STD),
        "lm_head.name": "none",
        "init.name": "bert",
        **read_image_labels(hf_config, "mean"),
    }
    return ModelConfig.from_dotted(common | options)


def write_swin(config: ModelConfig) -> Json:
    """Write config.json, the inverse of `read_swin`."""
    embedding = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
    pattern = require_variant(config.attention.pattern, Windows2dPatternConfig, "model.attention.pattern")
    stages = _get_stages(config)
    if stages.grid[0] != stages.grid[1]:
        raise UsageError(f"model.stages.grid = {list(stages.grid)}: transformers stores square images here")
    return {
        **write_mapped(config, SWIN_MAPPING),
        "image_size": stages.grid[0] * embedding.patch_size,
        "patch_size": embedding.patch_size,
        "depths": list(stages.n_layers),
        "num_heads": list(stages.n_heads),
        "window_size": pattern.window,
        "mlp_ratio": config.ffn.d_ff / config.d_model,
        "qkv_bias": True,
        "hidden_act": activation_to_hf(config.ffn.activation),
        "layer_norm_eps": config.norm.eps,
        "hidden_size": config.d_model * 2 ** (len(stages.n_layers) - 1),
        "image_mean": list(embedding.mean),
        "image_std": list(embedding.std),
        **(write_labels(config) if config.extra_heads else {}),
    }


def _get_stages(config: ModelConfig) -> StagesConfig:
    """Return the stages of a hierarchical model. Raises UsageError for another family."""
    if config.stages is None:
        raise UsageError(f"model.family = {config.family!r} has no stages")
    return config.stages


def read_swin_v2(hf_config: Json) -> ModelConfig:
    """Read a Swin-V2. Raises UsageError if only some stages have pretrained window sizes."""
    windows = hf_config["pretrained_window_sizes"]
    if any(windows) and not all(windows):
        raise UsageError(f"config.json: pretrained_window_sizes = {windows}: give all of them, or zeros alone")
    _check_windows_by_config(hf_config)
    changes = {
        "attention.cosine": True,
        "position.name": "log_relative_2d",
        "position.pretrained_windows": tuple(windows) if any(windows) else None,
        "norm.placement": "res_post",
        "stages.merging_norm": "output",
    }
    return read_swin(hf_config, **changes)


def _check_windows_by_config(hf_config: Json) -> None:
    """Raise UsageError if transformers would choose other windows: it rounds the sizes of maps down."""
    side, patch, window = (
        read_side(hf_config, "image_size"),
        read_side(hf_config, "patch_size"),
        hf_config["window_size"],
    )
    for stage, depth in enumerate(hf_config["depths"]):
        configured, padded = (side // patch) // 2**stage, -(-side // (patch * 2**stage))
        is_shifted = window == configured and depth > 1
        if configured != padded and (window > configured or is_shifted):
            raise UsageError(
                f"config.json: image_size = {side}: stage {stage} has a map of {padded}, but transformers takes "
                f"windows for one of {configured}: give an image_size that {patch * 2**stage} divides"
            )


def write_swin_v2(config: ModelConfig) -> Json:
    """Write config.json, the inverse of `read_swin_v2`."""
    require_variant(config.attention, WindowedAttentionConfig, "model.attention")
    position = require_variant(config.position, LogRelative2dConfig, "model.position")
    windows = position.pretrained_windows or [0] * len(_get_stages(config).n_layers)
    return {**write_swin(config), "pretrained_window_sizes": list(windows)}


# Tensors

BLOCK = [
    *rename_linear("attn.wq", "attention.self.query", bias=True),
    *rename_linear("attn.wv", "attention.self.value", bias=True),
    *rename_linear("attn.wo", "attention.output.dense", bias=True),
    *NORMS_AND_FFN,
]
BLOCK_V1 = [
    *BLOCK,
    *rename_linear("attn.wk", "attention.self.key", bias=True),
    map_name("attn.position.weight", "attention.self.relative_position_bias_table"),
]


BLOCK_V2 = [
    *BLOCK,
    *rename_linear("attn.wk", "attention.self.key"),
    map_tensor(  # [heads] → [heads, 1, 1]
        "attn.cosine.weight",
        "attention.self.logit_scale",
        lambda scale: scale[:, None, None],
        lambda scale: scale[:, 0, 0],
    ),
    *rename_linear("attn.position.hidden", "attention.self.continuous_position_bias_mlp.0", bias=True),
    *rename_linear("attn.position.out", "attention.self.continuous_position_bias_mlp.2"),
]


def map_swin(prefix: str, block: Sequence[WeightMapping], config: ModelConfig) -> list[WeightMapping]:
    """Map a model. prefix: of the names of the bare model in transformers. block: mappings of a block."""
    embedding = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
    stages = _get_stages(config)
    merging = [
        ("norm" if stages.merging_norm == "input" else "norm_out", "norm", True),
        ("reduction", "reduction", False),
    ]
    mappings = [
        *map_convolution(f"{prefix}embeddings.patch_embeddings.projection", embedding),
        *rename_linear("encoder.embedding.norm", f"{prefix}embeddings.norm", bias=True),
    ]
    depth = 0
    for stage, layers in enumerate(stages.n_layers):
        hf_prefix = f"{prefix}encoder.layers.{stage}."
        for i in range(layers):
            mappings += add_prefix(f"encoder.layers.{depth}.", f"{hf_prefix}blocks.{i}.", block)
            depth += 1
        for megatfm_name, name, bias in merging if stage + 1 < len(stages.n_layers) else ():
            mappings += rename_linear(
                f"encoder.merges.{stage}.{megatfm_name}", f"{hf_prefix}downsample.{name}", bias=bias
            )
    return [
        *mappings,
        *rename_linear("encoder.norm", f"{prefix}layernorm", bias=True),
        *(CLASSIFIER if config.extra_heads else []),
    ]


BUFFERS = (r"relative_position_index$", r"relative_coords_table$", r"attn_mask$")
"""Buffers of older files, which follow from config.json."""
IN_MEMORY_NAMES = (
    (r"\.attention\.q_proj\.", ".attention.self.query."),
    (r"\.attention\.k_proj\.", ".attention.self.key."),
    (r"\.attention\.v_proj\.", ".attention.self.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.attention\.relative_position_bias\.", ".attention.self."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
"""Names that transformers has in memory → in files."""

register_architecture(
    "SwinForImageClassification",
    Architecture(
        "swin",
        SWIN_KEYS,
        read_swin,
        write_swin,
        partial(map_swin, "swin.", BLOCK_V1),
        base_model_prefix="swin.",
        ignored_tensors=BUFFERS,
        legacy_names=IN_MEMORY_NAMES,
        fingerprint={"family": "hierarchical", "position.name": "relative_2d"},
    ),
    base="SwinModel",
)
register_architecture(
    "Swinv2ForImageClassification",
    Architecture(
        "swinv2",
        SWIN_V2_KEYS,
        read_swin_v2,
        write_swin_v2,
        partial(map_swin, "swinv2.", BLOCK_V2),
        base_model_prefix="swinv2.",
        ignored_tensors=BUFFERS,
        fingerprint={"family": "hierarchical", "position.name": "log_relative_2d"},
    ),
    base="Swinv2Model",
)

# SimMIM

PIXEL_HEAD = "pixels"


def _get_pixel_head(config: ModelConfig) -> PixelsHeadConfig:
    """Return the section of the head. Raises UsageError for a model without it, or without a mask token."""
    head = config.extra_heads.get(PIXEL_HEAD)
    if not isinstance(head, PixelsHeadConfig) or not getattr(config.embedding, "mask_token", False):
        raise UsageError(f"without model.embedding.mask_token and model.extra_heads.{PIXEL_HEAD} this is no SimMIM")
    return head


def _extract_backbone(config: ModelConfig) -> ModelConfig:
    """Return the model without head and mask token."""
    return config.with_changes({"extra_heads": {}, "embedding.mask_token": False})


def _map_pixel_head(prefix: str) -> list[WeightMapping]:
    """Map the mask token [1, D] to [1, 1, D], and the linear layer to a convolution of 1 × 1."""
    return [
        add_leading_dims("encoder.embedding.mask_tokens.weight", f"{prefix}embeddings.mask_token"),
        map_tensor(
            f"{PIXEL_HEAD}.prediction.weight",
            "decoder.0.weight",
            lambda weight: weight[..., None, None],
            lambda weight: weight[..., 0, 0],
        ),
        map_name(f"{PIXEL_HEAD}.prediction.bias", "decoder.0.bias"),
    ]


def register_simmim(name: str, classifier: str, stride: int) -> None:
    """Register a class by that with a classifier. stride: `encoder_stride` that config.json does not give."""
    backbone = ARCHITECTURES.get(classifier)

    def read(hf_config: Json) -> ModelConfig:
        head = {"name": PIXEL_HEAD, "stride": hf_config["encoder_stride"]}
        changes = {"embedding.mask_token": True, "extra_heads": {PIXEL_HEAD: head}}
        return backbone.config_from_hf(hf_config).with_changes(changes)

    def write(config: ModelConfig) -> Json:
        encoder_stride = _get_pixel_head(config).stride
        return {**backbone.config_to_hf(_extract_backbone(config)), "encoder_stride": encoder_stride}

    def map_weights(config: ModelConfig) -> list[WeightMapping]:
        return [*backbone.map_weights(_extract_backbone(config)), *_map_pixel_head(backbone.base_model_prefix)]

    architecture = replace(
        backbone,
        keys={**backbone.keys, **used(encoder_stride=stride)},
        config_from_hf=read,
        config_to_hf=write,
        map_weights=map_weights,
        fingerprint={**backbone.fingerprint, "embedding.mask_token": True},
    )
    register_architecture(name, architecture)


register_simmim("SwinForMaskedImageModeling", "SwinForImageClassification", 32)
register_simmim("Swinv2ForMaskedImageModeling", "Swinv2ForImageClassification", 32)
register_simmim("ViTForMaskedImageModeling", "ViTForImageClassification", 16)
