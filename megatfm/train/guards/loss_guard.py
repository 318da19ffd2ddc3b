"""Numbers that go wrong: losses and gradients that are not finite, and loss spikes, and what is done about them."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatfm.config import ResilienceConfig
from megatfm.engines.interface import Engine, LossTotals, loss_scale_of
from megatfm.errors import MegatfmError
from megatfm.train.record.decisions import DecisionLog

MIN_RELATIVE_MAD = 1e-3
"""Of the median, as a floor for the deviation: a loss that hardly moves makes every other one a spike."""


@dataclass
class LossGuard:
    """Skips steps that are not finite, and finds loss spikes. Its memory is part of a checkpoint."""

    config: ResilienceConfig
    clip: float
    decisions: DecisionLog
    losses: deque[float] = field(init=False)
    consecutive_skips: int = 0
    skipped: int = 0
    is_in_spike: bool = False

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.config.spike_window)

    def state(self) -> dict[str, Any]:
        """What the guard remembers, as JSON: recent losses, steps skipped in a row and in all, whether losses leap."""
        return {
            "losses": list(self.losses),
            "in_a_row": self.consecutive_skips,
            "skipped": self.skipped,
            "leaping": self.is_in_spike,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the memory of a checkpoint; one that was written before there was any is as good as a start."""
        self.losses = deque(state.get("losses", ()), maxlen=self.config.spike_window)
        self.consecutive_skips, self.skipped = int(state.get("in_a_row", 0)), int(state.get("skipped", 0))
        self.is_in_spike = bool(state.get("leaping", False))

    def guarded_step(
        self, engine: Engine, step: int, stats: LossTotals, lr: float
    ) -> tuple[float, str | None]:
        """The engine's step, unless loss or gradient is not finite, or the step was skipped before.

        Returns the gradient norm, and what to say of a step that was skipped. Raises MegatfmError after too many
        in a row. Overflows of float16 are no decisions and don't count, as long as its scale can still be halved.
        """
        again = step in self.decisions.skips
        scale = loss_scale_of(engine)
        before, could_fall = (scale.value, scale.can_fall) if scale else (1.0, False)
        norm = engine.step(lr, self.clip, skip=again)
        if math.isfinite(norm):
            return norm, None
        loss = stats.loss
        if scale and could_fall and not again and math.isfinite(loss):
            return math.nan, (
                f"gradients overflow float16, whose loss scale falls from {before:g} to {scale.value:g}: the weights "
                "stay as they are"
            )
        self.consecutive_skips += 1
        self.skipped += 1
        if self.consecutive_skips > self.config.max_skipped:
            raise MegatfmError(
                f"step {step}: loss {loss}, gradient norm {norm}: not finite, {self.consecutive_skips} steps "
                "in a row, so the "
                "run ends (resilience.max_skipped). Resume with a lower optimizer.lr, or another train.precision"
            )
        self.decisions.skip(step)
        why = "as before" if again else f"loss {loss:.4g}, gradient norm {norm:.4g}"
        return (
            math.nan,
            f"{why}: not finite, so the weights stay as they are ({self.consecutive_skips} in a row)",
        )

    def record_rollback(self, spike: int, step: int, position: int) -> None:
        """Write down a rollback. Raises MegatfmError after too many to the same step."""
        if self.decisions.rollbacks.get(step, 0) >= self.config.max_rollbacks:
            raise MegatfmError(
                f"step {spike}: the loss spikes again after {self.config.max_rollbacks} rollbacks to step {step} "
                "(resilience.max_rollbacks). Resume with a lower optimizer.lr"
            )
        self.decisions.record_rollback(spike, step, position)

    def observe(self, loss: float) -> float | None:
        """Take in the loss of a step that was carried out; returns the score of a spike that begins with it."""
        self.consecutive_skips = 0
        score = self._score(loss)
        was_in_spike, self.is_in_spike = self.is_in_spike, score is not None
        self.losses.append(loss)
        return None if was_in_spike else score

    def _score(self, loss: float) -> float | None:
        if self.config.spike == "off" or len(self.losses) < self.config.spike_window // 4:
            return None
        median = statistics.median(self.losses)
        mad = 1.4826 * statistics.median(abs(other - median) for other in self.losses)
        score = (loss - median) / max(mad, MIN_RELATIVE_MAD * abs(median), 1e-12)
        return score if score > self.config.spike_score else None
