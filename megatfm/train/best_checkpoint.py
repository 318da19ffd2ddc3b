"""The checkpoint that did best on the first validation set, which a task keeps."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm import checkpoint
from megatfm.checkpoint.directory import check_checkpoint
from megatfm.config import TaskConfig

log = logging.getLogger("megatfm")


class BestCheckpoint:
    """The step with the best metric so far; of equals, the first. A run without a task has none."""

    def __init__(self, task: TaskConfig | None, folder: Path) -> None:
        self._task, self._folder = task, folder
        self.step: int | None = None
        self.value = 0.0

    def update(self, step: int, evaluation: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare the results of a step's evaluation, by name of the set."""
        first = next(iter(evaluation.values()), {})
        if self._task is None or not first:
            return
        by_loss = self._task.best_by == "loss"
        value = -float(first["loss"]) if by_loss else float(first["metrics"][self._task.best_by])
        if self.step is None or value > self.value:
            self.step, self.value = step, value

    @property
    def path(self) -> Path | None:
        """Folder of the best checkpoint, which is to stay; None before the first evaluation."""
        return None if self.step is None else self._folder / f"step-{self.step:08d}"

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        if self._task is None or self.step is None:
            return {}
        return {"best": {"step": self.step, "metric": self._task.best_by, "value": self.value}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds, where it is of the same metric."""
        stored = state.get("best")
        self.step, self.value = None, 0.0
        if self._task and isinstance(stored, Mapping) and stored.get("metric") == self._task.best_by:
            self.step, self.value = int(stored["step"]), float(stored["value"])


def best_checkpoint(run_dir: str | Path) -> Path:
    """Return the best checkpoint that a run recorded, if it is whole, else its newest one; a checkpoint as it is.

    Raises UsageError where there is none.
    """
    newest = checkpoint.find_checkpoint(run_dir)
    if newest == Path(run_dir):
        return newest
    best = checkpoint.read_state(newest).get("best")
    if isinstance(best, Mapping):
        path = newest.with_name(f"step-{best['step']:08d}")
        if path.is_dir() and check_checkpoint(path) is None:
            return path
    return newest
