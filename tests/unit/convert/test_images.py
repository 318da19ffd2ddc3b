"""Folders of vision transformers, both ways: transformers' own files, both spellings, and the pixels' mean."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import megatfm
from megatfm.commands.from_model import continue_from_config
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from megatfm.objectives import build_objective
from tests.support.hf_folders import folder_tensors, hf_config_of, perturbed, with_fresh_memory
from tests.support.images import pixels, to_batch

SMALL = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "id2label": {0: "cat", 1: "dog", 2: "ant"}, "label2id": {"cat": 0, "dog": 1, "ant": 2},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {"layer_norm_eps": 1e-6, "hidden_dropout_prob": 0.1},
    "DeiTForImageClassification": {},
    "Dinov2ForImageClassification": {"mlp_ratio": 2, "layerscale_value": 1e-5, "use_mask_token": False},
    "Dinov2WithRegistersForImageClassification": {"mlp_ratio": 2, "num_register_tokens": 2},
    "DINOv3ViTModel": {"num_register_tokens": 2, "key_bias": True},
    "SiglipVisionModel": {"vision_use_head": False},
    "CLIPVisionModel": {},
}
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


def make(name: str, folder: Path) -> PreTrainedModel:
    kind = getattr(transformers, name)
    options = SMALL | CASES[name]
    if "mlp_ratio" in options:
        del options["intermediate_size"]
    model = perturbed(kind(kind.config_class(**options)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


def answers(expected: Any, image: torch.Tensor) -> torch.Tensor:
    """Logits, or last vectors, of pixels normalised by hand."""
    mean, std = (torch.tensor(PIXELS[key])[:, None, None] for key in ("image_mean", "image_std"))
    output = expected(pixel_values=((image.double() / 255 - mean) / std).float()[None])
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Files that transformers wrote become ours, and files from which transformers loads the same model."""
    expected = make(name, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded, info = type(expected).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    any_size = {"image_size": 224} if name == "DINOv3ViTModel" else {}
    assert hf_config_of(loaded) == hf_config_of(expected) | any_size
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert {key: written[key] for key in PIXELS} == PIXELS
    side = any_size.get("image_size", 16)
    assert written["size"] == {"height": side, "width": side}
    image = pixels(16, 16, seed=1)
    assert torch.equal(answers(with_fresh_memory(loaded), image), answers(expected, image))
    for folder in ("theirs", "ours"):
        model = megatfm.load(tmp_path / folder)
        output = model(**to_batch([image], 4, model.config.embedding.n_special_tokens, [[0]]))
        if "Classification" in name:
            actual = output.predictions["classifier"]
        else:
            actual = output.hidden
        wanted = answers(expected, image)
        if name == "CLIPVisionModel":  # whose last norm transformers keeps for the class token
            wanted = expected.post_layernorm(wanted)
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    if name.startswith(
        ("Dinov2WithRegisters", "DINOv3")
    ):  # whose mask token transformers always has, and no pass uses
        return
    original, back = (folder_tensors(tmp_path / folder) for folder in ("theirs", "back"))
    prefix = "" if original.keys() == back.keys() else "vision_model."
    assert {f"{prefix}{key}" for key in original} == back.keys()
    assert all(torch.equal(back[f"{prefix}{key}"], tensor) for key, tensor in original.items())


def test_names_as_in_memory(tmp_path: Path) -> None:
    """A file that holds a state_dict of transformers 5 is the same model."""
    expected = make("ViTForImageClassification", tmp_path / "theirs")
    in_file = load_file(tmp_path / "theirs" / "model.safetensors")
    assert in_file.keys() != expected.state_dict().keys()
    save_file(dict(expected.state_dict()), tmp_path / "theirs" / "model.safetensors")
    image = pixels(16, 16, seed=1)
    logits = megatfm.load(tmp_path / "theirs")(**to_batch([image], 4, 1, [[0]])).predictions["classifier"]
    torch.testing.assert_close(logits, answers(expected, image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["ViTModel", "Dinov2Model"])
def test_a_backbone_without_a_classifier(kind: str, tmp_path: Path) -> None:
    """Its last vectors, from files of the backbone alone."""
    options = {
        key: value for key, value in SMALL.items() if "label" not in key and key != "intermediate_size"
    }
    model = getattr(transformers, kind)
    reference = perturbed(model(model.config_class(**options, layer_norm_eps=1e-6)))
    reference.save_pretrained(tmp_path / "theirs")
    opened = HfFolder(tmp_path / "theirs")
    assert not opened.config.extra_heads
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    image = pixels(16, 16, seed=1)
    mean, std = opened.config.embedding.mean, opened.config.embedding.std
    expected = reference(
        pixel_values=((image / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])[
            None
        ]
    ).last_hidden_state
    hidden = megatfm.load(tmp_path / "ours")(**to_batch([image], 4, 1, [[0]])).hidden
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"do_rescale": False}, "divides pixels by 255"), ({"rescale_factor": 0.5}, "divides pixels by 255")],
)
def test_pixels_scaled_otherwise_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make("ViTForImageClassification", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS | change))
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)


def test_training_goes_on_at_another_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--from` keeps the table of positions, which is interpolated to the images of the run."""
    monkeypatch.chdir(tmp_path)
    make("ViTForImageClassification", tmp_path / "theirs")
    overrides = ["data.train=digits", "data.images.size=24", "data.sequence_length=37", "name=larger"]
    alone, _ = continue_from_config(tmp_path / "theirs", None, ["data.train=digits"])
    assert (alone.objective.name, alone.data.sequence_length, alone.data.images.size) == (
        "image_classification",
        17,
        16,
    )
    assert alone.data.tokenizer is None
    config, _ = continue_from_config(
        tmp_path / "theirs", "quickstart-vision", [*overrides, "data.validation={}"]
    )
    assert config.model.position.grid == (4, 4)
    assert (config.model.embedding.patch_size, config.data.images.size) == (4, 24)
    objective = build_objective(config.objective, config.model, None, (37,), config.data.images)
    assert objective.sequence_lengths(np.ones(2, np.int64), np.zeros(2, np.uint64)).tolist() == [37, 37]
