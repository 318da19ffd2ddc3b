"""Batches of SimMIM: whole squares are masked, alike on every rank, and their pixels are targets alone."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatfm.config import ImagesConfig, ModelConfig, SimMIMObjective
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.objectives import Objective, build_objective
from megatfm.rng import ChunkKey

SIDE, SIZE = 4, 40


def model(**options: Any) -> ModelConfig:
    keys = {
        "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
        "embedding.name": "patches", "embedding.patch_size": SIDE, "embedding.mask_token": True,
        "lm_head.name": "none", "extra_heads.pixels": {"stride": SIDE},
    }  # fmt: skip
    return ModelConfig.from_dotted(keys | options)


def objective(config: ModelConfig | None = None, **options: Any) -> Objective:
    images = ImagesConfig.model_validate({"size": SIZE, "crop_pct": 1.0})
    section = SimMIMObjective.model_validate({"mask_size": 8, **options})
    return build_objective(section, config or model(), None, (101,), images)


def chunk() -> DocumentChunk:
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(1, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return DocumentChunk(np.zeros(0, np.uint16), files={"png": out.getvalue()})


@pytest.mark.parametrize(("ratio", "n_masked"), [(0.6, 15), (0.5, 13), (0.01, 1), (0.96, 24)])
def test_whole_squares_are_masked(ratio: float, n_masked: int) -> None:
    """Of 25 squares the share, rounded up; a class token is none."""
    fields = objective(mask_ratio=ratio).build_example(chunk(), ChunkKey(0, 0, 0, 0))
    masked = fields["masked"]
    assert masked[0] == 0
    squares = masked[1:].reshape(5, 2, 5, 2)
    assert (squares == squares[:, :1, :, :1]).all()
    assert squares[:, 0, :, 0].sum() == n_masked
    assert (fields["target_patches"][1:] > 0).all()
    np.testing.assert_array_equal(
        fields["patches"] == 0, np.where(masked[:, None], True, fields["target_patches"] == 0)
    )
    visible = masked == 0
    np.testing.assert_array_equal(fields["patches"][visible], fields["target_patches"][visible])


def test_masks_follow_from_the_key() -> None:
    """Another epoch or sample masks other squares; the same one the same."""
    chosen = objective()
    keys = [ChunkKey(0, 0, 0, 0), ChunkKey(0, 1, 0, 0), ChunkKey(0, 0, 7, 0), ChunkKey(3, 0, 0, 0)]
    masks = [chosen.build_example(chunk(), key)["masked"] for key in keys]
    assert len({mask.tobytes() for mask in masks}) == len(keys)
    np.testing.assert_array_equal(objective().build_example(chunk(), keys[1])["masked"], masks[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_size": 6}, "mask_size = 6: masked squares are whole patches of 4"),
        ({"mask_size": 16}, "mask_size = 16: masked squares"),
        ({"mask_ratio": 0.99}, "masks all 25 squares"),
    ],
)
def test_bad_masks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        objective(**options)


def test_models_that_lack_a_part() -> None:
    headless = model().with_changes({"extra_heads": {}})
    for lacking in (model(**{"embedding.mask_token": False}), headless):
        with pytest.raises(UsageError, match="a mask token and a head for pixels"):
            objective(lacking)
    with pytest.raises(UsageError, match=r"choose model\.extra_heads\.pixels\.stride = 4"):
        objective(model(**{"extra_heads.pixels": {"stride": 8}}))
