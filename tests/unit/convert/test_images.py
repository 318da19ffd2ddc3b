"""Folders of vision models, both ways: transformers' own files, both spellings, older buffers, pixels and gradients."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel

import megatfm
from megatfm import checkpoint
from megatfm.commands.from_model import continue_from_config
from megatfm.config import load_config
from megatfm.config.model_parts import IMAGENET_MEAN, IMAGENET_STD
from megatfm.convert.architecture import find_architecture
from megatfm.convert.convert import convert, open_best_checkpoint, write_model
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.starting_config import write_preprocessor
from megatfm.errors import UsageError
from megatfm.objectives import build_objective
from megatfm.objectives.images import make_image_reader
from tests.support.hf_encoders import (
    HF_IMAGES,
    PIXELS,
    SMALL_SWIN,
    SMALL_VIT,
    build_hf_image_model,
    draw_images,
    image_logits,
    make_image_batch,
    write_pixels,
)
from tests.support.hf_folders import (
    check_same_tensors,
    convert_there_and_back,
    copy_to_aligned_memory,
    edit_config,
    load_complete,
    perturb_parameters,
)
from tests.support.images import draw_pixels, make_batch


def save_hf_image_model(name: str, folder: Path) -> PreTrainedModel:
    model = build_hf_image_model(name)
    model.save_pretrained(folder)
    write_pixels(folder)
    return model


@pytest.mark.parametrize("name", HF_IMAGES)
def test_image_models_survive_conversion_there_and_back(name: str, tmp_path: Path) -> None:
    expected = save_hf_image_model(name, tmp_path / "theirs")
    any_size = {"image_size": 224} if name == "DINOv3ViTModel" else {}
    loaded = convert_there_and_back(tmp_path, expected, **any_size)
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    size = HF_IMAGES[name]["image_size"]
    assert {key: written[key] for key in PIXELS} == PIXELS
    assert written["crop_size"] == dict.fromkeys(("height", "width"), any_size.get("image_size", size))
    logits = image_logits(expected, size, is_megatfm=False, name=name)
    assert torch.equal(image_logits(copy_to_aligned_memory(loaded), size, is_megatfm=False, name=name), logits)
    for folder in ("theirs", "ours"):
        actual = image_logits(megatfm.load(tmp_path / folder), size, is_megatfm=True, name=name)
        torch.testing.assert_close(actual, logits, rtol=1e-5, atol=1e-5)
    if not name.startswith(("Dinov2WithRegisters", "DINOv3")):
        check_same_tensors(tmp_path, "vision_model.")


def test_names_as_in_memory(tmp_path: Path) -> None:
    """A file that holds a state_dict of transformers 5 is the same model."""
    name = "ViTForImageClassification"
    expected = save_hf_image_model(name, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != expected.state_dict().keys()
    save_file(dict(expected.state_dict()), tmp_path / "model.safetensors")
    actual, logits = (
        image_logits(model, 16, is_megatfm=model is not expected, name=name)
        for model in (megatfm.load(tmp_path), expected)
    )
    torch.testing.assert_close(actual, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["ViTModel", "Dinov2Model"])
def test_a_backbone_without_a_classifier(kind: str, tmp_path: Path) -> None:
    options = {key: value for key, value in SMALL_VIT.items() if "label" not in key and key != "intermediate_size"}
    model = getattr(transformers, kind)
    reference = perturb_parameters(model(model.config_class(**options, layer_norm_eps=1e-6)))
    reference.save_pretrained(tmp_path / "theirs")
    opened = HfFolder(tmp_path / "theirs")
    assert not opened.config.extra_heads
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    image, embedding = draw_pixels(16, 16, seed=1), opened.config.embedding
    mean, std = (torch.tensor(values)[:, None, None] for values in (embedding.mean, embedding.std))
    expected = reference(pixel_values=((image / 255.0 - mean) / std)[None]).last_hidden_state
    hidden = megatfm.load(tmp_path / "ours")(**make_batch([image], 4, 1, [[0]])).hidden
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_a_classifier_of_siglip(tmp_path: Path) -> None:
    """Sizes are in the section of the image encoder, whose pooling head no classifier reads."""
    vision = {key: value for key, value in SMALL_VIT.items() if "label" not in key} | {"vision_use_head": True}
    labels = {key: value for key, value in SMALL_VIT.items() if "label" in key}
    kind = transformers.SiglipForImageClassification
    expected = perturb_parameters(kind(kind.config_class(vision_config=vision, **labels)))
    expected.save_pretrained(tmp_path / "theirs")
    write_pixels(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back = load_complete(kind, tmp_path / "back")
    assert back.config.id2label == expected.config.id2label
    image = draw_pixels(16, 16, seed=1)
    mean, std = (torch.tensor(values)[:, None, None] for values in PIXELS.values())
    pixels = ((image / 255.0 - mean) / std)[None]
    logits = expected(pixel_values=pixels).logits
    assert torch.equal(copy_to_aligned_memory(back)(pixel_values=pixels).logits, logits)
    actual = megatfm.load(tmp_path / "ours")(**make_batch([image], 4, 0, [[0]])).predictions["classifier"]
    torch.testing.assert_close(actual, logits, rtol=1e-5, atol=1e-5)


def test_the_quickstart_of_images_is_exported_for_gray_images(tmp_path: Path) -> None:
    config = load_config("quickstart-vision")
    name, _, hf_config = find_architecture(config.model)
    assert name == "SiglipForImageClassification"
    write_preprocessor(tmp_path, hf_config, config.data.images, None)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    prepared = processor(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(prepared[0, 0], (pixels / 255 - 0.5) / 0.5, atol=1e-6, rtol=0)


@pytest.mark.parametrize("change", [{"do_rescale": False}, {"rescale_factor": 0.5}, {"rescale_factor": "half"}])
def test_pixels_scaled_otherwise_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_hf_image_model("ViTForImageClassification", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS | change))
    with pytest.raises(UsageError, match="divides pixels by 255"):
        HfFolder(tmp_path)


CROPPED = {"do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, **PIXELS}
IMAGES = [(40, 20), (20, 60), (31, 31), (9, 9), (16, 16)]
"""Widths and heights of images whose margins transformers cuts alike with and without torchvision."""


@pytest.mark.parametrize(("preprocessor", "options", "note"), [
    ({"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}, "resample": 3}, {}, None),
    ({"size": {"shortest_edge": 22}, "crop_size": 16, "resample": 2}, {"interpolation": "bilinear"}, None),
    ({"size": 16, "crop_size": 16, "resample": 1}, {"crop_pct": 1.0, "interpolation": "lanczos"}, None),
    ({"size": {"shortest_edge": 16}, "do_center_crop": False}, {"crop_pct": 1.0}, "stretches images to a square"),
    ({"size": {"height": 16, "width": 16}, "do_center_crop": False}, {"crop_pct": 1.0}, "stretches images to a sq"),
    ({"size": {"shortest_edge": 36}, "crop_size": 32}, {"crop_pct": 16 / 18}, "have 32 pixels a side, and .* is 16"),
    ({"size": {"shortest_edge": 18}, "crop_size": 16, "resample": 5}, {}, "resample = 5 is none of megatfm's filters"),
    ({"size": {"shortest_edge": 18}, "crop_size": 16, "resample": [2]}, {}, r"resample = \[2\] is none of megatfm's"),
    ({"do_resize": False, "resample": 2}, {"crop_pct": 0.875, "interpolation": "bilinear"}, None),
], ids=str)  # fmt: skip
def test_images_are_prepared_as_transformers_does(
    preprocessor: dict[str, Any], options: dict[str, Any], note: str | None, tmp_path: Path
) -> None:
    """The folder says how; what megatfm can't do is said, and the file comes back as it was."""
    save_hf_image_model("ViTForImageClassification", tmp_path / "theirs")
    stored = {"image_processor_type": "CLIPImageProcessor", **CROPPED, **preprocessor}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(stored))
    output = convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    images = load_config(tmp_path / "ours").data.images
    assert {key: getattr(images, key) for key in options} == options
    assert (re.search(note, "\n".join(output)) is not None) if note else "preprocessor_config.json" not in str(output)
    output += convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert "tokenizer" not in "\n".join(output)
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    if "size" in preprocessor and options.get("crop_pct") != 0.875:
        assert written == stored
    if note is None and "size" in preprocessor:
        compare_pixels(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 0.7])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_transformers_prepares_images_as_the_run_did(crop_pct: float, interpolation: str, tmp_path: Path) -> None:
    save_hf_image_model("ViTForImageClassification", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    path, _, config = open_best_checkpoint(tmp_path / "ours", trust_plugins=False)
    changed = config.with_changes({"data.images.crop_pct": crop_pct, "data.images.interpolation": interpolation})
    tensors = iter(checkpoint.read_tensors(path).items())
    write_model(tmp_path / "run", changed, tensors, {"tokenizer": None}, "")
    convert(tmp_path / "run", tmp_path / "back", "hf")
    compare_pixels(tmp_path / "back", tmp_path / "run")


def compare_pixels(theirs: Path, ours: Path) -> None:
    """Values of pixels by transformers' processor, and by megatfm's reader of images in evaluation."""
    processor, config = AutoImageProcessor.from_pretrained(theirs), load_config(ours)
    reader = make_image_reader(config.data.images, config.model, "image_classification", 17, training=False)
    mean, std = (np.array(values, np.float32) for values in PIXELS.values())
    for number, size in enumerate(IMAGES):
        pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)
        for mode, extension in (("RGB", "png"), ("L", "png"), ("P", "png"), ("CMYK", "jpeg")):
            file = io.BytesIO()
            Image.fromarray(pixels).convert(mode).save(file, extension.upper())
            expected = processor(images=Image.open(file), return_tensors="np")["pixel_values"][0]
            actual = reader.read({extension: file.getvalue()}, (0,)).astype(np.float32) / 255
            np.testing.assert_allclose((actual - mean) / std, expected.transpose(1, 2, 0), atol=1e-5, rtol=0)


