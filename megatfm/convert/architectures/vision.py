"""Shared parts of vision transformers: keys of config.json, and mappings of patches, positions and special tokens.

Mean and standard deviation of pixels are in preprocessor_config.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatfm.config import (
    ClassifierHeadConfig,
    LearnedPosition2dConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    Rope2dConfig,
    require_variant,
)
from megatfm.convert.hf_config import Json, Key, ignored, used
from megatfm.convert.hf_values import activation_from_hf, activation_to_hf, read_mapped, write_mapped
from megatfm.convert.weight_mapping import WeightMapping, map_layers, map_name, map_tensor, rename_linear
from megatfm.errors import UsageError

HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation of pixels of ViT and SigLIP."""

DEFAULT_IMAGE_SIZE = 224
"""image_size that is written if positions fit any size."""

VISION_KEYS: dict[str, Key] = {
    **used(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, hidden_act="gelu", layer_norm_eps=1e-12,
        image_size=(224, int, list), patch_size=(16, int, list), num_channels=3, image_mean=(None, list, None),
        image_std=(None, list, None), id2label=(None, dict, None), num_labels=(None, int, None),
    ),
    **ignored("label2id"),
}  # fmt: skip
"""Keys of all vision transformers; image_mean and image_std are read from preprocessor_config.json."""
TRAINED_KEYS = used(initializer_range=0.02, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
VISION_MAPPING = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "attention.n_heads",
    "layer_norm_eps": "norm.eps",
    "num_channels": "embedding.channels",
}
TRAINED_MAPPING = {
    "initializer_range": "init.std",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention.dropout",
}


def read_side(hf_config: Json, key: str) -> int:
    """Return a side in pixels. Raises UsageError if height and width differ."""
    sides = hf_config[key] if isinstance(hf_config[key], list) else [hf_config[key]]
    if len(set(sides)) != 1:
        raise UsageError(f"config.json: {key} = {hf_config[key]}: megatfm reads square images and patches here")
    return int(sides[0])


def read_vision(hf_config: Json, mean: Sequence[float], std: Sequence[float], **options: Any) -> ModelConfig:
    """Read a pre-norm encoder of patches.

    mean, std: of pixels, if config.json has none. options: megatfm's keys that differ. Raises UsageError for
    unsupported features.
    """
    position: Json = {"position.name": "learned_2d"}
    if "position.name" not in options:
        side = read_side(hf_config, "image_size") // read_side(hf_config, "patch_size")
        position["position.grid"] = (side, side)
    trained = read_mapped(hf_config, {k: v for k, v in TRAINED_MAPPING.items() if k in hf_config})
    common = {
        **read_mapped(hf_config, VISION_MAPPING),
        **trained,
        "family": "encoder",
        "norm.name": "layer_norm",
        "ffn.activation": activation_from_hf(hf_config["hidden_act"]),
        "ffn.bias": True,
        "attention.bias": True,
        "embedding.name": "patches",
        "embedding.patch_size": read_side(hf_config, "patch_size"),
        "embedding.mean": tuple(hf_config["image_mean"] or mean),
        "embedding.std": tuple(hf_config["image_std"] or std),
        "lm_head.name": "none",
        "init.name": "bert",
    }
    return ModelConfig.from_dotted(common | position | options)


def write_vision(config: ModelConfig, mapping: dict[str, str]) -> Json:
    """Write config.json, the inverse of `read_vision`."""
    embedding = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
    side = DEFAULT_IMAGE_SIZE // embedding.patch_size
    if not isinstance(config.position, Rope2dConfig):
        position = require_variant(config.position, LearnedPosition2dConfig, "model.position")
        if position.grid[0] != position.grid[1]:
            raise UsageError(f"model.position.grid = {list(position.grid)}: transformers has square tables alone")
        side = position.grid[0]
    return {
        **write_mapped(config, VISION_MAPPING | mapping),
        "hidden_act": activation_to_hf(config.ffn.activation),
        "image_size": side * embedding.patch_size,
        "patch_size": embedding.patch_size,
        "image_mean": list(embedding.mean),
        "image_std": list(embedding.std),
    }


def read_image_labels(hf_config: Json, pool: str) -> Json:
    """Return megatfm's keys of the classifier; transformers' default is two classes. Raises UsageError for
    contradictory counts."""
    names, count = hf_config["id2label"], hf_config["num_labels"]
    if names and count is not None and count != len(names):
        raise UsageError(f"config.json: num_labels = {count}, but id2label has {len(names)}: take one of them out")
    n_classes = len(names) if names else count or 2
    return {"extra_heads.classifier.n_classes": n_classes, "extra_heads.classifier.pool": pool}


