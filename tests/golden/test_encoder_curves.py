"""Small encoders learn, and their loss curves begin as the golden ones.

They are the presets, made small: objective, optimizer and schedule are theirs. To accept a change:
`python tests/golden/test_encoder_curves.py` writes the curves anew; say in the commit why they moved.
"""

import math
from typing import Any

import pytest

from tests.support.golden_curves import (
    TOPICS,
    VOCABULARY,
    WORDS,
    check,
    check_float32,
    check_rate,
    curves,
    preset_config,
    write,
)
from tests.support.workers import Workers

LENGTH = 14
"""Tokens of a document, its two marks included."""
pytestmark = pytest.mark.timeout(600)
SMALL = {
    "model.vocab_size": VOCABULARY,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.ffn.d_ff": 64,
    "model.position.max_positions": 32,
    "data.sequence_length": 32,
    "train.global_batch": 32,
    "train.micro_batch": 32,
    "lr_schedule.warmup_steps": 10,
}
MODELS = {
    "bert-base": {"optimizer.lr": 2e-2, "model.init.std": 0.2, "train.steps": 160},
    "electra-small": {
        "model.d_model": 64, "model.ffn.d_ff": 128, "model.attention.n_heads": 4, "model.embedding.dim": 24,
        "model.generator.d_model": 16, "model.generator.d_ff": 32, "model.init.std": 0.1, "model.dropout": 0.0,
        "model.attention.dropout": 0.0, "objective.mask_rate": 0.25, "optimizer.lr": 5e-3,
        "optimizer.betas": "[0.9, 0.98]", "train.steps": 140,
    },
}  # fmt: skip
STEPS = {"bert-base": 30, "electra-small": 60}
"""So many are golden: soon after, the curves depend on the processor (docs/LOG.md)."""


def config_of(preset: str) -> dict[str, Any]:
    return preset_config(preset, SMALL | MODELS[preset])


@pytest.mark.parametrize("preset", MODELS)
def test_the_curve_begins_as_the_golden_one(preset: str, workers: Workers) -> None:
    check(workers, preset, config_of(preset))


@pytest.mark.slow
@pytest.mark.parametrize("preset", MODELS)
def test_small_encoders_learn_both_tasks(preset: str, workers: Workers) -> None:
    (result,) = workers.run(curves, 1, config_of(preset), timeout=500)
    last = {term: sum(values[-10:]) / 10 for term, values in result.items()}
    if preset == "bert-base":
        assert last["masked"] < math.log(WORDS), "better than knowing the topic"
        assert last["sentence"] < 0.75 * math.log(2), "better than guessing"
        return
    assert last["generator"] < 0.8 * math.log(TOPICS * WORDS), "better than any word"
    # A discriminator that only knew that marks are never replaced, and how often others are, would stay at the entropy
    # of that share.
    text = (LENGTH - 2) / LENGTH
    share = last["replaced"] / text
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert last["discriminator"] < 0.75 * text * entropy


@pytest.mark.parametrize("preset", MODELS)
def test_another_learning_rate_leaves_the_golden_curve(preset: str, workers: Workers) -> None:
    check_rate(workers, preset, config_of(preset))


@pytest.mark.parametrize("preset", MODELS)
def test_in_float32_the_first_steps_are_the_same(preset: str, workers: Workers) -> None:
    check_float32(workers, preset, config_of(preset))


if __name__ == "__main__":
    write({name: (config_of(name), STEPS[name]) for name in MODELS})
