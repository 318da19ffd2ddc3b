"""Presets, made small, learn, and their loss curves begin as the golden ones.

Objective, optimizer and schedule are theirs; images come from stored PNGs through decoding, random crops and packing.
To accept a change, `python tests/golden/test_preset_curves.py` writes the curves anew; the commit says why they moved.
"""

import math
from typing import Any

import pytest

from tests.support.golden_curves import (
    CLASSES,
    MOE_BIAS,
    MOE_GOLDEN_STEPS,
    MOE_PRESET,
    MOE_ROUTERS,
    TOPICS,
    VOCABULARY,
    WORDS,
    Curves,
    assert_float32_agrees,
    assert_golden,
    assert_rate_shows,
    compute_curves,
    get_curve_file,
    moe_curve_config,
    preset_config,
    read_golden_curves,
    write_golden_curves,
)
from tests.support.workers import Workers

pytestmark = pytest.mark.timeout(600)
EXTENDED, SLOW = pytest.mark.extended, pytest.mark.slow
VISION = "quickstart-vision"
SMALL = {
    "model.vocab_size": VOCABULARY, "model.d_model": 32, "model.n_layers": 2, "model.attention.n_heads": 2,
    "model.ffn.d_ff": 64, "data.sequence_length": 32, "train.global_batch": 32,
}  # fmt: skip
SMALL_DECODER = SMALL | {"train.micro_batch": 16}
SMALL_ENCODER = SMALL | {
    "train.micro_batch": 32, "model.position.max_positions": 32, "lr_schedule.warmup_steps": 10,
}  # fmt: skip
SMALL_VISION = {
    "model.d_model": 32, "model.n_layers": 2, "model.ffn.d_ff": 64, "optimizer": '{name = "adamw", lr = 5e-3}',
    "lr_schedule.warmup_steps": 5, "train.steps": 60, "train.global_batch": 32, "train.micro_batch": 32,
}  # fmt: skip
SMALL_SWIN = {
    "model.family": "hierarchical", "model.n_layers": 3, "model.position": '{name = "relative_2d"}',
    "model.stages": "{n_layers = [2, 1], n_heads = [2, 4], grid = [4, 4]}",
    "model.attention": '{name = "windowed", pattern = {name = "windows_2d", window = 2}}',
}  # fmt: skip
SMALL_SWIN_V2 = SMALL_SWIN | {
    "model.position": '{name = "log_relative_2d"}', "model.norm.placement": "res_post",
    "model.stages": '{n_layers = [2, 1], n_heads = [2, 4], grid = [4, 4], merging_norm = "output"}',
    "model.attention": '{name = "windowed", cosine = true, pattern = {name = "windows_2d", window = 2}}',
}  # fmt: skip
SMALL_MVIT = {
    "model.family": "hierarchical", "model.n_layers": 3, "model.position": '{name = "relative_axes"}',
    "model.stages": "{n_layers = [1, 2], n_heads = [1, 2], grid = [4, 4]}", "model.attention": '{name = "pooled"}',
    "model.embedding.name": "overlapping_patches", "model.embedding.margin": 1,
}  # fmt: skip
SMALL_LLAVA = {
    "model.vocab_size": VOCABULARY, "model.attention.n_heads": 2, "model.connector.image_token_id": 6,
    "model.init": '{name = "normal", std = 0.1}', "model.vision_tower.d_model": 16, "model.vision_tower.n_layers": 2,
    "model.vision_tower.n_heads": 2, "model.vision_tower.d_ff": 32, "model.vision_tower.grid": "[4, 4]",
    "model.vision_tower.embedding.patch_size": 2, "model.vision_tower.embedding.channels": 1,
    "model.vision_tower.embedding.mean": "[0.5]", "model.vision_tower.embedding.std": "[0.5]",
    "objective.image_placement": "before_text", "data.images": "{size = 8}", "data.sequence_length": 17,
    "data.target_length": 24, "optimizer": '{name = "adamw", lr = 3e-3}', "train.steps": 100,
}  # fmt: skip
SMALL_TOWERS = {
    "model.vocab_size": VOCABULARY, "model.attention.n_heads": 2, "model.embedding.patch_size": 2,
    "model.embedding.channels": 1, "model.embedding.mean": "[0.5]", "model.embedding.std": "[0.5]",
    "model.init": '{name = "bert", std = 0.1}', "model.position.grid": "[4, 4]", "model.text_tower.d_model": 16,
    "model.text_tower.n_layers": 2, "model.text_tower.n_heads": 2, "model.text_tower.d_ff": 32,
    "model.text_tower.max_positions": 8, "model.contrastive.width": 16, "data.images": "{size = 8}",
    "data.sequence_length": 17, "data.target_length": 8, "optimizer": '{name = "adamw", lr = 3e-3}', "train.steps": 100,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": SMALL_DECODER | {
        "model.position.max_positions": 32, "model.init.std": 0.1, "optimizer.lr": 1e-2, "lr_schedule.warmup_steps": 5,
        "train.steps": 60,
    },
    "t5-base": SMALL_DECODER | {
        "model.lm_head.scale": 32**-0.5, "optimizer.lr": 0.1, "data.target_length": 16, "train.steps": 120,
    },
    "bert-base": SMALL_ENCODER | {"optimizer.lr": 2e-2, "model.init.std": 0.2, "train.steps": 160},
    "electra-small": SMALL_ENCODER | {
        "model.d_model": 64, "model.ffn.d_ff": 128, "model.attention.n_heads": 4, "model.embedding.dim": 24,
        "model.generator.d_model": 16, "model.generator.d_ff": 32, "model.init.std": 0.1, "model.dropout": 0.0,
        "model.attention.dropout": 0.0, "objective.mask_rate": 0.25, "optimizer.lr": 5e-3,
        "optimizer.betas": "[0.9, 0.98]", "train.steps": 140,
    },
    VISION: SMALL_VISION,
    f"{VISION}-mae": SMALL_VISION | {
        "model.family": "masked_autoencoder", "model.position": '{name = "sinusoidal_2d"}', "model.extra_heads": "{}",
        "model.pixel_decoder": "{d_model = 16, n_layers = 1, n_heads = 2, d_ff = 32}",
        "objective": '{name = "masked_image", mask_ratio = 0.5}', "data.sequence_length": 8, "data.target_length": 16,
    },
    f"{VISION}-swin": SMALL_VISION | SMALL_SWIN,
    f"{VISION}-swin-v2": SMALL_VISION | SMALL_SWIN_V2,
    f"{VISION}-mvit-v2": SMALL_VISION | SMALL_MVIT,
    f"{VISION}-simmim": SMALL_VISION | SMALL_SWIN | {
        "model.embedding.mask_token": "true", "objective": '{name = "simmim", mask_size = 4}',
        "model.extra_heads": '{pixels = {name = "pixels", stride = 4}}',
    },
    "llava-1.5-7b": SMALL_VISION | SMALL_LLAVA,
    "clip-b16": SMALL_VISION | SMALL_TOWERS,
    "siglip-b16": SMALL_VISION | SMALL_TOWERS | {
        "data.sequence_length": 16, "model.contrastive.width": 32, "model.text_tower.d_model": 32,
        "model.init": '{name = "xavier"}', "optimizer": '{name = "adamw", lr = 1e-3}',
    },
}  # fmt: skip
GOLDEN_STEPS = {
    "gpt2-124m": 60, "t5-base": 24, "bert-base": 30, "electra-small": 60, VISION: 30, f"{VISION}-mae": 30,
    f"{VISION}-swin": 30, f"{VISION}-swin-v2": 30, f"{VISION}-mvit-v2": 30, f"{VISION}-simmim": 30, "clip-b16": 30,
    "siglip-b16": 30, "llava-1.5-7b": 30,
    **dict.fromkeys(MOE_ROUTERS, MOE_GOLDEN_STEPS),
}  # fmt: skip
"""Number of golden steps by preset: soon after, curves depend on the processor (docs/LOG.md)."""
FIRST_STEPS = 12
"""Golden steps of `make test`, all rates' warm-up among them."""


