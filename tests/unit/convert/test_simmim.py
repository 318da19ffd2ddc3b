"""Folders of SimMIM, both ways, for Swin, Swin-V2 and ViT: tensors, config.json, pixels and loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import megatfm
from megatfm.config.model_parts import IMAGENET_MEAN, IMAGENET_STD
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from tests.support.hf_folders import edit_config, folder_tensors, hf_config_of, perturbed, with_fresh_memory
from tests.support.images import to_batch
from tests.support.swin import images_of

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


def make(name: str, folder: Path) -> PreTrainedModel:
    kind = getattr(transformers, name)
    model = perturbed(kind(kind.config_class(**CLASSES[name])))
    model.save_pretrained(folder)
    pixels = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}  # as images_of has them
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return model


def same_answers(expected: PreTrainedModel, actual: Any, n_special: int) -> None:
    images, pixel_values = images_of((SIZE, SIZE), 2)
    masks = torch.zeros(2, SIZE // PATCH, SIZE // PATCH, dtype=torch.bool)
    masks[0, 2:6, :4], masks[1, ::2] = True, True
    masks = masks.flatten(1)
    output = with_fresh_memory(expected)(pixel_values.float(), bool_masked_pos=masks)
    batch = to_batch(images, PATCH, n_special, [[0], [1]])
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
def test_there_and_back(name: str, tmp_path: Path) -> None:
    expected, n_special = make(name, tmp_path / "theirs"), int(name.startswith("ViT"))
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded, info = type(expected).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert hf_config_of(loaded) == hf_config_of(expected)
    original, back = (folder_tensors(tmp_path / folder) for folder in ("theirs", "back"))
    assert original.keys() == back.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in original.items())
    same_answers(expected, megatfm.load(tmp_path / "ours"), n_special)
    same_answers(loaded, megatfm.load(tmp_path / "theirs"), n_special)


def test_another_stride_is_refused(tmp_path: Path) -> None:
    make("SwinForMaskedImageModeling", tmp_path)
    edit_config(tmp_path, encoder_stride=16)
    with pytest.raises((UsageError, ValueError), match=r"pixels.stride = 8"):
        HfFolder(tmp_path)
