"""Small encoders of transformers, of text and of images, with options and inputs to compare them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatfm.config import ModelConfig
from tests.support.hf_folders import perturb_parameters
from tests.support.images import draw_pixels, make_batch
from tests.support.reference_gradients import perturb

ENCODER_TOKENS = torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))
SMALL_ENCODER: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
XLNET_OPTIONS: dict[str, Any] = {"vocab_size": 60, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40}
DEBERTA_OPTIONS = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c", "max_relative_positions": -1,
}  # fmt: skip
HF_ENCODERS: dict[str, dict[str, Any]] = {
    "BertForPreTraining": {},
    "BertForMaskedLM": {"hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-6},
    "RobertaForMaskedLM": {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.2},
    "AlbertForPreTraining": {"embedding_size": 10},
    "AlbertForMaskedLM": {"embedding_size": 10, "num_hidden_groups": 2},
    "DebertaForMaskedLM": DEBERTA_OPTIONS,
    "DebertaV2ForMaskedLM": {
        **DEBERTA_OPTIONS, "position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
    },
    "ElectraForPreTraining": {"embedding_size": 10},
    "ElectraForMaskedLM": {"embedding_size": 10},
    "ModernBertForMaskedLM": {"local_attention": 4, "num_hidden_layers": 4, "pad_token_id": 1},
    "XLNetLMHeadModel": {"mem_len": None, "dropout": 0.2},
}  # fmt: skip


def build_hf_encoder(name: str, **options: Any) -> PreTrainedModel:
    """One of HF_ENCODERS, perturbed."""
    kind = getattr(transformers, name)
    small = XLNET_OPTIONS if name.startswith("XLNet") else SMALL_ENCODER
    return perturb_parameters(kind(kind.config_class(**(small | HF_ENCODERS[name] | options))))


def get_vocabulary_logits(output: Any) -> torch.Tensor:
    """Logits over the vocabulary."""
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


SMALL_LONG_ENCODER = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
HF_LONG_ENCODERS: dict[str, dict[str, Any]] = {
    "BigBirdForPreTraining": {**SMALL_LONG_ENCODER, "block_size": 2, "num_random_blocks": 1},
    "BigBirdForMaskedLM": {**SMALL_LONG_ENCODER, "block_size": 2, "num_random_blocks": 1},
    "LongformerForMaskedLM": {**SMALL_LONG_ENCODER, "attention_window": 4, "type_vocab_size": 1},
}
LONG_TOKENS = torch.randint(7, 60, (2, 48), generator=torch.Generator().manual_seed(3))
"""Longer than what is seen whole, also with blocks or random blocks more than twice as large as above. Blocks of 2, 3
and 6 divide it: transformers pads the rest with a token that need not be there."""


def build_hf_long_encoder(name: str, **changes: Any) -> Any:
    """One of HF_LONG_ENCODERS, perturbed and without dropout."""
    kind = getattr(transformers, name)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    reference = kind(kind.config_class(**{**HF_LONG_ENCODERS[name], **dropped, **changes}))
    perturb(reference)
    return reference


def long_encoder_logits(expected: Any, seen_by_all: Sequence[int] = (0,)) -> torch.Tensor:
    """Logits of LONG_TOKENS with the pattern of training; seen_by_all: a Longformer's global tokens."""
    if type(expected).__name__.startswith("Longformer"):
        mask = torch.isin(torch.arange(LONG_TOKENS.shape[1]), torch.tensor(seen_by_all)).long()
        return expected.eval()(LONG_TOKENS, global_attention_mask=mask.expand(len(LONG_TOKENS), -1)).logits
    expected.train()  # in evaluation BigBird's random blocks are all the first one
    for module in expected.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    result = expected(LONG_TOKENS)
    return result.prediction_logits if hasattr(result, "prediction_logits") else result.logits


