"""A small mixture of experts learns, keeps its experts even, and its loss curve begins as the golden one.

It is the preset, made smaller still, with its own router, which a term of the loss evens out, and with one that a bias
does. To accept a change:
`python tests/golden/test_moe_curve.py` writes the curves anew; say in the commit why they moved.
"""

import math
from typing import Any

import pytest

from megatfm.config import load_config
from tests.golden.curves import SEEN, TOLERANCE, VOCABULARY, WORDS, curves, wanted, write
from tests.support.workers import Workers

PRESET, STEPS, GOLDEN = "quickstart-moe", 60, 24
WARM = 48
"""Steps after which experts are even."""
SMALL = {
    "model.vocab_size": VOCABULARY,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.ffn.d_ff": 32,
    "data.sequence_length": 32,
    "optimizer.lr": 1e-2,
    "lr_schedule.warmup_steps": 5,
    "train.steps": STEPS,
    "train.global_batch": 32,
}
ROUTERS = {
    PRESET: {},
    f"{PRESET}-deepseek-v3": {"model.ffn.router": '{name = "deepseek_v3", bias_update_rate = 0.01}'},
}
TERMS = {PRESET: {"causal", "balance"}, f"{PRESET}-deepseek-v3": set[str]()}
"""Beside the loss, where it is a sum."""


def config(name: str) -> dict[str, Any]:
    words = [f"{key}={value}" for key, value in (SMALL | ROUTERS[name]).items()]
    return load_config(PRESET, words).model_dump()


@pytest.mark.parametrize("name", ROUTERS)
def test_it_learns_evenly_and_begins_as_the_golden_curve(workers: Workers, name: str) -> None:
    """Better than knowing a text's topic, with no expert much busier than the mean once it has warmed up."""
    (result,) = workers.run(curves, 1, config(name), timeout=300)
    assert result.keys() == wanted(name).keys() == {"loss", "busiest"} | TERMS[name]
    for term, values in wanted(name).items():
        assert result[term][:GOLDEN] == pytest.approx(values, rel=TOLERANCE), term
    assert sum(result["loss"][-10:]) / 10 < 0.75 * math.log(WORDS)
    busiest = result["busiest"][WARM:]
    assert sum(busiest) / len(busiest) <= 1.5


def test_with_another_learning_rate_it_does_not(workers: Workers) -> None:
    (other,) = workers.run(curves, 1, config(PRESET), 1.1, 8, timeout=300)
    assert other["loss"] != pytest.approx(wanted(PRESET)["loss"][:8], rel=SEEN)


if __name__ == "__main__":
    write({name: (config(name), GOLDEN) for name in ROUTERS})
