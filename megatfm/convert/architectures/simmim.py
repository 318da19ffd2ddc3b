"""SimMIM (Xie et al. 2022): classes ForMaskedImageModeling, with the classifiers' backbones and a head for pixels."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.config.model_parts import PixelsHeadConfig
from megatfm.convert.architecture import ARCHITECTURES, register_architecture
from megatfm.convert.architectures import swin as swin  # registers the classifiers
from megatfm.convert.architectures import vit as vit
from megatfm.convert.hf_config import Json, used
from megatfm.convert.weight_mapping import WeightMapping, rename
from megatfm.errors import UsageError

HEAD = "pixels"


def pixel_head(config: ModelConfig) -> PixelsHeadConfig:
    """The section of the head. Raises UsageError for a model without it, or without a mask token."""
    head = config.extra_heads.get(HEAD)
    if not isinstance(head, PixelsHeadConfig) or not getattr(config.embedding, "mask_token", False):
        raise UsageError(f"without model.embedding.mask_token and model.extra_heads.{HEAD} this is no SimMIM")
    return head


def backbone_of(config: ModelConfig) -> ModelConfig:
    """The model without head and mask token."""
    return config.with_changes({"extra_heads": {}, "embedding.mask_token": False})


def head_rules(prefix: str) -> list[WeightMapping]:
    """The mask token, [1, 1, D] in theirs, and the linear layer, a convolution of 1 × 1 in theirs."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][..., None, None]]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][..., 0, 0]]

    def with_batch(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][None]]

    def without_batch(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][0]]

    mask_token = ("encoder.embedding.mask_tokens.weight",), (f"{prefix}embeddings.mask_token",)
    return [
        WeightMapping(*mask_token, with_batch, without_batch),
        WeightMapping((f"{HEAD}.prediction.weight",), ("decoder.0.weight",), forth, back),
        rename(f"{HEAD}.prediction.bias", "decoder.0.bias"),
    ]


def register_simmim(name: str, classifier: str, stride: int) -> None:
    """Register a class by that with a classifier. stride: `encoder_stride` that config.json does not give."""
    backbone = ARCHITECTURES.get(classifier)

    def read(hf_config: Json) -> ModelConfig:
        head = {"name": HEAD, "stride": hf_config["encoder_stride"]}
        changes = {"embedding.mask_token": True, "extra_heads": {HEAD: head}}
        return backbone.config_from_hf(hf_config).with_changes(changes)

    def write(config: ModelConfig) -> Json:
        encoder_stride = pixel_head(config).stride
        return {**backbone.config_to_hf(backbone_of(config)), "encoder_stride": encoder_stride}

    def rules(config: ModelConfig) -> list[WeightMapping]:
        return [
            *backbone.weight_mappings(backbone_of(config)),
            *head_rules(backbone.base_model_prefix),
        ]

    architecture = replace(
        backbone,
        keys={**backbone.keys, "encoder_stride": used(stride)},
        config_from_hf=read,
        config_to_hf=write,
        weight_mappings=rules,
        fingerprint={**backbone.fingerprint, "embedding.mask_token": True},
    )
    register_architecture(name, architecture)


register_simmim("SwinForMaskedImageModeling", "SwinForImageClassification", 32)
register_simmim("Swinv2ForMaskedImageModeling", "Swinv2ForImageClassification", 32)
register_simmim("ViTForMaskedImageModeling", "ViTForImageClassification", 16)
