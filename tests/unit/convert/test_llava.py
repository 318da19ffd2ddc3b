"""Folders of CLIP, SigLIP and LLaVA, both ways: transformers' own files, released names, special ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

import megatfm
from megatfm.config import load_config
from megatfm.convert.architecture import ARCHITECTURES
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from tests.support.hf_folders import (
    check_same_tensors,
    copy_to_aligned_memory,
    edit_config,
    get_public_config,
    load_complete,
    perturb_parameters,
)
from tests.support.images import draw_pixels, make_batch

SIDE, GRID, IMAGE_TOKEN = 4, 3, 55
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
RELEASED = {
    "vision_tower.": "vision_tower.vision_model.",
    "multi_modal_projector.": "multi_modal_projector.",
    "language_model.": "language_model.",
}
"""Prefixes of tensors: as transformers 5 writes them, and as in released files."""


ENCODERS = {"clip": (CLIPVisionConfig, "default"), "siglip": (SiglipVisionConfig, "full")}
"""Config of an image encoder, and which of its tokens the connector reads."""


def write_llava(folder: Path, encoder: str = "clip", **options: object) -> LlavaForConditionalGeneration:
    config_class, selected = ENCODERS[encoder]
    vision = config_class(
        hidden_size=24, intermediate_size=36, num_hidden_layers=4, num_attention_heads=3,
        image_size=SIDE * GRID, patch_size=SIDE,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy=selected, **options,
    )  # fmt: skip
    model = perturb_parameters(LlavaForConditionalGeneration(config))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


def tokens() -> Tensor:
    return torch.tensor([[7, 8, *[IMAGE_TOKEN] * GRID**2, 9, 10]])


def answer(model: LlavaForConditionalGeneration) -> Tensor:
    mean, std = (torch.tensor(PIXELS[key])[:, None, None] for key in ("image_mean", "image_std"))
    image = ((draw_pixels(SIDE * GRID, SIDE * GRID, seed=1).double() / 255 - mean) / std).float()
    with torch.no_grad():
        return model(input_ids=tokens(), pixel_values=image[None]).logits


def our_answer(folder: Path, encoder: str = "clip") -> Tensor:
    image = make_batch([draw_pixels(SIDE * GRID, SIDE * GRID, seed=1)], SIDE, int(encoder == "clip"), [[0]])
    with torch.no_grad():
        image = {f"encoder_{name}": field for name, field in image.items()}
        return megatfm.load(folder)(tokens=tokens(), **image).logits


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("layer", [-2, -1, 2])
def test_llava_survives_conversion_there_and_back(layer: int, encoder: str, tmp_path: Path) -> None:
    """The blocks above `vision_feature_layer` are left out, named, and the answer is the same; so is SigLIP's pool."""
    expected = answer(write_llava(tmp_path / "theirs", encoder, vision_feature_layer=layer))
    assert len(HfFolder(tmp_path / "theirs").config.model_dump()["vision_tower"]["embedding"]["mean"]) == 3
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    unread = {f"model.vision_tower.post_layernorm.{part}" for part in ("weight", "bias")}
    assert set(info.pop("missing_keys")) == unread
    assert not any(info.values()), info
    assert len(loaded.model.vision_tower.encoder.layers) == {-2: 3, -1: 4, 2: 2}[layer]
    torch.testing.assert_close(answer(copy_to_aligned_memory(loaded)), expected, rtol=1e-6, atol=1e-6)
    for folder in ("theirs", "ours", "back"):
        torch.testing.assert_close(our_answer(tmp_path / folder, encoder), expected, rtol=1e-5, atol=1e-5)


