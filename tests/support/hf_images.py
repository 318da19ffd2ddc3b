"""Vision models of transformers as oracles: vision transformers, Swin and Swin-V2."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatfm.config import ModelConfig
from megatfm.models import build
from tests.support.hf_folders import perturb_parameters
from tests.support.images import draw_pixels, make_batch
from tests.support.models import SWIN_MODEL

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


def build_hf_image_model(name: str) -> PreTrainedModel:
    """One of HF_IMAGES, perturbed."""
    kind = getattr(transformers, name)
    return perturb_parameters(kind(kind.config_class(**HF_IMAGES[name])))


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
    image = draw_pixels(side, side, seed=1)
    if not is_megatfm:
        mean, std = (torch.tensor(values)[:, None, None] for values in PIXELS.values())
        output = model(pixel_values=((image.float() / 255 - mean) / std)[None])
        if hasattr(output, "logits"):
            return output.logits
        hidden: Tensor = output.last_hidden_state
        return model.post_layernorm(hidden) if name == "CLIPVisionModel" else hidden
    embedding = model.config.embedding
    output = model(**make_batch([image], embedding.patch_size, embedding.n_special_tokens, [[0]]))
    return output.predictions["classifier"] if "Classification" in name else output.hidden


MEAN, STD = (
    torch.tensor(values, dtype=torch.float64)[:, None, None]
    for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)

PARTS = (
    ("attn.w([qkvo])", r"attention.\1_proj"),
    ("attn.position.weight", "attention.relative_position_bias.relative_position_bias_table"),
    ("attn_residual.norm", "layernorm_before"),
    ("ffn_residual.norm", "layernorm_after"),
    ("ffn.w_up", "mlp.fc1"),
    ("ffn.w_down", "mlp.fc2"),
)
PARTS_V2 = (
    ("attn.wq", "attention.self.query"),
    ("attn.wk", "attention.self.key"),
    ("attn.wv", "attention.self.value"),
    ("attn.wo", "attention.output.dense"),
    ("attn.cosine.weight", "attention.self.logit_scale"),
    ("attn.position.hidden", "attention.self.continuous_position_bias_mlp.0"),
    ("attn.position.out", "attention.self.continuous_position_bias_mlp.2"),
    ("attn_residual.norm", "layernorm_before"),
    ("ffn_residual.norm", "layernorm_after"),
    ("ffn.w_up", "intermediate.dense"),
    ("ffn.w_down", "output.dense"),
)


def build_model(options: dict[str, Any] | None = None) -> nn.Module:
    """Our model in float64, its parameters not yet set."""
    return build(ModelConfig.from_dotted(**(SWIN_MODEL | (options or {})))).double().eval()


def build_hf_model(
    config: ModelConfig, size: int | tuple[int, int], seed: int = 0, kind: str = "ForImageClassification", **others: Any
) -> Any:
    """A model of transformers in float64 for images of one size, every parameter perturbed."""
    assert config.stages is not None
    pattern: Any = config.attention.pattern
    is_v2 = config.position.name == "log_relative_2d"
    name, windows = "Swinv2" if is_v2 else "Swin", getattr(config.position, "pretrained_windows", None)
    more = others | ({"pretrained_window_sizes": windows} if windows else {})
    options = getattr(transformers, f"{name}Config")(
        image_size=size, patch_size=4, embed_dim=config.d_model, depths=list(config.stages.layers),
        num_heads=list(config.stages.heads), window_size=pattern.window, num_labels=5,
        mlp_ratio=config.ffn.d_ff / config.d_model, attn_implementation="eager" if is_v2 else "sdpa", **more,
    )  # fmt: skip
    model = getattr(transformers, f"{name}{kind}")(options).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 1 + 0.3 * noise if re.search(r"norm\w*\.weight", name) else 0.3 * noise
    return model


def get_hf_name(actual: str, layers: tuple[int, ...], *, v2: bool) -> str:
    """The name in transformers' model of a parameter of ours."""
    if actual.startswith("classifier."):
        return actual.replace("classifier.classifier", "classifier")
    if actual.startswith("pixels."):
        return actual.replace("pixels.prediction", "decoder.0")
    name = actual.replace("encoder.embedding.mask_tokens.weight", "embeddings.mask_token")
    name = name.replace("encoder.embedding.patches.projection", "embeddings.patch_embeddings.projection")
    name = name.replace("encoder.embedding.norm", "embeddings.norm").replace("encoder.norm", "layernorm")
    name = re.sub(r"encoder\.merges\.(\d+)", r"encoder.layers.\1.downsample", name)
    if match := re.match(r"encoder\.layers\.(\d+)\.(?!downsample)(.*)", name):
        stage, block = 0, int(match[1])
        while block >= layers[stage]:
            stage, block = stage + 1, block - layers[stage]
        part = match[2]
        for pattern, replacement in PARTS_V2 if v2 else PARTS:
            part = re.sub(f"^{pattern}", replacement, part)
        name = f"encoder.layers.{stage}.blocks.{block}.{part}"
    name = name.replace("norm_out", "norm")
    return f"{'swinv2' if v2 else 'swin'}.{name}"


def copy_hf_weights(actual: Any, expected: nn.Module) -> dict[str, str]:
    """Set ours to theirs; returns names of ours → theirs. Every parameter of both must have its like."""
    named, v2 = dict(expected.named_parameters()), actual.config.position.name == "log_relative_2d"
    names = {name: get_hf_name(name, actual.config.stages.layers, v2=v2) for name, _ in actual.named_parameters()}
    assert sorted(names.values()) == sorted(named)
    for name, parameter in actual.named_parameters():
        parameter.data = named[names[name]].data.reshape(parameter.shape).clone()
    return names


def draw_images(size: tuple[int, int], count: int) -> tuple[list[Tensor], Tensor]:
    """Raw images for ours, and the normalised ones [N, C, H, W] in float64 for theirs."""
    images = [draw_pixels(*size, seed=number) for number in range(count)]
    return images, torch.stack([(image.double() / 255 - MEAN) / STD for image in images])


def make_image_batch(images: list[Tensor], rows: list[list[int]], labels: list[int]) -> dict[str, Tensor]:
    """Ours: rows of images' patches of 4 pixels."""
    return make_batch(images, 4, 0, rows, labels=labels)
