"""A small mixture of experts learns, keeps its experts even, and its loss curve begins as the golden one.

It is the preset, made smaller still, with its own router, which a term of the loss evens out, and with one that a bias
does. To accept a change:
`python tests/golden/test_moe_curve.py` writes the curves anew; say in the commit why they moved.
"""

import math

import pytest

from tests.support.golden_curves import (
    MOE_GOLDEN_STEPS,
    MOE_PRESET,
    MOE_ROUTERS,
    SEEN,
    TOLERANCE,
    WORDS,
    curves,
    moe_curve_config,
    wanted,
    write,
)
from tests.support.workers import Workers

WARM = 48
"""Steps after which experts are even."""
TERMS = {MOE_PRESET: {"causal", "balance"}, f"{MOE_PRESET}-deepseek-v3": set[str]()}
"""Beside the loss, where it is a sum."""


@pytest.mark.parametrize("name", MOE_ROUTERS)
def test_the_mixture_learns_evenly_and_begins_as_the_golden_curve(workers: Workers, name: str) -> None:
    """Better than knowing a text's topic, with no expert much busier than the mean once it has warmed up."""
    (result,) = workers.run(curves, 1, moe_curve_config(name), timeout=300)
    assert result.keys() == wanted(name).keys() == {"loss", "busiest"} | TERMS[name]
    for term, values in wanted(name).items():
        assert result[term][:MOE_GOLDEN_STEPS] == pytest.approx(values, rel=TOLERANCE), term
    assert sum(result["loss"][-10:]) / 10 < 0.75 * math.log(WORDS)
    busiest = result["busiest"][WARM:]
    assert sum(busiest) / len(busiest) <= 1.5


def test_another_learning_rate_leaves_the_golden_curve(workers: Workers) -> None:
    (other,) = workers.run(curves, 1, moe_curve_config(MOE_PRESET), 1.1, 8, timeout=300)
    assert other["loss"] != pytest.approx(wanted(MOE_PRESET)["loss"][:8], rel=SEEN)


if __name__ == "__main__":
    write({name: (moe_curve_config(name), MOE_GOLDEN_STEPS) for name in MOE_ROUTERS})
