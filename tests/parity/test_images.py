"""Models of images, CLIP, SigLIP and LLaVA against transformers, from the same perturbed weights: every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.clip import modeling_clip
from transformers.models.deit import modeling_deit
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

from megatfm.config import ModelConfig
from tests.support.images import draw_pixels, make_batch
from tests.support.reference_gradients import LargestErrors, assert_documented, build_pair, dtype_fixture

MODULES = (
    modeling_vit, modeling_deit, modeling_dinov2, modeling_dinov2_with_registers, modeling_dinov3_vit,
    modeling_siglip, modeling_clip, modeling_llama, modeling_llava,
)  # fmt: skip
SIDE, CLASSES = 4, 5
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
COMMON: dict[str, Any] = {
    "family": "encoder", "d_model": 24, "n_layers": 2, "attention.n_heads": 3, "attention.bias": True, "ffn.d_ff": 48,
    "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "norm.eps": 1e-6,
    "embedding.name": "patches", "embedding.patch_size": SIDE, "embedding.mean": MEAN,
    "embedding.std": STD, "position.name": "learned_2d", "position.grid": (4, 4), "lm_head.name": "none",
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
    "SiglipForImageClassification": {
        **CLASSIFIER, "extra_heads.classifier.pool": "mean", "embedding.n_class_tokens": 0,
    },
    "DINOv3ViTModel": {"embedding.n_register_tokens": 2, "position": {"name": "rope_2d", "normalized": True},
                       "attention.key_bias": False, "ffn.activation": "swiglu", "layer_scale": 1.0},
    "CLIPVisionModel": {"embedding.norm": True, "embedding.bias": False, "ffn.activation": "quick_gelu"},
}  # fmt: skip
PRESETS = [f"vit-{size}" for size in ("ti16", "s16", "s32", "b16", "b32", "l16", "l32", "h14")]
"""The row of docs/guide/models.md whose figures are measured here."""
SIZES = {"as trained": (16, 16), "wide, as many patches": (8, 32), "odd": (37, 53)}


dtype = dtype_fixture(*MODULES)


def normalise(images: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Pixel values as transformers takes them, [n, C, H, W]."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
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
    expected = pair.reference(pixel_values=normalise(images, dtype), **options)
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


EOS, POSITIONS = 49, 7
TOWER_OPTIONS: dict[str, Any] = {
    "family": "two_towers", "vocab_size": 50, "d_model": 24, "n_layers": 2, "attention.n_heads": 3,
    "attention.bias": True, "ffn.d_ff": 48, "ffn.bias": True, "norm.name": "layer_norm", "embedding.name": "patches",
    "embedding.patch_size": SIDE, "embedding.mean": MEAN, "embedding.std": STD, "position.name": "learned_2d",
    "position.grid": (4, 4), "lm_head.name": "none",
}  # fmt: skip
TEXT = {"d_model": 20, "n_layers": 3, "n_heads": 4, "d_ff": 28, "max_positions": POSITIONS}
TOWERS: dict[str, dict[str, Any]] = {
    "CLIPModel": {
        "embedding.norm": True, "embedding.bias": False, "ffn.activation": "quick_gelu", "text_tower": TEXT,
        "contrastive": {"width": 10},
    },
    "SiglipModel": {
        "embedding.n_class_tokens": 0, "ffn.activation": "gelu_tanh", "text_tower": {**TEXT, "causal": False},
        "contrastive": {"loss": "sigmoid", "width": 24, "image_pool": "attention", "project_image": False,
                        "projection_bias": True},
    },
}  # fmt: skip
TOWER_PRESETS = {"CLIPModel": ["clip-b32", "clip-b16", "clip-l14"], "SiglipModel": ["siglip-b16"]}
TOWER_IMAGE_SIZES = {"as trained": (16, 16), "odd": (37, 53)}
LENGTHS = [4, 7, 2, 5]


def captions(*, padded: bool) -> tuple[list[Tensor], Tensor]:
    """Random captions with an end token, and the same filled up with it as one array."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.cat([torch.randint(EOS, (n - 1,), generator=generator), torch.tensor([EOS])]) for n in LENGTHS]
    table = torch.stack([torch.nn.functional.pad(text, (0, POSITIONS - len(text)), value=EOS) for text in texts])
    return (list(table) if padded else texts), table