def test_released_names_are_read(tmp_path: Path) -> None:
    expected = answer(write_llava(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    released = {}
    for name, tensor in stored.items():
        prefix = next(prefix for prefix in RELEASED if name.startswith(prefix))
        released[RELEASED[prefix] + name.removeprefix(prefix)] = tensor
    save_file(released, tmp_path / "model.safetensors")
    torch.testing.assert_close(our_answer(tmp_path), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("encoder", "changes", "message"), [
    ("clip", {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer = \[-2, -5\].*of one of 4 blocks"),
    ("clip", {"vision_feature_layer": 9}, "vision_feature_layer = 9"),
    ("clip", {"vision_feature_select_strategy": "full"}, "'full' passes on its class token too of a clip_vision_"),
    ("siglip", {"vision_feature_select_strategy": "default"}, "'default' passes on all but the first patch of a"),
    ("clip", {"vision_feature_select_strategy": "last"}, "vision_feature_select_strategy = 'last'"),
    ("clip", {"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu'"),
    ("clip", {"text_config": {"model_type": "qwen2"}}, "model_type = 'qwen2'"),
    ("clip", {"vision_config": {"model_type": "vit"}}, "'vit': megatfm reads LLaVA with clip_vision_model or sig"),
])  # fmt: skip
def test_options_of_llava_that_megatfm_lacks_are_refused(
    encoder: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_llava(tmp_path, encoder)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)


def test_the_released_config_is_read(tmp_path: Path) -> None:
    """LLaVA-1.5 7B as published: what is absent means LLaVA's image encoder and Llama's sizes."""
    text = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    vision = {"model_type": "clip_vision_model", "projection_dim": 768, "vocab_size": 32000}
    released = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100,
        "image_token_index": 32000, "pad_token_id": 32001, "projector_hidden_act": "gelu", "text_config": text,
        "vision_config": vision, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    }  # fmt: skip
    name = "LlavaForConditionalGeneration"
    config, preset = ARCHITECTURES.get(name).parse_config(released, name), load_config("llava-1.5-7b").model
    assert config.vision_tower == preset.vision_tower
    assert config.connector == preset.connector
    assert (config.d_model, config.n_layers, config.ffn.d_ff) == (4096, 32, 11008)


# -------------------------------------------------------------------------------------------- CLIP and SigLIP


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "hidden_size": 24}
IDS = {"bos_token_id": 47, "eos_token_id": 48, "pad_token_id": 3}
CLIP = {"projection_dim": 12, "logit_scale_init_value": 1.5}
CASES: dict[str, dict[str, Any]] = {"CLIPModel": CLIP, "SiglipModel": {}}
CAPTIONS = [[47, 5, 6, 48], [47, 7, 8, 9, 10, 11, 48]]


def make(name: str, folder: Path) -> PreTrainedModel:
    kind = getattr(transformers, name)
    text = SIZES | IDS | {"vocab_size": 50, "max_position_embeddings": 7}
    vision = SIZES | {"image_size": 16, "patch_size": 4}
    config = kind.config_class(text_config=text, vision_config=vision, **CASES[name])
    model = perturb_parameters(kind(config))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


def answers(expected: Any, images: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [images, captions]."""
    mean, std = (torch.tensor(PIXELS[key])[:, None, None] for key in ("image_mean", "image_std"))
    normalised = torch.stack([((image.double() / 255 - mean) / std).float() for image in images])
    return expected(pixel_values=normalised, input_ids=tokens).logits_per_image


def our_logits(folder: Path, images: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = megatfm.load(folder)
    of_images = make_batch(images, 4, model.config.embedding.n_special_tokens, [[0], [1]])
    is_padded = not model.config.text_tower.causal
    batch = {f"encoder_{field}": values for field, values in of_images.items()} | {"tokens": tokens}
    batch["positions"] = torch.arange(tokens.shape[1]).expand(tokens.shape)
    lengths = torch.tensor([tokens.shape[1] if is_padded else len(caption) for caption in CAPTIONS])
    batch["documents"] = (torch.arange(tokens.shape[1]) < lengths[:, None]).long() - 1
    features = model(**batch).predictions
    logits: torch.Tensor = features["scale"] * features["images"] @ features["texts"].T
    return logits + features.get("bias", 0.0)


@pytest.mark.parametrize("name", CASES)
def test_two_towers_there_and_back(name: str, tmp_path: Path) -> None:
    expected = make(name, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded = load_complete(type(expected), tmp_path / "back")
    converted = type(expected).from_pretrained(tmp_path / "theirs")
    assert get_public_config(loaded) == get_public_config(converted)
    assert {key: getattr(loaded.config.text_config, key) for key in IDS} == IDS
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert {key: written[key] for key in PIXELS} == PIXELS
    assert written["crop_size"] == {"height": 16, "width": 16}
    images = [draw_pixels(16, 16, seed=seed) for seed in (1, 2)]
    tokens = torch.tensor([caption + [3] * (7 - len(caption)) for caption in CAPTIONS])
    logits = answers(expected, images, tokens)
    assert torch.equal(answers(copy_to_aligned_memory(loaded), images, tokens), logits)
    for folder in ("theirs", "ours"):
        torch.testing.assert_close(our_logits(tmp_path / folder, images, tokens), logits, rtol=1e-5, atol=1e-5)
    check_same_tensors(tmp_path)


def test_towers_that_differ_are_refused(tmp_path: Path) -> None:
    make("CLIPModel", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config={**text, "hidden_act": "gelu"})
    with pytest.raises(UsageError, match=r"text_config\.hidden_act = 'gelu' and .*'quick_gelu'"):
        HfFolder(tmp_path)
    edit_config(tmp_path, text_config={**text, "rope_theta": 1.0})
    with pytest.raises(UsageError, match="megatfm knows no such key"):
        HfFolder(tmp_path)