def write_labels(config: ModelConfig) -> Json:
    """Return the keys of the classifier, with transformers' default names. Raises UsageError without a classifier."""
    head = config.extra_heads.get("classifier")
    if not isinstance(head, ClassifierHeadConfig):
        raise UsageError("without model.extra_heads.classifier this is a backbone alone")
    names = {str(i): f"LABEL_{i}" for i in range(head.n_classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


# Tensors


@dataclass(frozen=True)
class VisionNames:
    """Names of a class in transformers. special: (name, n) of special tokens [1, n, D]. block: mappings of one
    block."""

    prefix: str
    layers: str
    block: Sequence[WeightMapping]
    special: Sequence[tuple[str, int]] = (("embeddings.cls_token", 1),)
    patches: str = "embeddings.patch_embeddings.projection"
    positions: str = "embeddings.position_embeddings"
    final_norm: str = "layernorm"
    head: Sequence[WeightMapping] = field(default_factory=list)
    unused: str = ""
    """A token that the class has but never uses, written as zeros."""
    unused_dims: tuple[int, ...] = (1,)
    """Its dims before the width."""


def map_special_tokens(names: VisionNames) -> WeightMapping:
    """Map megatfm's table of special tokens to separate tensors."""
    sizes = [size for _, size in names.special]
    hf_names = tuple(f"{names.prefix}{name}" for name, _ in names.special)
    unused = (f"{names.prefix}{names.unused}",) if names.unused else ()

    def to_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        zeros = [tensors[0].new_zeros(*names.unused_dims, tensors[0].shape[1])] * len(unused)
        return [*(part[None] for part in tensors[0].split(sizes)), *zeros]

    def from_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([tensor[0] for tensor in tensors[: len(sizes)]])]

    return WeightMapping(("encoder.embedding.patches.special",), (*hf_names, *unused), to_hf, from_hf)


def map_position_table(hf_name: str, n_class: int, *, batched: bool) -> WeightMapping:
    """Map megatfm's positions of class tokens and patches to one table. batched: with a first dim of 1."""
    megatfm_names = ["encoder.embedding.positions.special"] * bool(n_class) + ["encoder.embedding.positions.weight"]

    def to_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        table = torch.cat(list(tensors))
        return [table[None] if batched else table]

    def from_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        table = tensors[0][0] if batched else tensors[0]
        return [table[:n_class], table[n_class:]] if n_class else [table]

    return WeightMapping(tuple(megatfm_names), (hf_name,), to_hf, from_hf)


def map_convolution(hf_name: str, embedding: PatchEmbeddingConfig) -> list[WeightMapping]:
    """Map the projection of patches to a convolution's weight [D, channels, side, side]."""
    megatfm_name, side = "encoder.embedding.patches.projection", embedding.patch_size
    weight = map_tensor(
        f"{megatfm_name}.weight",
        f"{hf_name}.weight",
        lambda weight: weight.unflatten(1, (embedding.channels, side, side)),
        lambda weight: weight.flatten(1),
    )
    return [weight, *([map_name(f"{megatfm_name}.bias", f"{hf_name}.bias")] if embedding.bias else [])]


def map_vision(names: VisionNames, config: ModelConfig) -> list[WeightMapping]:
    """Map a vision transformer to the names of one class."""
    embedding = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
    if registers := embedding.n_register_tokens:
        names = replace(names, special=[*names.special, ("embeddings.register_tokens", registers)])
    prefix = names.prefix
    positions = f"{prefix}{names.positions}"
    table = map_position_table(positions, embedding.n_class_tokens, batched=not positions.endswith(".weight"))
    return [
        *([map_special_tokens(names)] if names.special else []),
        *map_convolution(f"{prefix}{names.patches}", embedding),
        *([] if isinstance(config.position, Rope2dConfig) else [table]),
        *map_layers(config.n_layers, "encoder.layers.", f"{prefix}{names.layers}", names.block),
        *rename_linear("encoder.norm", f"{prefix}{names.final_norm}", bias=True),
        *(names.head if config.extra_heads else []),
    ]


MLP = [*rename_linear("ffn.w_up", "mlp.fc1", bias=True), *rename_linear("ffn.w_down", "mlp.fc2", bias=True)]
"""Mappings of a feed-forward network under the name `mlp`."""
