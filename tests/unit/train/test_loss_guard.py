"""Leaps and steps that are skipped: what counts as one, and what is remembered of the decision."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm.config import ResilienceConfig
from megatfm.engines.interface import LossTotals
from megatfm.engines.losses import LossScale
from megatfm.errors import MegatfmError
from megatfm.train.decision_log import DECISIONS, DecisionLog
from megatfm.train.resilience import LossGuard


class Engine:
    """An engine of one number: a step moves it by the gradient, unless that is not finite."""

    def __init__(self) -> None:
        self.weight, self.gradient, self.loss = 1.0, torch.tensor([0.0]), 0.0
        self.loss_scale: LossScale | None = None

    def step(self, lr: float, clip: float, *, skip: bool) -> float:
        norm = math.nan if skip or not math.isfinite(self.loss) else float(self.gradient.abs())
        if math.isfinite(norm):
            self.weight -= lr * float(self.gradient)
        return norm


def guard(path: Path, **settings: Any) -> LossGuard:
    return LossGuard(ResilienceConfig(**settings), 1.0, DecisionLog(path / DECISIONS, is_writer=True))


def carried_out(loss_guard: LossGuard, engine: Engine, step: int, loss: float, gradient: float) -> bool:
    engine.gradient, engine.loss = torch.tensor([gradient]), loss
    stats = LossTotals({"causal": 1.0}, lambda: [loss, 1.0])
    norm, output = loss_guard.take_step(engine, step, stats, 0.1)  # type: ignore[arg-type]
    assert (output is None) == math.isfinite(norm)
    return output is None


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.inf), (2.0, math.nan)])
def test_a_non_finite_step_leaves_the_weights_and_is_counted(tmp_path: Path, loss: float, gradient: float) -> None:
    loss_guard, engine = guard(tmp_path), Engine()
    assert carried_out(loss_guard, engine, 1, 2.0, 1.0)
    loss_guard.observe(2.0)
    before = engine.weight
    assert not carried_out(loss_guard, engine, 2, loss, gradient)
    assert (engine.weight, loss_guard.consecutive_skips, loss_guard.skipped) == (before, 1, 1)
    assert carried_out(loss_guard, engine, 3, 2.0, 1.0)
    loss_guard.observe(2.0)
    assert (loss_guard.consecutive_skips, loss_guard.skipped) == (0, 1)
    assert engine.weight < before
    line = json.loads((tmp_path / DECISIONS).read_text())
    assert {key: line[key] for key in line if key != "check"} == {"decision": "skip", "step": 2}


def test_float16_may_halve_its_scale_as_often_as_it_takes_to_settle(tmp_path: Path) -> None:
    """From 2²⁴ down to 1 it takes 24 steps; at 1, an overflow is one of the gradients themselves, and so counts."""
    loss_guard, engine = guard(tmp_path, max_skipped=2), Engine()
    engine.loss_scale = LossScale(initial=2.0**24)
    genuine = engine.step

    def step(lr: float, clip: float, *, skip: bool) -> float:
        norm = genuine(lr, clip, skip=skip)
        engine.loss_scale.update(math.isfinite(norm))
        return norm

    engine.step = step  # type: ignore[method-assign]
    for number in range(24):
        assert engine.loss_scale.value == 2.0 ** (24 - number)
        assert not carried_out(loss_guard, engine, number + 1, 2.0, math.inf)
    assert (loss_guard.consecutive_skips, loss_guard.skipped) == (0, 0)
    assert not (tmp_path / DECISIONS).exists()
    for number in (25, 26):
        assert not carried_out(loss_guard, engine, number, 2.0, math.inf)
    with pytest.raises(MegatfmError, match=r"step 27: .* 3 steps in a row"):
        carried_out(loss_guard, engine, 27, 2.0, math.inf)


def test_a_loss_that_is_not_finite_counts_at_any_scale(tmp_path: Path) -> None:
    loss_guard, engine = guard(tmp_path, max_skipped=2), Engine()
    engine.loss_scale = LossScale()
    assert not carried_out(loss_guard, engine, 1, math.nan, 1.0)
    assert (loss_guard.consecutive_skips, loss_guard.decisions.skips) == (1, {1})


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    loss_guard, engine = guard(tmp_path, max_skipped=2), Engine()
    for step in (1, 2):
        assert not carried_out(loss_guard, engine, step, math.nan, 1.0)
    reason = r"step 3: loss 6\.908, .* 3 steps in a row, .*lower optimizer\.lr and resume\.allow=optimizer"
    with pytest.raises(MegatfmError, match=reason):
        carried_out(loss_guard, engine, 3, 6.907755278982137, math.nan)


def test_a_skipped_step_is_skipped_again_with_any_values(tmp_path: Path) -> None:
    carried_out(guard(tmp_path), Engine(), 5, math.nan, 1.0)
    resumed, engine = guard(tmp_path), Engine()
    resumed.decisions.read()
    assert carried_out(resumed, engine, 4, 2.0, 1.0)
    before = engine.weight
    assert not carried_out(resumed, engine, 5, 2.0, 1.0)
    assert engine.weight == before
    assert (tmp_path / DECISIONS).read_text().count("\n") == 1, "decided once"


def noise(seed: int, count: int) -> list[float]:
    draw = random.Random(seed)
    return [3.0 + draw.gauss(0, 0.05) for _ in range(count)]


def spikes(loss_guard: LossGuard, losses: list[float]) -> list[int]:
    return [index for index, loss in enumerate(losses) if loss_guard.observe(loss) is not None]


def test_a_spike_is_found_once_and_noise_and_descent_are_not(tmp_path: Path) -> None:
    assert spikes(guard(tmp_path), noise(0, 500)) == []
    assert spikes(guard(tmp_path), [10 * math.exp(-step / 50) + loss for step, loss in enumerate(noise(1, 500))]) == []
    losses = noise(2, 300)
    losses[200:204] = [9.0, 8.0, 8.5, 9.0]
    assert spikes(guard(tmp_path), losses) == [200], "the steps after it belong to it"


def test_the_score_is_robust_and_says_how_far(tmp_path: Path) -> None:
    loss_guard = guard(tmp_path, spike_window=16, spike_score=10.0)
    for loss in [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 50.0]:  # an outlier in the window doesn't hide the next one
        loss_guard.observe(loss)
    loss_guard.observe(1.0)
    score = loss_guard.observe(6.0)
    # By hand: median 1.0 and median deviation 0.1 → (6 − 1) / (1.4826 · 0.1).
    assert score == pytest.approx(5.0 / 0.14826, rel=1e-6)


def test_too_few_losses_and_off_find_nothing(tmp_path: Path) -> None:
    assert spikes(guard(tmp_path, spike_window=128), [*noise(0, 31), 100.0]) == []
    assert spikes(guard(tmp_path, spike_window=128), [*noise(0, 32), 100.0]) == [32]
    assert spikes(guard(tmp_path, spike="off"), [*noise(0, 100), 100.0]) == []


def test_a_loss_that_stands_still_makes_no_spike_of_the_next_bit(tmp_path: Path) -> None:
    assert spikes(guard(tmp_path), [*[2.0] * 60, 2.0001]) == []
    assert spikes(guard(tmp_path), [*[2.0] * 60, 2.1]) == [60]


def test_the_memory_goes_through_a_checkpoint(tmp_path: Path) -> None:
    losses = noise(3, 100)
    loss_guard = guard(tmp_path)
    spikes(loss_guard, losses[:70])
    copy = guard(tmp_path)
    copy.load_state_dict(json.loads(json.dumps(loss_guard.state_dict())))
    assert copy.state_dict() == loss_guard.state_dict()
    assert (
        [loss_guard.observe(loss) for loss in (9.0, 3.0)] == [copy.observe(loss) for loss in (9.0, 3.0)] != [None, None]
    )
    old = guard(tmp_path)
    old.load_state_dict({})
    assert old.state_dict() == guard(tmp_path).state_dict()


def test_a_rollback_voids_what_was_decided_about_other_data(tmp_path: Path) -> None:
    loss_guard = guard(tmp_path, max_rollbacks=2)
    decisions = loss_guard.decisions
    for step in (3, 7):
        decisions.skip(step)
    decisions.record_rollback(9, 4, 90)
    assert (decisions.skips, decisions.data_resume_positions) == ({3}, {4: 90})
    decisions.skip(6)
    decisions.record_rollback(12, 8, 130)
    assert (decisions.skips, decisions.data_resume_positions) == ({3, 6}, {4: 90, 8: 130})
    loss_guard.record_rollback(13, 4, 140)
    reread = DecisionLog(decisions.path, is_writer=False)
    reread.read()
    assert (reread.skips, reread.data_resume_positions, reread.rollbacks) == ({3}, {4: 140}, {4: 2, 8: 1})
    with pytest.raises(MegatfmError, match="step 15: the loss spikes again after 2 rollbacks to step 4"):
        loss_guard.record_rollback(15, 4, 160)
    decisions.clear()
    assert not decisions.path.exists()


def test_a_torn_last_line_is_nothing(tmp_path: Path) -> None:
    decisions = DecisionLog(tmp_path / DECISIONS, is_writer=True)
    decisions.skip(2)
    first = decisions.path.read_bytes()
    decisions.skip(3)
    contents = decisions.path.read_bytes()
    for end in range(len(first), len(contents)):
        decisions.path.write_bytes(contents[:end])
        decisions.read()
        assert decisions.skips == {2}
    decisions.skip(4)
    decisions.read()
    assert decisions.skips == {2, 4}


def test_every_bit_that_flips_in_what_was_decided_is_seen(tmp_path: Path) -> None:
    decisions = DecisionLog(tmp_path / DECISIONS, is_writer=True)
    decisions.skip(17)
    decisions.record_rollback(29, 20, 300)
    content = decisions.path.read_bytes()
    for position in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        decisions.path.write_bytes(flipped)
        with pytest.raises(MegatfmError, match=r"decisions\.jsonl, line \d: damaged: restore or remove"):
            decisions.read()


@pytest.mark.parametrize("planted", [b"\x80\x04}.\n", b"[1]\n", b'{"decision": "skip", "step": 2}\n'])
def test_foreign_lines_among_decisions_are_damage(tmp_path: Path, planted: bytes) -> None:
    (tmp_path / DECISIONS).write_bytes(planted)
    with pytest.raises(MegatfmError, match=r"decisions\.jsonl, line 1: damaged"):
        DecisionLog(tmp_path / DECISIONS, is_writer=True).read()


def test_steps_are_tried_again_where_the_settings_that_spoiled_them_changed(tmp_path: Path) -> None:
    decisions = DecisionLog(tmp_path / DECISIONS, is_writer=True)
    for step in (3, 8, 9):
        decisions.skip(step)
    decisions.record_rollback(7, 6, 100)
    for step in (8, 9):
        decisions.skip(step)
    reread = DecisionLog(tmp_path / DECISIONS, is_writer=True)
    reread.read()
    assert reread.retry_after(6) == [8, 9]
    assert reread.retry_after(6) == []
    for actual in (reread, DecisionLog(tmp_path / DECISIONS, is_writer=False)):
        actual.read()
        assert (actual.skips, actual.data_resume_positions, actual.rollbacks) == ({3}, {6: 100}, {6: 1})