def config_of(name: str) -> dict[str, Any]:
    if name in MOE_ROUTERS:
        return moe_curve_config(name)
    return preset_config(VISION if name.startswith(VISION) else name, MODELS[name])


def whole_curves_of(workers: Workers, name: str) -> Curves:
    config = config_of(name)
    return compute_curves(workers, config, config["train"]["steps"])


@pytest.mark.parametrize("name", GOLDEN_STEPS)
def test_the_curve_begins_as_the_golden_one(name: str, workers: Workers) -> None:
    assert get_curve_file(name).exists()
    assert_golden(name, compute_curves(workers, config_of(name), FIRST_STEPS), FIRST_STEPS)


@EXTENDED
@pytest.mark.parametrize("name", GOLDEN_STEPS)
def test_the_curve_is_the_golden_one_to_its_end(name: str, workers: Workers) -> None:
    steps = GOLDEN_STEPS[name]
    assert all(len(values) == steps for values in read_golden_curves(name).values())
    assert_golden(name, compute_curves(workers, config_of(name), steps), steps)


@pytest.mark.parametrize("name", GOLDEN_STEPS)
def test_another_learning_rate_leaves_the_golden_curve(name: str, workers: Workers) -> None:
    assert_rate_shows(workers, name, config_of(name))


@pytest.mark.parametrize("name", GOLDEN_STEPS)
def test_in_float32_the_first_steps_are_the_same(name: str, workers: Workers) -> None:
    assert_float32_agrees(workers, name, config_of(name))


