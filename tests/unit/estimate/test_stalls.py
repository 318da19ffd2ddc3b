"""Stalls: loads of experts against drawn ones, checkpoints and data by hand."""

import numpy as np
import pytest

from megatfm.config import Config, load_config
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import estimator
from megatfm.estimate.stalls import MAX_VIOLATION_BY_LOSS, data_stall, fullest_share


def drawn_share(experts: int, ranks: int, tokens: int, top_k: int, spread: float) -> float:
    """Ninth decile of the fullest rank's load over the mean, of drawn preferences and drawn choices."""
    draw, shares = np.random.default_rng(5), []
    for _ in range(3000):
        wanted = np.clip(1 + spread * draw.standard_normal(experts), 0, None)
        loads = draw.multinomial(tokens * top_k, wanted / wanted.sum()).reshape(ranks, -1).sum(1)
        shares.append(loads.max() / loads.mean())
    return float(np.quantile(shares, 0.9))


@pytest.mark.parametrize(("preset", "ep"), [("mixtral-8x7b", 8), ("olmoe-1b-7b", 16)])
def test_the_fullest_rank_is_that_of_drawn_loads(preset: str, ep: int) -> None:
    config = load_config(preset, [f"parallel.ep={ep}"])
    ffn, tokens = config.model.ffn, 4096 * ep
    experts, top_k = ffn.tp_dims["n_experts"], int(getattr(ffn, "top_k", 0))
    # A spread by which the fullest of 64 experts has 1 + MaxVio times the mean in half of the draws.
    draw = np.random.default_rng(2)
    largest = np.median(draw.standard_normal((20000, 64)).max(1))
    expected = drawn_share(experts, ep, tokens, top_k, MAX_VIOLATION_BY_LOSS / float(largest))
    assert fullest_share(config, tokens) == pytest.approx(expected, rel=0.03)
    assert fullest_share(config, tokens, quantile=0.5) < fullest_share(config, tokens)


def test_experts_with_a_capacity_get_no_more() -> None:
    config = load_config(
        "switch-base-8", ["parallel.ep=8", "model.layer_type.sparse.ffn.capacity_factor=1.25"]
    )
    assert fullest_share(config, 64) == 1.25


def step_of(*overrides: str) -> tuple[Config, dict[str, float]]:
    with estimator(load_config("gpt2-124m", list(overrides)), load_cluster("h100", 8)) as opened:
        estimate = opened.estimate(opened.base)
    return estimate.config, vars(estimate.time) | {
        "step": estimate.time.step,
        "state": _state(estimate.memory),
    }


def _state(memory: object) -> float:
    return max(rank.weights + rank.optimizer for rank in memory)  # type: ignore[attr-defined]


def test_a_step_has_its_share_of_checkpoints() -> None:
    """All state of eight ranks at 5 GB/s each 20 steps; in the background, a copy of each rank's at 20 GB/s."""
    _, waiting = step_of("checkpoint.every=20", "checkpoint.mode=sync")
    assert waiting["checkpoint"] == pytest.approx(8 * waiting["state"] / 5e9 / 20)
    _, behind = step_of("checkpoint.every=1000")
    assert behind["checkpoint"] == pytest.approx(behind["state"] / 20e9 / 1000)
    _, rushed = step_of("checkpoint.every=1")
    without = rushed["step"] - rushed["checkpoint"]
    assert rushed["checkpoint"] == pytest.approx(rushed["state"] / 20e9 + 8 * rushed["state"] / 5e9 - without)


def test_rows_are_waited_for_where_they_come_late() -> None:
    config, step = step_of()
    assert step["data"] == 0
    rows = config.train.global_batch / 8
    assert data_stall(config, 1e-9) == pytest.approx(rows * 1024 / 36.7e6, rel=1e-3)
    more = config.model_copy(update={"data": config.data.model_copy(update={"workers": 4})})
    assert data_stall(more, 1e-9) == pytest.approx(rows * 1024 / 36.7e6 / 4, rel=1e-3)
