"""Pictures of reconstructions and rollout: a perfect model gives the image back, and files are what they say."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.inference.pictures import (
    Gallery,
    Picture,
    reconstruction_gallery,
    rollout_gallery,
    shade,
    to_png,
    write_pictures,
)
from megatfm.models import build
from tests.support.images import masked_batch, patches_of, pixels, to_batch
from tests.support.reference_gradients import perturb

SIDE = 4
MODEL = {
    "family": "masked_autoencoder",
    "d_model": 16,
    "n_layers": 1,
    "attention.n_heads": 2,
    "ffn.d_ff": 16,
    "ffn.activation": "gelu",
    "norm.name": "layer_norm",
    "position.name": "sinusoidal_2d",
    "embedding.name": "patches",
    "embedding.patch_size": SIDE,
    "embedding.mean": (0.5, 0.4, 0.3),
    "embedding.std": (0.2, 0.3, 0.4),
    "lm_head.name": "none",
    "pixel_decoder": {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8},
}
CLASSIFIER = {
    **{key: value for key, value in MODEL.items() if key != "pixel_decoder"},
    "family": "encoder",
    "extra_heads.classifier.n_classes": 3,
}


def run_config(model: ModelConfig, objective: str = "masked_image") -> SimpleNamespace:
    return SimpleNamespace(model=model, objective=SimpleNamespace(name=objective))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_perfect_model_gives_the_image_back(normalize: bool) -> None:
    """Targets computed here by hand; two images in a row, one of a single colour."""
    images = [pixels(8, 8, seed=1), torch.full((3, 8, 8), 77, dtype=torch.uint8)]
    batch = masked_batch(images, SIDE, 1, [[0, 1]], [[2], [0]], (4, 10))
    mean, std = (
        torch.tensor(MODEL[f"embedding.{key}"], dtype=torch.float64)[:, None, None] for key in ("mean", "std")
    )
    targets = []
    for image in images:
        patches = patches_of((image.double() / 255 - mean) / std, SIDE)
        if normalize:
            centred = patches - patches.mean(1, keepdim=True)
            patches = centred / (centred.square().sum(1, keepdim=True) / (3 * SIDE**2 - 1) + 1e-6).sqrt()
        targets.append(torch.cat([torch.zeros(1, 3 * SIDE**2), patches]))

    def perfect(**fields: Tensor) -> SimpleNamespace:
        assert "patches" not in fields
        return SimpleNamespace(logits=torch.cat(targets)[None])

    config = run_config(
        ModelConfig.from_dotted(MODEL | {"pixel_decoder": {**MODEL["pixel_decoder"], "normalize_targets": normalize}})  # type: ignore[dict-item]
    )  # fmt: skip
    gallery = reconstruction_gallery(perfect, config, [batch], torch.device("cpu"))  # type: ignore[arg-type]
    assert ("mean and deviation" in gallery.note) == normalize
    for image, picture, visible in zip(images, gallery.pictures, (2, 0), strict=True):
        masked, filled, original = picture.panels
        expected = image.permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(original, expected)
        np.testing.assert_array_equal(filled, expected)
        for number in range(4):
            y, x = divmod(number, 2)
            square = np.s_[y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE]
            assert (masked[square] == (expected[square] if number == visible else 128)).all()


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_rollout_of_two_images_of_a_row(pool: str) -> None:
    """Captions with names and probability; a model whose keys are all zero looks everywhere alike."""
    names, images = ["grün", "猫"], [pixels(8, 8, seed=1), pixels(12, 4, seed=2)]
    config = ModelConfig.from_dotted(CLASSIFIER | {"extra_heads.classifier.pool": pool})
    model = build(config).double().eval()
    perturb(model)
    for layer in model.encoder.layers.values():  # type: ignore[operator, union-attr]
        torch.nn.init.zeros_(layer.attn.wk.weight)
    for parameter in model.classifier.parameters():  # type: ignore[union-attr]
        torch.nn.init.zeros_(parameter)
    batch = to_batch(images, SIDE, 1, [[0, 1]], labels=[1, 2], row_length=12)
    with torch.no_grad():
        gallery = rollout_gallery(model, run_config(config), [batch], torch.device("cpu"), names)  # type: ignore[arg-type]
    captions = [picture.caption for picture in gallery.pictures]
    assert captions == ["label 猫, predicted grün (0.33)", "label 2, predicted grün (0.33)"]
    for image, picture in zip(images, gallery.pictures, strict=True):
        for panel in picture.panels:
            np.testing.assert_array_equal(panel, image.permute(1, 2, 0).numpy())


def test_shade_follows_the_weights() -> None:
    image = np.full((8, 8, 3), 200, np.uint8)
    shaded = shade(image, np.array([[1.0, 0.0], [0.0, 0.0]]))
    assert shaded[0, 0, 0] == 200
    assert shaded[-1, -1, 0] == 0
    assert (shade(image, np.zeros((2, 2))) == 0).all()


def test_files_and_index(tmp_path: Path) -> None:
    panels = [pixels(5, 3, seed=1).permute(1, 2, 0).numpy(), np.zeros((600, 300, 1), np.uint8)]
    count = write_pictures(tmp_path, 3, [Gallery("a", "A", "n", [Picture(panels, "é")] * 2)])
    assert count == 2
    index = json.loads((tmp_path / "pictures.json").read_text())
    assert index["step"] == 3
    assert [entry["file"] for entry in index["galleries"][0]["pictures"]] == [
        "pictures/a-00.png",
        "pictures/a-01.png",
    ]
    with Image.open(tmp_path / "pictures/a-01.png") as picture:
        assert picture.size == (3 * 23 + 4 + 112, 224)
    with Image.open(io.BytesIO(to_png(panels[:1]))) as picture:
        enlarged = np.asarray(picture)[::23, ::23, :3]
    np.testing.assert_array_equal(enlarged, panels[0])
