"""Models of images against transformers, from the same perturbed weights: outputs and every gradient, at odd sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.clip import modeling_clip
from transformers.models.deit import modeling_deit
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

from megatfm.config import ModelConfig
from tests.support.images import draw_pixels, make_batch
from tests.support.reference_gradients import LargestErrors, assert_documented, build_pair, dtype_fixture

MODULES = (
    modeling_vit, modeling_deit, modeling_dinov2, modeling_dinov2_with_registers, modeling_dinov3_vit,
    modeling_siglip, modeling_clip,
)  # fmt: skip
SIDE, CLASSES = 4, 5
COMMON: dict[str, Any] = {
    "family": "encoder", "d_model": 24, "n_layers": 2, "attention.n_heads": 3, "attention.bias": True, "ffn.d_ff": 48,
    "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "norm.eps": 1e-6,
    "embedding.name": "patches", "embedding.patch_size": SIDE, "embedding.mean": (0.5, 0.4, 0.3),
    "embedding.std": (0.2, 0.3, 0.4), "position.name": "learned_2d", "position.grid": (4, 4), "lm_head.name": "none",
}  # fmt: skip
CLASSIFIER = {"extra_heads.classifier.n_classes": CLASSES}
DINO = {**CLASSIFIER, "extra_heads.classifier.pool": "class_mean", "layer_scale": 1.0}
MODELS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": CLASSIFIER,
    "DeiTForImageClassification": {**CLASSIFIER, "embedding.n_class_tokens": 2},
    "Dinov2ForImageClassification": DINO,
    "Dinov2WithRegistersForImageClassification": {
        **DINO, "embedding.n_register_tokens": 3, "position.antialias": True,
    },
    "SiglipVisionModel": {"embedding.n_class_tokens": 0, "ffn.activation": "gelu_tanh"},
    "DINOv3ViTModel": {"embedding.n_register_tokens": 2, "position": {"name": "rope_2d", "normalized": True},
                       "attention.key_bias": False, "ffn.activation": "swiglu", "layer_scale": 1.0},
    "CLIPVisionModel": {"embedding.norm": True, "embedding.bias": False, "ffn.activation": "quick_gelu"},
}  # fmt: skip
PRESETS = [f"vit-{size}" for size in ("ti16", "s16", "s32", "b16", "b32", "l16", "l32", "h14")]
"""The row of docs/guide/models.md whose figures are measured here."""
SIZES = {"as trained": (16, 16), "wide, as many patches": (8, 32), "odd": (37, 53)}


dtype = dtype_fixture(*MODULES)


def normalised(images: list[Tensor], config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Pixel values as transformers takes them, [n, C, H, W]."""
    mean, std = (
        torch.tensor(COMMON[f"embedding.{key}"], dtype=torch.float64)[:, None, None] for key in ("mean", "std")
    )
    return torch.stack([(image.double() / 255 - mean) / std for image in images]).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_image_models_equal_transformers(name: str, size: str, dtype: torch.dtype) -> None:
    """A classifier's logits and loss, or a tower's last vectors; then every gradient."""
    common = {key: value for key, value in COMMON.items() if "position" not in MODELS[name] or "position" not in key}
    config, figures = ModelConfig.from_dotted(common | MODELS[name]), LargestErrors()
    pair = build_pair(config, dtype, among=[name])
    images = [draw_pixels(*SIZES[size], seed=seed) for seed in range(3)]
    labels, n_special = [1, 4, 0], config.embedding.n_special_tokens
    batch = make_batch(images, SIDE, n_special, [[0], [1], [2]], labels=labels if config.extra_heads else None)
    options = {} if name.lower().startswith("dino") else {"interpolate_pos_encoding": True}
    expected = pair.reference(pixel_values=normalised(images, config, dtype), **options)
    if config.extra_heads:
        loss = pair.model(**batch).losses["classifier"] / 3
        del batch["labels"]
        figures.compare_logits(pair.model(**batch).predictions["classifier"], expected.logits, dtype)
        expected_loss = torch.nn.functional.cross_entropy(expected.logits, torch.tensor(labels))
        figures.compare_logits(loss, expected_loss, dtype)
    else:
        hidden = pair.model(**batch).hidden
        last = expected.last_hidden_state
        if name == "CLIPVisionModel":
            hidden, last = hidden[:, 0], expected.pooler_output
        figures.compare_logits(hidden, last, dtype)
        weights = torch.randn(last.shape, generator=torch.Generator().manual_seed(9), dtype=dtype)
        loss, expected_loss = (hidden * weights).sum(), (last * weights).sum()
    loss.backward()
    expected_loss.backward()
    figures.compare_gradients(pair, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 20
    for preset in PRESETS if name == "ViTForImageClassification" else ():
        assert_documented(preset, dtype, figures)
