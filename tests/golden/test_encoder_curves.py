"""Small encoders learn, and their loss curves are the golden ones: a change of the mathematics, however small, shows.

They are the presets, made small: objective, optimizer and schedule are theirs. To accept a change:
`python tests/golden/test_encoder_curves.py` writes the curves anew; say in the commit why they moved.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import load_config
from megatfm.parallel import bootstrap
from tests.golden.curves import TOPICS, VOCABULARY, WORDS, curves

FOLDER = Path(__file__).parent
TOLERANCE = 1e-4
"""Relative; another CPU's float32 kernels differ by far less, a learning rate × 1.1 by more than ten times this."""
LENGTH = 14
"""Tokens of a document, its two marks included."""
FEW = 25
"""Steps after which another learning rate must have shown."""
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
    "schedule.warmup_steps": 10,
}
MODELS = {
    "bert-base": {"optimizer.lr": 2e-2, "model.init.std": 0.2, "train.steps": 120},
    "electra-small": {
        "model.d_model": 64, "model.ffn.d_ff": 128, "model.attention.n_heads": 4, "model.embedding.dim": 24,
        "model.generator.d_model": 16, "model.generator.d_ff": 32, "model.init.std": 0.1, "model.dropout": 0.0,
        "model.attention.dropout": 0.0, "objective.rate": 0.25, "optimizer.lr": 5e-3, "optimizer.betas": "[0.9, 0.98]",
        "train.steps": 140,
    },
}  # fmt: skip


def config_of(preset: str) -> dict[str, Any]:
    overrides = [f"{key}={value}" for key, value in (SMALL | MODELS[preset]).items()]
    return load_config(preset, overrides).model_dump()


def golden(preset: str) -> Path:
    return FOLDER / f"curve-{preset}.json"


@pytest.mark.slow
@pytest.mark.parametrize("preset", MODELS)
def test_the_curve_is_the_golden_one_and_another_learning_rate_is_not(preset: str, workers: Any) -> None:
    wanted = json.loads(golden(preset).read_text())
    (ours,) = workers.run(curves, 1, config_of(preset), timeout=200)
    assert ours.keys() == wanted.keys()
    for term, values in wanted.items():
        assert ours[term] == pytest.approx(values, rel=TOLERANCE), term
    (other,) = workers.run(curves, 1, config_of(preset), 1.1, FEW, timeout=100)
    for term, values in wanted.items():
        assert other[term] != pytest.approx(values[:FEW], rel=10 * TOLERANCE), term


def last(preset: str, term: str) -> float:
    """The mean over the last ten steps."""
    return sum(json.loads(golden(preset).read_text())[term][-10:]) / 10


def test_bert_learns_both_of_its_tasks() -> None:
    assert last("bert-base", "masked") < math.log(WORDS), "better than knowing the topic"
    assert last("bert-base", "sentence") < 0.75 * math.log(2), "better than guessing"


def test_electra_learns_both_of_its_tasks() -> None:
    """A discriminator that only knew that marks are never replaced, and how often others are, would stay at the
    entropy of that share."""
    assert last("electra-small", "generator") < 0.8 * math.log(TOPICS * WORDS), "better than any word"
    text = (LENGTH - 2) / LENGTH
    share = last("electra-small", "replaced") / text
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert last("electra-small", "discriminator") < 0.75 * text * entropy


if __name__ == "__main__":
    with bootstrap.joined(device="cpu"):
        for name in MODELS:
            found = curves(config_of(name))
            golden(name).write_text(json.dumps(found, indent=1) + "\n")
            for term, values in found.items():
                print(name, term, *(f"{value:.3f}" for value in values[::10]), f"{values[-1]:.3f}")
