"""Small vision transformers of transformers, and their logits for one image beside those of a model of ours."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.hf_folders import perturbed
from tests.support.images import pixels, to_batch

SMALL_VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "id2label": {0: "cat", 1: "dog", 2: "ant"}, "label2id": {"cat": 0, "dog": 1, "ant": 2},
}  # fmt: skip
SMALL_DINO = {key: value for key, value in SMALL_VIT.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
SMALL_SWIN = {
    "image_size": 36, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.5, "drop_path_rate": 0.3, "id2label": {0: "cat", 1: "dog", 2: "ant"},
    "label2id": {"cat": 0, "dog": 1, "ant": 2},
}  # fmt: skip
HF_IMAGES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": SMALL_VIT | {"layer_norm_eps": 1e-6, "hidden_dropout_prob": 0.1},
    "DeiTForImageClassification": SMALL_VIT,
    "Dinov2ForImageClassification": SMALL_DINO | {"layerscale_value": 1e-5, "use_mask_token": False},
    "Dinov2WithRegistersForImageClassification": SMALL_DINO | {"num_register_tokens": 2},
    "DINOv3ViTModel": SMALL_VIT | {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"},
    "SiglipVisionModel": SMALL_VIT | {"vision_use_head": False},
    "CLIPVisionModel": SMALL_VIT,
    "SwinForImageClassification": SMALL_SWIN,
    "Swinv2ForImageClassification": SMALL_SWIN | {"pretrained_window_sizes": [3, 2]},
}
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
"""Mean and deviation of preprocessor_config.json."""


def hf_image_model(name: str) -> PreTrainedModel:
    """One of HF_IMAGES, perturbed."""
    kind = getattr(transformers, name)
    return perturbed(kind(kind.config_class(**HF_IMAGES[name])))


def write_pixels(folder: Path) -> None:
    """Put PIXELS beside a model's files."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))


def image_logits(model: Any, size: Any, *, is_megatfm: bool, name: str) -> Tensor:
    """Logits [1, classes] of one image, or last vectors [1, T, D] of a tower.

    size: config.json's image_size, which a ViT of transformers wants; a Swin takes any. name: one of HF_IMAGES.
    """
    side = HF_IMAGES[name]["image_size"]
    if isinstance(size, int) and size > 0 and not name.startswith("Swin"):
        side = size
    image = pixels(side, side, seed=1)
    if not is_megatfm:
        mean, std = (torch.tensor(values)[:, None, None] for values in PIXELS.values())
        output = model(pixel_values=((image.float() / 255 - mean) / std)[None])
        if hasattr(output, "logits"):
            return output.logits
        hidden: Tensor = output.last_hidden_state
        return model.post_layernorm(hidden) if name == "CLIPVisionModel" else hidden
    embedding = model.config.embedding
    output = model(**to_batch([image], embedding.patch_size, embedding.n_special_tokens, [[0]]))
    return output.predictions["classifier"] if "Classification" in name else output.hidden
