"""A small mixture of experts learns, keeps its experts even, and its loss curve begins as the golden one.

It is the preset, made smaller still. To accept a change:
`python tests/golden/test_moe_curve.py` writes the curve anew; say in the commit why it moved.
"""

import math
from typing import Any

import pytest

from megatfm.config import load_config
from tests.golden.curves import SEEN, TOLERANCE, VOCABULARY, WORDS, curves, wanted, write
from tests.workers import Workers

PRESET, STEPS, GOLDEN = "quickstart-moe", 60, 24
WARM = 36
"""Steps after which experts are even: each bias has moved by up to 0.36 by then."""
SMALL = {
    "model.vocab_size": VOCABULARY,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.ffn.d_ff": 32,
    "data.sequence_length": 32,
    "optimizer.lr": 1e-2,
    "schedule.warmup_steps": 5,
    "train.steps": STEPS,
    "train.global_batch": 32,
}


def config() -> dict[str, Any]:
    return load_config(PRESET, [f"{key}={value}" for key, value in SMALL.items()]).model_dump()


def test_it_learns_evenly_and_begins_as_the_golden_curve(workers: Workers) -> None:
    """Better than knowing a text's topic, with no expert much busier than the mean once it has warmed up."""
    (ours,) = workers.run(curves, 1, config(), timeout=300)
    assert ours.keys() == wanted(PRESET).keys() == {"loss", "busiest"}
    for term, values in wanted(PRESET).items():
        assert ours[term][:GOLDEN] == pytest.approx(values, rel=TOLERANCE), term
    assert sum(ours["loss"][-10:]) / 10 < 0.75 * math.log(WORDS)
    assert max(ours["busiest"][WARM:]) <= 1.5


def test_with_another_learning_rate_it_does_not(workers: Workers) -> None:
    (other,) = workers.run(curves, 1, config(), 1.1, 8, timeout=300)
    assert other["loss"] != pytest.approx(wanted(PRESET)["loss"][:8], rel=SEEN)


if __name__ == "__main__":
    write({PRESET: (config(), GOLDEN)})