VOCABULARY, LENGTHS = 47, (13, 9, 11)
"""Ids of the small vocabulary, and tokens of the rows of a batch."""
PAD = 1
"""Never among the tokens that count: transformers gives a padding token's embedding no gradient."""
ENCODER_OPTIONS = {
    "family": "encoder", "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "attention.n_heads": 4,
    "ffn.d_ff": 40, "norm.name": "layer_norm", "norm.eps": 1e-7, "norm.placement": "post", "embedding.norm": True,
    "ffn.activation": "gelu", "ffn.bias": True, "embedding.n_segments": 2, "lm_head.name": "transform",
    "lm_head.bias": True,
}  # fmt: skip
LEARNED_POSITIONS = {"attention.bias": True, "position.name": "learned", "position.max_positions": 15}
"""BERT's attention and positions; all but DeBERTa have them."""
BERT_ENCODER = ENCODER_OPTIONS | LEARNED_POSITIONS
DEBERTA = {"attention.name": "deberta", "position.name": "deberta"}
DEBERTA_V3 = {
    **DEBERTA, "attention.name": "deberta_v2", "position.name": "deberta_v2", "position.buckets": 6,
    "position.max_distance": 15,
}  # fmt: skip
MODERNBERT = {
    "attention.name": "gqa", "norm.placement": "pre", "norm.bias": False, "norm.first_attention_norm": False,
    "ffn.bias": False,
    "ffn.activation": "geglu", "embedding.n_segments": 0, "lm_head.transform_bias": False,
    "layer_types": ["global", "local", "local"],
    "layer_type.global": {"position.theta": 500.0},
    "layer_type.local": {"position.theta": 20.0, "attention.pattern": {"name": "window", "width": 4}},
}  # fmt: skip


def draw_tokens(high: int, *shape: int, seed: int, low: int = 0) -> Tensor:
    """Random integers from low up to below high."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(config: ModelConfig) -> dict[str, Tensor]:
    """Rows of odd lengths, padded to the longest, as transformers takes them."""
    longest = max(LENGTHS)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    tokens = draw_tokens(VOCABULARY, len(LENGTHS), longest, seed=0, low=PAD + 1).where(mask == 1, PAD)
    batch = {"input_ids": tokens, "attention_mask": mask}
    if config.embedding.n_segments:
        batch["token_type_ids"] = draw_tokens(config.embedding.n_segments, *tokens.shape, seed=1)
    if config.family == "discriminator":
        batch["labels"] = draw_tokens(2, *tokens.shape, seed=2)
        return batch
    chosen = (draw_tokens(3, *tokens.shape, seed=2) == 0) & (mask == 1)
    batch["labels"] = draw_tokens(VOCABULARY, *tokens.shape, seed=3).where(chosen, -100)
    return batch


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


def build_hf_model(
    config: ModelConfig, size: int | tuple[int, int], kind: str = "ForImageClassification", **others: Any
) -> Any:
    """A model of transformers in float64 for images of one size, every parameter perturbed."""
    assert config.stages is not None
    pattern: Any = config.attention.pattern
    is_v2 = config.position.name == "log_relative_2d"
    name, windows = "Swinv2" if is_v2 else "Swin", getattr(config.position, "pretrained_windows", None)
    more = others | ({"pretrained_window_sizes": windows} if windows else {})
    options = getattr(transformers, f"{name}Config")(
        image_size=size, patch_size=4, embed_dim=config.d_model, depths=list(config.stages.n_layers),
        num_heads=list(config.stages.n_heads), window_size=pattern.window, num_labels=5,
        mlp_ratio=config.ffn.d_ff / config.d_model, attn_implementation="eager" if is_v2 else "sdpa", **more,
    )  # fmt: skip
    model = getattr(transformers, f"{name}{kind}")(options).double().eval()
    generator = torch.Generator().manual_seed(0)
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
    names = {name: get_hf_name(name, actual.config.stages.n_layers, v2=v2) for name, _ in actual.named_parameters()}
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
