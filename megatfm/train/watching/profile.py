"""A torch profile of chosen steps (`log.profile = "10:13"`)."""

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from megatfm.train.record.run_directory import RunDirectory


class StepProfile:
    """While entered, records steps first … end−1 of "first:end" into profile/rank-K-steps-FIRST-END.json (a Chrome
    trace); where the run comes to them again, after a rollback or a restart, into another file beside it.

    Call `before(step)` ahead of each step.
    """

    def __init__(self, steps: str | None, run: RunDirectory) -> None:
        self._first, self._end = (int(part) for part in steps.split(":")) if steps else (0, 0)
        name = f"rank-{run.rank}-steps-{self._first}-{self._end}"
        self._path: Path = run.folder / "profile" / f"{name}.json"
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def before_step(self, step: int) -> None:
        """Start or end the recording if this step is the first or the one after the last."""
        if self._first <= step < self._end and self._profile is None:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
            self._profile.start()
        elif step >= self._end:
            self._finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profile:
            self._profile.stop()
            self._path.parent.mkdir(exist_ok=True)
            path, again = self._path, 1
            while path.exists():
                again += 1
                path = self._path.with_stem(f"{self._path.stem}-{again}")
            self._profile.export_chrome_trace(str(path))
            self._profile = None