def test_training_continues_at_another_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--from` keeps the table of positions, which is interpolated to the images of the run."""
    monkeypatch.chdir(tmp_path)
    save_hf_image_model("ViTForImageClassification", tmp_path / "theirs")
    overrides = ["data.train=digits", "data.images.size=24", "data.sequence_length=37", "name=larger"]
    alone, _ = continue_from_config(tmp_path / "theirs", None, ["data.train=digits"])
    assert alone.objective.name == "image_classification"
    assert (alone.data.sequence_length, alone.data.images.size) == (17, 16)
    assert alone.data.tokenizer is None
    config, _ = continue_from_config(tmp_path / "theirs", "quickstart-vision", [*overrides, "data.validation={}"])
    assert config.model.position.grid == (4, 4)
    assert (config.model.embedding.patch_size, config.data.images.size) == (4, 24)
    objective = build_objective(config.objective, config.model, None, (37,), config.data.images)
    assert objective.sequence_lengths(np.ones(2, np.int64), np.zeros(2, np.uint64)).tolist() == [37, 37]


# ------------------------------------------------------------------------------------------- Swin and Swin-V2


SWIN_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Swin": ("SwinForImageClassification", {}),
    "Swin-V2": ("Swinv2ForImageClassification", {"pretrained_window_sizes": [0, 0]}),
    "backbone": ("SwinModel", {}),
}


def make_swin(case: str, folder: Path) -> PreTrainedModel:
    name, options = SWIN_CASES[case]
    kind = getattr(transformers, name)
    model = perturb_parameters(kind(kind.config_class(**(SMALL_SWIN | options))))
    model.save_pretrained(folder)
    return model


def same_answers(expected: Any, actual: Any) -> None:
    images, inputs = draw_images((36, 36), 2)
    output, batch = copy_to_aligned_memory(expected)(inputs.float()), make_image_batch(images, [[0], [1]], [0, 0])
    del batch["labels"]
    if hasattr(output, "logits"):
        values, expected_logits = actual(**batch).predictions["classifier"], output.logits
    else:
        values, expected_logits = actual(**batch).hidden, output.last_hidden_state
    torch.testing.assert_close(values, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SWIN_CASES)
def test_swin_there_and_back(case: str, tmp_path: Path) -> None:
    expected = make_swin(case, tmp_path / "theirs")
    loaded = convert_there_and_back(tmp_path, expected)
    check_same_tensors(tmp_path, "swin.")
    same_answers(expected, megatfm.load(tmp_path / "ours"))
    same_answers(loaded, megatfm.load(tmp_path / "theirs"))


def test_names_as_in_memory_and_older_buffers(tmp_path: Path) -> None:
    expected = make_swin("Swin", tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != expected.state_dict().keys()
    index = {
        f"swin.encoder.layers.0.blocks.{block}.attention.self.relative_position_index": torch.zeros(16, 16).long()
        for block in (0, 1)
    }
    save_file(dict(expected.state_dict()) | index, tmp_path / "model.safetensors")
    same_answers(expected, megatfm.load(tmp_path))


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("Swin", {"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-06 is not supported"),
    ("Swin", {"use_absolute_embeddings": True}, "use_absolute_embeddings = True is not supported"),
    ("Swin", {"image_size": [32, 64]}, "megatfm reads square images"),
    ("Swin", {"hidden_size": 16}, "hidden_size = 16 is not supported, only 32"),
    ("Swin-V2", {"pretrained_window_sizes": [3, 0]}, "give all of them, or zeros alone"),
])  # fmt: skip
def test_options_of_image_models_that_are_not_read_are_named(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_swin(case, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        megatfm.load(tmp_path)


# ----------------------------------------------------------------------------------------------------- SimMIM


SIZE, PATCH = 32, 4
SWIN: dict[str, Any] = {
    "image_size": SIZE, "patch_size": PATCH, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4],
    "window_size": 4, "mlp_ratio": 2.5, "encoder_stride": 8,
}  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    "SwinForMaskedImageModeling": SWIN,
    "Swinv2ForMaskedImageModeling": SWIN | {"pretrained_window_sizes": [0, 0]},
    "ViTForMaskedImageModeling": {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48,
        "image_size": SIZE, "patch_size": PATCH, "encoder_stride": PATCH,
    },
}  # fmt: skip


def make_simmim(name: str, folder: Path) -> PreTrainedModel:
    kind = getattr(transformers, name)
    model = perturb_parameters(kind(kind.config_class(**CLASSES[name])))
    model.save_pretrained(folder)
    pixels = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}  # as images_of has them
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return model


def same_simmim_answers(expected: PreTrainedModel, actual: Any, n_special: int) -> None:
    images, pixel_values = draw_images((SIZE, SIZE), 2)
    masks = torch.zeros(2, SIZE // PATCH, SIZE // PATCH, dtype=torch.bool)
    masks[0, 2:6, :4], masks[1, ::2] = True, True
    masks = masks.flatten(1)
    output = copy_to_aligned_memory(expected)(pixel_values.float(), bool_masked_pos=masks)
    batch = make_batch(images, PATCH, n_special, [[0], [1]])
    masked = torch.nn.functional.pad(masks, (n_special, 0))
    inputs = {**batch, "masked": masked, "patches": batch["patches"].masked_fill(masked[..., None], 0)}
    predicted = actual(**inputs).predictions["pixels"][:, n_special:]
    torch.testing.assert_close(to_image(predicted), output.reconstruction, rtol=1e-4, atol=1e-4)
    loss = actual(**inputs, target_patches=batch["patches"]).losses["pixels"] / masks.sum()
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=1e-5)


def to_image(patches: Tensor) -> Tensor:
    """[B, 3, H, W] from patches [B, T, K]."""
    squares = patches.unflatten(1, (SIZE // PATCH, -1)).unflatten(-1, (3, PATCH, PATCH))
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


@pytest.mark.parametrize("name", CLASSES)
def test_simmim_there_and_back(name: str, tmp_path: Path) -> None:
    expected, n_special = make_simmim(name, tmp_path / "theirs"), int(name.startswith("ViT"))
    loaded = convert_there_and_back(tmp_path, expected)
    check_same_tensors(tmp_path)
    same_simmim_answers(expected, megatfm.load(tmp_path / "ours"), n_special)
    same_simmim_answers(loaded, megatfm.load(tmp_path / "theirs"), n_special)


def test_another_stride_is_refused(tmp_path: Path) -> None:
    make_simmim("SwinForMaskedImageModeling", tmp_path)
    edit_config(tmp_path, encoder_stride=16)
    with pytest.raises((UsageError, ValueError), match=r"pixels.stride = 8"):
        HfFolder(tmp_path)
