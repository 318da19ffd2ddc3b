"""Numbers that go wrong: a loss or gradient that is not finite, and a loss that leaps.

What is done about them is a decision of the run. It is written to `decisions.jsonl` before it is carried out, so that
a resume from any checkpoint, on any layout, takes the same decisions again.
"""

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm.checkpoint import disk
from megatfm.config import ResilienceConfig
from megatfm.engines.interface import Engine
from megatfm.errors import MegatfmError
from megatfm.parallel.agreement import run_on_rank_0

DECISIONS = "decisions.jsonl"
SMALLEST_SPREAD = 1e-3
"""Of the median, as a floor for the deviation: a loss that hardly moves makes every other a leap."""


@dataclass
class Decisions:
    """What was decided in this run: steps that are skipped, and steps after which the data goes on elsewhere."""

    path: Path
    is_writer: bool
    skips: set[int] = field(default_factory=set)
    jumps: dict[int, int] = field(default_factory=dict)
    """After this step the data goes on from this position."""
    rollbacks: dict[int, int] = field(default_factory=dict)
    """How often the run came back to this step."""

    def read(self) -> None:
        """Take up what was decided before; all ranks together. Raises MegatfmError for a file that can't be read."""
        self.skips, self.jumps, self.rollbacks = set(), {}, {}
        for record in run_on_rank_0(lambda: _read(self.path)):
            self._apply(record)

    def forget(self) -> None:
        """A run from the start has decided nothing yet."""
        self.skips, self.jumps, self.rollbacks = set(), {}, {}
        if self.is_writer:
            self.path.unlink(missing_ok=True)

    def skip(self, step: int) -> None:
        """This step changes no weights."""
        if step not in self.skips:
            self._write({"decision": "skip", "step": step})

    def go_back(self, leap: int, step: int, position: int) -> None:
        """Because of a leap, the run goes back to the end of a step, and on from a later position of the data."""
        self._write({"decision": "rollback", "leap": leap, "step": step, "position": position})

    def _write(self, record: dict[str, Any]) -> None:
        self._apply(record)
        if self.is_writer:
            try:
                with self.path.open("ab") as file:
                    whole = self.path.read_bytes().rfind(b"\n") + 1
                    file.truncate(whole)  # a kill may have torn the last line
                    file.write(json.dumps({**record, "check": _check(record)}).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                if not whole:  # the file's name may be new
                    disk.sync_folder(self.path.parent)
            except OSError as error:
                raise MegatfmError(f"can't write {self.path}: {error.strerror}") from error

    def _apply(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if record["decision"] == "skip":
            self.skips.add(step)
            return
        # What was decided about later steps was decided about other data.
        self.skips = {other for other in self.skips if other <= step}
        self.jumps = {other: at for other, at in self.jumps.items() if other < step}
        self.jumps[step] = int(record["position"])
        self.rollbacks[step] = self.rollbacks.get(step, 0) + 1


@dataclass
class LossGuard:
    """Looks at each step's loss and gradient norm. Its memory is part of a checkpoint."""

    config: ResilienceConfig
    clip: float
    decisions: Decisions
    losses: deque[float] = field(init=False)
    in_a_row: int = 0
    skipped: int = 0
    leaping: bool = False

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.config.spike_window)

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "in_a_row": self.in_a_row,
            "skipped": self.skipped,
            "leaping": self.leaping,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the memory of a checkpoint; one that was written before there was any is as good as a start."""
        self.losses = deque(state.get("losses", ()), maxlen=self.config.spike_window)
        self.in_a_row, self.skipped = int(state.get("in_a_row", 0)), int(state.get("skipped", 0))
        self.leaping = bool(state.get("leaping", False))

    def guarded_step(self, engine: Engine, step: int, loss: float, lr: float) -> tuple[float, str | None]:
        """The engine's step, unless loss or gradient is not finite, or the step was skipped before.

        Returns the gradient norm, and what to say of a step that was skipped. Raises MegatfmError after too many
        in a row.
        """
        again = step in self.decisions.skips
        norm = engine.step(lr, self.clip, skip=again or not math.isfinite(loss))
        if math.isfinite(norm):
            return norm, None
        self.in_a_row += 1
        self.skipped += 1
        if self.in_a_row > self.config.max_skipped:
            raise MegatfmError(
                f"step {step}: loss {loss}, gradient norm {norm}: not finite, {self.in_a_row} steps in a row, so the "
                "run ends (resilience.max_skipped). Resume with a lower optimizer.lr, or another train.precision"
            )
        self.decisions.skip(step)
        why = "as before" if again else f"loss {loss:.4g}, gradient norm {norm:.4g}"
        return math.nan, f"{why}: not finite, so the weights stay as they are ({self.in_a_row} in a row)"

    def go_back(self, leap: int, step: int, position: int) -> None:
        """Write down a rollback. Raises MegatfmError after too many to the same step."""
        if self.decisions.rollbacks.get(step, 0) >= self.config.max_rollbacks:
            raise MegatfmError(
                f"step {leap}: the loss leaps again after {self.config.max_rollbacks} rollbacks to step {step} "
                "(resilience.max_rollbacks). Resume with a lower optimizer.lr"
            )
        self.decisions.go_back(leap, step, position)

    def goes_on(self, loss: float) -> float | None:
        """Take in the loss of a step that was carried out; returns the score of a leap that begins with it."""
        self.in_a_row = 0
        score = self._score(loss)
        was_leaping, self.leaping = self.leaping, score is not None
        self.losses.append(loss)
        return None if was_leaping else score

    def _score(self, loss: float) -> float | None:
        if self.config.spike == "off" or len(self.losses) < self.config.spike_window // 4:
            return None
        middle = statistics.median(self.losses)
        spread = 1.4826 * statistics.median(abs(other - middle) for other in self.losses)
        score = (loss - middle) / max(spread, SMALLEST_SPREAD * abs(middle), 1e-12)
        return score if score > self.config.spike_score else None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        *lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise MegatfmError(f"can't read {path}: {error.strerror}") from error
    if b"}" in torn[:-1]:  # a whole line, but for its end
        lines.append(torn)
    records = []
    for number, line in enumerate(lines):  # what a kill tore was never carried out
        try:
            record = json.loads(line)
            if record.pop("check") != _check(record):
                raise ValueError
            records.append({"decision": record["decision"], "step": int(record["step"]), **record})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MegatfmError(
                f"{path}, line {number + 1}: damaged: restore or remove the file; it says which steps the run skips"
            ) from error
    return records


def _check(record: Mapping[str, Any]) -> str:
    """Tells a line that was changed: its decision would be another."""
    return blake3(json.dumps(record).encode()).hexdigest(16)
