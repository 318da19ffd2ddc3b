"""The best checkpoint by a metric on the first validation set, and early stopping (`train.patience`)."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm import checkpoint
from megatfm.checkpoint.directory import check_checkpoint, name_checkpoint
from megatfm.config import Config
from megatfm.errors import MegatfmError
from megatfm.files import replace_non_finite

log = logging.getLogger("megatfm")

FINISHED_EARLY = "finished early"
"""Event of a run that early stopping (`train.patience`) ended before its last step."""


class BestCheckpoint:
    """Tracks the step with the best metric so far; the first one if several are equal.

    The metric is the task's `best_by`; without a task it is the loss if `train.patience` is set, else nothing is
    tracked.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder, self._patience = folder, config.train.patience
        self._metric = config.task.best_by if config.task else "loss" if self._patience else None
        self.step: int | None = None
        self.value, self.evaluations_since = 0.0, 0

    def update(self, step: int, evaluation: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare the results of a step's evaluation (validation set → results) with the best ones so far."""
        first = next(iter(evaluation.values()), {})
        if self._metric is None or not first:
            return
        by_loss = self._metric == "loss"
        value = -float(first["loss"]) if by_loss else float(first["metrics"][self._metric])
        self.evaluations_since += 1
        is_first_number = math.isnan(self.value) and not math.isnan(value)
        if self.step is None or value > self.value or is_first_number:
            self.step, self.value, self.evaluations_since = step, value, 0

    @property
    def is_stale(self) -> bool:
        """Whether the last `train.patience` evaluations brought no improvement, so that the run ends."""
        return 0 < self._patience <= self.evaluations_since

    @property
    def reason(self) -> str:
        """Why early stopping ends the run."""
        return f"{self._metric} was best at step {self.step}, {self.evaluations_since} evaluations before"

    @property
    def path(self) -> Path | None:
        """Folder of the best checkpoint, which must not be deleted; None before the first evaluation."""
        return None if self.step is None else self._folder / name_checkpoint(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        if self._metric is None or self.step is None:
            return {}
        best = {"step": self.step, "metric": self._metric, "value": replace_non_finite(self.value)}
        return {"best": best | {"evaluations_since": self.evaluations_since}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint, if it is of the same metric; else the initial state."""
        stored = state.get("best")
        self.step, self.value, self.evaluations_since = None, 0.0, 0
        if self._metric and isinstance(stored, Mapping) and stored.get("metric") == self._metric:
            self.step, self.value = int(stored["step"]), float(stored["value"])
            self.evaluations_since = int(stored.get("evaluations_since", 0))


def find_best_checkpoint(run_dir: str | Path) -> Path:
    """Return a run's best checkpoint if it has recorded one that is intact, else its newest one.

    The path of a checkpoint is returned unchanged. Raises UsageError if there is no checkpoint, MegatfmError
    if its record of the best one is damaged.
    """
    newest = checkpoint.find_checkpoint(run_dir)
    if newest == Path(run_dir):
        return newest
    best = checkpoint.read_state(newest).get("best")
    if isinstance(best, Mapping):
        step = best.get("step")
        if type(step) is not int:
            raise MegatfmError(f"{newest}: damaged: the step of the best checkpoint is {step!r:.40}")
        path = newest.with_name(name_checkpoint(step))
        if path.is_dir() and check_checkpoint(path) is None:
            return path
        text = "%s: the best checkpoint, of step %d, is not here or not intact: %s is used"
        log.warning(text, run_dir, step, newest.name)
    return newest
