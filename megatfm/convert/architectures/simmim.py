"""SimMIM (Xie et al. 2022): classes ForMaskedImageModeling, with the classifiers' backbones and a head for pixels."""

from dataclasses import replace

from megatfm.config import ModelConfig
from megatfm.config.heads import PixelsHeadConfig
from megatfm.convert.architecture import ARCHITECTURES, register_architecture
from megatfm.convert.architectures import swin as swin  # registers the classifiers
from megatfm.convert.architectures import vit as vit
from megatfm.convert.hf_config import Json, used
from megatfm.convert.weight_mapping import WeightMapping, add_leading_dims, map_name, map_tensor
from megatfm.errors import UsageError

HEAD = "pixels"


def get_pixel_head(config: ModelConfig) -> PixelsHeadConfig:
    """Return the section of the head. Raises UsageError for a model without it, or without a mask token."""
    head = config.extra_heads.get(HEAD)
    if not isinstance(head, PixelsHeadConfig) or not getattr(config.embedding, "mask_token", False):
        raise UsageError(f"without model.embedding.mask_token and model.extra_heads.{HEAD} this is no SimMIM")
    return head


def extract_backbone(config: ModelConfig) -> ModelConfig:
    """Return the model without head and mask token."""
    return config.with_changes({"extra_heads": {}, "embedding.mask_token": False})


def map_pixel_head(prefix: str) -> list[WeightMapping]:
    """Map the mask token [1, D] to [1, 1, D], and the linear layer to a convolution of 1 × 1."""
    return [
        add_leading_dims("encoder.embedding.mask_tokens.weight", f"{prefix}embeddings.mask_token"),
        map_tensor(
            f"{HEAD}.prediction.weight",
            "decoder.0.weight",
            lambda weight: weight[..., None, None],
            lambda weight: weight[..., 0, 0],
        ),
        map_name(f"{HEAD}.prediction.bias", "decoder.0.bias"),
    ]


def register_simmim(name: str, classifier: str, stride: int) -> None:
    """Register a class by that with a classifier. stride: `encoder_stride` that config.json does not give."""
    backbone = ARCHITECTURES.get(classifier)

    def read(hf_config: Json) -> ModelConfig:
        head = {"name": HEAD, "stride": hf_config["encoder_stride"]}
        changes = {"embedding.mask_token": True, "extra_heads": {HEAD: head}}
        return backbone.config_from_hf(hf_config).with_changes(changes)

    def write(config: ModelConfig) -> Json:
        encoder_stride = get_pixel_head(config).stride
        return {**backbone.config_to_hf(extract_backbone(config)), "encoder_stride": encoder_stride}

    def map_weights(config: ModelConfig) -> list[WeightMapping]:
        return [*backbone.map_weights(extract_backbone(config)), *map_pixel_head(backbone.base_model_prefix)]

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
