"""A small ViT learns patterns, and a masked autoencoder to fill them in; their loss curves begin as the golden ones.

They are the preset of digits, made smaller, from stored PNGs through decoding, random crops and packing. To accept a
change: `python tests/golden/test_vision_curves.py` writes the curves anew; say in the commit why they moved.
"""

import math
from typing import Any

import pytest

from tests.support.golden_curves import check, check_float32, check_rate, curves, golden, preset_config, write
from tests.support.golden_images import CLASSES
from tests.support.workers import Workers

PRESET, STEPS = "quickstart-vision", 30
SMALL = {
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.ffn.d_ff": 64,
    "optimizer": '{name = "adamw", lr = 5e-3}',
    "lr_schedule.warmup_steps": 5,
    "train.steps": 60,
    "train.global_batch": 32,
    "train.micro_batch": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    PRESET: {},
    f"{PRESET}-mae": {
        "model.family": "masked_autoencoder",
        "model.position": '{name = "sinusoidal_2d"}',
        "model.extra_heads": "{}",
        "model.pixel_decoder": "{d_model = 16, n_layers = 1, n_heads = 2, d_ff = 32}",
        "objective": '{name = "masked_image", mask_ratio = 0.5}',
        "data.sequence_length": 8,
        "data.target_length": 16,
    },
}


def config_of(name: str) -> dict[str, Any]:
    return preset_config(PRESET, SMALL | MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_the_curve_begins_as_the_golden_one(name: str, workers: Workers) -> None:
    assert golden(name).exists()
    check(workers, name, config_of(name))


@pytest.mark.parametrize("name", MODELS)
def test_another_learning_rate_leaves_the_golden_curve(name: str, workers: Workers) -> None:
    check_rate(workers, name, config_of(name))


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_the_first_steps_are_the_same(name: str, workers: Workers) -> None:
    check_float32(workers, name, config_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_they_learn(name: str, workers: Workers) -> None:
    """In 60 steps: a classifier better than guessing, an autoencoder better than the mean of each patch."""
    (result,) = workers.run(curves, 1, config_of(name), timeout=500)
    last = sum(result["loss"][-10:]) / 10
    assert last < (0.9 * math.log(CLASSES) if name == PRESET else 0.9)


if __name__ == "__main__":
    write({name: (config_of(name), STEPS) for name in MODELS})
