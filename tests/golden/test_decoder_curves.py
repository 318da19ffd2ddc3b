"""A small GPT-2 and a small T5 learn, and their loss curves are the golden ones.

They are the presets, made small: objective, optimizer and schedule are theirs. To accept a change:
`python tests/golden/test_decoder_curves.py` writes the curves anew; say in the commit why they moved.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import load_config
from megatfm.parallel import bootstrap
from tests.golden.curves import VOCABULARY, WORDS, curves

FOLDER = Path(__file__).parent
TOLERANCE = 1e-4
"""Relative; another CPU's float32 kernels differ by far less, a learning rate × 1.1 by more than ten times this."""
FEW = 30
"""Steps after which another learning rate must have shown."""
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
        "model.position.max_positions": 32, "model.init.std": 0.1, "optimizer.lr": 1e-2, "schedule.warmup_steps": 5,
        "train.steps": 60,
    },
    "t5-base": {
        "model.head.scale": 32**-0.5, "optimizer.lr": 0.1, "data.target_length": 16, "train.steps": 120,
    },
}  # fmt: skip


def config_of(preset: str) -> dict[str, Any]:
    overrides = [f"{key}={value}" for key, value in (SMALL | MODELS[preset]).items()]
    return load_config(preset, overrides).model_dump()


def golden(preset: str) -> Path:
    return FOLDER / f"curve-{preset}.json"


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


@pytest.mark.parametrize("preset", MODELS)
def test_learns(preset: str) -> None:
    """Better than knowing a text's topic: each token follows from the one before."""
    loss = json.loads(golden(preset).read_text())["loss"]
    assert sum(loss[-10:]) / 10 < 0.75 * math.log(WORDS)


if __name__ == "__main__":
    with bootstrap.joined(device="cpu"):
        for name in MODELS:
            found = curves(config_of(name))
            golden(name).write_text(json.dumps(found, indent=1) + "\n")
            for term, values in found.items():
                print(name, term, *(f"{value:.3f}" for value in values[::10]), f"{values[-1]:.3f}")