def text_rows(texts: list[Tensor]) -> dict[str, Tensor]:
    """Two captions a row."""
    rows = [torch.cat(texts[at : at + 2]) for at in range(0, len(texts), 2)]
    documents = [
        torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts[at : at + 2])])
        for at in range(0, len(texts), 2)
    ]
    positions = [torch.cat([torch.arange(len(text)) for text in texts[at : at + 2]]) for at in (0, 2)]

    def stacked(parts: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    return {
        "tokens": stacked(rows, 0), "positions": stacked(positions, 0), "documents": stacked(documents, -1)
    }  # fmt: skip


@pytest.mark.parametrize("size", TOWER_IMAGE_SIZES)
@pytest.mark.parametrize("name", TOWERS)
def test_both_towers_equal_transformers(name: str, size: str, dtype: torch.dtype) -> None:
    config, figures = ModelConfig.from_dotted(TOWER_OPTIONS | TOWERS[name]), LargestErrors()
    both = build_pair(config, dtype, among=[name])
    images = [draw_pixels(*TOWER_IMAGE_SIZES[size], seed=seed) for seed in range(len(LENGTHS))]
    n_special = config.embedding.n_special_tokens  # type: ignore[union-attr]
    of_images = make_batch(images, SIDE, n_special, [[0, 1], [2, 3]])
    texts, table = captions(padded=name == "SiglipModel")
    batch = {f"encoder_{field}": values for field, values in of_images.items()} | text_rows(texts)
    if name == "CLIPModel":
        both.reference.text_model.eos_token_id = EOS
    expected = both.reference(
        input_ids=table, pixel_values=normalise(images, dtype), interpolate_pos_encoding=True, return_loss=True
    )
    features = both.model(**batch).predictions
    logits = features["scale"] * features["images"] @ features["texts"].T + features.get("bias", 0.0)
    figures.compare_logits(logits, expected.logits_per_image, dtype)
    loss = both.model.compare(features)["contrastive"] / len(images)
    figures.compare_losses(loss, expected.loss, both, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 60
    for preset in TOWER_PRESETS[name]:
        assert_documented(preset, dtype, figures)


IMAGE_TOKEN, GRID = 55, 3
LLAVA: dict[str, Any] = {
    "family": "vision_language",
    "vocab_size": 60,
    "d_model": 32,
    "n_layers": 2,
    "attention.n_heads": 4,
    "attention.n_kv_heads": 2,
    "ffn.d_ff": 48,
    "vision_tower": {
        "d_model": 24, "n_layers": 3, "n_heads": 3, "d_ff": 36, "grid": (GRID, GRID),
        "embedding": {"name": "patches", "patch_size": SIDE, "bias": False, "norm": True, "mean": MEAN, "std": STD},
    },
    "connector": {"image_token_id": IMAGE_TOKEN},
}  # fmt: skip
SIGLIP: dict[str, Any] = LLAVA | {
    "vision_tower": LLAVA["vision_tower"]
    | {
        "activation": "gelu_tanh", "norm_eps": 1e-6,
        "embedding": {"name": "patches", "patch_size": SIDE, "n_class_tokens": 0, "mean": MEAN, "std": STD},
    }
}  # fmt: skip
ENCODERS = {"clip": ModelConfig.from_dotted(LLAVA), "siglip": ModelConfig.from_dotted(SIGLIP)}
N_PATCHES = GRID**2
UNUSED = [f"model.vision_tower.post_layernorm.{part}" for part in ("weight", "bias")]
"""The norm of the vector that stands for an image: CLIP's class token, SigLIP's pool."""


def texts_with_images() -> list[Tensor]:
    """Texts with the image first, in the middle, and last."""
    generator = torch.Generator().manual_seed(3)
    image = torch.full((N_PATCHES,), IMAGE_TOKEN)
    parts = [(0, 5), (4, 3), (6, 1)]
    return [
        torch.cat([torch.randint(IMAGE_TOKEN, (before,), generator=generator), image,
                   torch.randint(IMAGE_TOKEN, (after,), generator=generator)])
        for before, after in parts
    ]  # fmt: skip


def text_targets(tokens: Tensor) -> Tensor:
    """The next token, where it is text."""
    following = torch.cat([tokens[1:], torch.tensor([-100])])
    return torch.where(following == IMAGE_TOKEN, -100, following)


def packed(images: list[Tensor], rows: list[list[int]], n_special: int = 1) -> dict[str, Tensor]:
    """A batch whose rows hold the samples of these numbers, on both sides."""
    batch = {f"encoder_{field}": values for field, values in make_batch(images, SIDE, n_special, rows).items()}
    all_tokens = texts_with_images()
    length = max(sum(len(all_tokens[number]) for number in row) for row in rows) + 2
    batch |= {"tokens": torch.zeros(len(rows), length, dtype=torch.int64)}
    batch |= {"targets": torch.full((len(rows), length), -100), "documents": torch.full((len(rows), length), -1)}
    batch["positions"] = torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        begin = 0
        for document, number in enumerate(row):
            tokens = all_tokens[number]
            place = slice(begin, begin + len(tokens))
            batch["tokens"][index, place], batch["targets"][index, place] = tokens, text_targets(tokens)
            batch["positions"][index, place] = torch.arange(len(tokens))
            batch["documents"][index, place] = document
            begin += len(tokens)
    return batch


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("rows", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0, 1]]], ids=str)
def test_logits_and_gradients(rows: list[list[int]], encoder: str, dtype: torch.dtype) -> None:
    config, figures = ENCODERS[encoder], LargestErrors()
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    images = [draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(3)]
    batch, losses = packed(images, rows, n_special=int(encoder == "clip")), []
    flat = batch["documents"].flatten() >= 0
    targets = batch.pop("targets")
    logits = pair.model(**batch).logits.flatten(0, 1)[flat]
    begin = 0
    for number in (number for row in rows for number in row):
        tokens = texts_with_images()[number]
        expected = pair.reference(input_ids=tokens[None], pixel_values=normalise([images[number]], dtype))
        figures.compare_logits(logits[begin : begin + len(tokens)], expected.logits[0], dtype)
        losses.append(torch.nn.functional.cross_entropy(expected.logits[0], text_targets(tokens), reduction="sum"))
        begin += len(tokens)
    loss = pair.model(**batch, targets=targets).losses["causal"]
    figures.compare_losses(loss, torch.stack(losses).sum(), pair, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 50
    assert_documented("llava-1.5-7b", dtype, figures)


def test_a_text_of_two_images(dtype: torch.dtype) -> None:
    """Images don't see one another, and the text sees both."""
    config, figures = ENCODERS["clip"], LargestErrors()
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    images = [draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(2)]
    image = [IMAGE_TOKEN] * N_PATCHES
    tokens = torch.tensor([3, *image, 4, 5, *image, 6])
    side = {f"encoder_{field}": values for field, values in make_batch(images, SIDE, 1, [[0, 1]]).items()}
    expected = pair.reference(input_ids=tokens[None], pixel_values=normalise(images, dtype)).logits
    figures.compare_logits(pair.model(tokens=tokens[None], **side).logits, expected, dtype)
    targets = text_targets(tokens)
    pair.model(tokens=tokens[None], **side, targets=targets[None]).losses["causal"].backward()
    torch.nn.functional.cross_entropy(expected[0], targets, reduction="sum").backward()
    figures.compare_gradients(pair, dtype)


def test_text_alone_is_a_decoder(dtype: torch.dtype) -> None:
    config = ENCODERS["clip"]
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    tokens = torch.arange(1, 9)[None]
    expected = pair.reference(input_ids=tokens).logits
    LargestErrors().compare_logits(pair.model(tokens).logits, expected, dtype)


def test_another_number_of_image_tokens_is_refused() -> None:
    config = ENCODERS["clip"]
    model = build_pair(config, torch.float64, among=["LlavaForConditionalGeneration"], unused=UNUSED).model
    batch = packed([draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(3)], [[0], [1, 2]])
    batch["tokens"][1, -3] = IMAGE_TOKEN
    with pytest.raises(TypeError, match="row 1 has 19 image tokens and images of 18 patches"):
        model(**batch)