def last_mean(values: list[float]) -> float:
    """Mean of the last ten steps."""
    return sum(values[-10:]) / 10


@pytest.mark.parametrize(
    "name", ["gpt2-124m", pytest.param("t5-base", marks=SLOW), MOE_BIAS, pytest.param(MOE_PRESET, marks=EXTENDED)]
)
def test_decoders_learn(name: str, workers: Workers) -> None:
    """Better than knowing a text's topic: each token follows from the one before."""
    assert last_mean(whole_curves_of(workers, name)["loss"]) < 0.75 * math.log(WORDS)


@pytest.mark.parametrize("name", [MOE_BIAS, pytest.param(MOE_PRESET, marks=EXTENDED)])
def test_no_expert_is_much_busier_than_the_mean(name: str, workers: Workers) -> None:
    """Load is balanced after 48 steps of warmup, by a term of the loss or by a bias of the router."""
    result = whole_curves_of(workers, name)
    assert result.keys() == {"loss", "busiest"} | ({"causal", "balance"} if name == MOE_PRESET else set())
    busiest = result["busiest"][48:]
    assert sum(busiest) / len(busiest) <= 1.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "bert-base",
    "electra-small",
    VISION,
    f"{VISION}-mae",
    f"{VISION}-swin",
    f"{VISION}-swin-v2",
    f"{VISION}-mvit-v2",
    "clip-b16",
    "siglip-b16",
])  # fmt: skip
def test_encoders_learn(name: str, workers: Workers) -> None:
    """A classifier better than guessing, an autoencoder better than the mean of each patch, towers than any pair."""
    config = config_of(name)
    result = compute_curves(workers, config, config["train"]["steps"])
    last = {term: last_mean(values) for term, values in result.items()}
    batch = config["train"]["global_batch"]
    guesses = {
        f"{VISION}-mae": 1.0, "clip-b16": math.log(batch),
        "siglip-b16": batch * math.log(batch) - (batch - 1) * math.log(batch - 1),
    }  # fmt: skip
    if name in guesses or name.startswith(VISION):
        assert last["loss"] < (0.9 if name != "siglip-b16" else 0.97) * guesses.get(name, math.log(CLASSES))
    elif name == "bert-base":
        assert last["masked"] < math.log(WORDS), "better than knowing the topic"
        assert last["sentence"] < 0.75 * math.log(2), "better than guessing"
    else:
        assert last["generator"] < 0.8 * math.log(TOPICS * WORDS), "better than any word"
        # A discriminator that only knew that marks are never replaced, and how often others are, would stay at the
        # entropy of that share. Two of the 14 tokens of a document are its marks.
        text = 12 / 14
        share = last["replaced"] / text
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
        assert last["discriminator"] < 0.75 * text * entropy


if __name__ == "__main__":
    write_golden_curves({name: (config_of(name), steps) for name, steps in GOLDEN_STEPS.items()})
