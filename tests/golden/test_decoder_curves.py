"""A small GPT-2 and a small T5 learn, and their loss curves begin as the golden ones.

They are the presets, made small: objective, optimizer and schedule are theirs. To accept a change:
`python tests/golden/test_decoder_curves.py` writes the curves anew; say in the commit why they moved.
"""

import math
from typing import Any

import pytest

from tests.support.golden_curves import (
    VOCABULARY,
    WORDS,
    check,
    check_float32,
    check_rate,
    preset_config,
    run,
    write,
)
from tests.support.workers import Workers

pytestmark = pytest.mark.timeout(600)
SMALL = {
    "model.vocab_size": VOCABULARY,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.ffn.d_ff": 64,
    "data.sequence_length": 32,
    "train.global_batch": 32,
    "train.micro_batch": 16,
}
MODELS = {
    "gpt2-124m": {
        "model.position.max_positions": 32, "model.init.std": 0.1, "optimizer.lr": 1e-2, "lr_schedule.warmup_steps": 5,
        "train.steps": 60,
    },
    "t5-base": {
        "model.lm_head.scale": 32**-0.5, "optimizer.lr": 0.1, "data.target_length": 16, "train.steps": 120,
    },
}  # fmt: skip
STEPS = {"gpt2-124m": 60, "t5-base": 24}
"""So many are golden: after 24, T5's curve depends on the processor (docs/LOG.md)."""


def config_of(preset: str) -> dict[str, Any]:
    return preset_config(preset, SMALL | MODELS[preset])


@pytest.mark.parametrize("preset", MODELS)
def test_the_curve_begins_as_the_golden_one(preset: str, workers: Workers) -> None:
    check(workers, preset, config_of(preset))


@pytest.mark.parametrize("preset", ["gpt2-124m", pytest.param("t5-base", marks=pytest.mark.slow)])
def test_small_decoders_learn(preset: str, workers: Workers) -> None:
    """Better than knowing a text's topic: each token follows from the one before."""
    actual = run(workers, config_of(preset), MODELS[preset]["train.steps"])
    assert sum(actual["loss"][-10:]) / 10 < 0.75 * math.log(WORDS)


@pytest.mark.parametrize("preset", MODELS)
def test_another_learning_rate_leaves_the_golden_curve(preset: str, workers: Workers) -> None:
    check_rate(workers, preset, config_of(preset))


@pytest.mark.parametrize("preset", MODELS)
def test_in_float32_the_first_steps_are_the_same(preset: str, workers: Workers) -> None:
    check_float32(workers, preset, config_of(preset))


if __name__ == "__main__":
    write({name: (config_of(name), STEPS[name]) for name in MODELS})
