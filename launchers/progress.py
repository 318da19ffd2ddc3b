"""How far a run is, from what it leaves in its directory. No torch: this runs on a login node."""

import math
import os
import socket
import statistics
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megatfm.config.base import check_path
from megatfm.errors import UsageError
from megatfm.launchers.files import (
    EVENTS,
    METRICS,
    latest_checkpoint_step,
    number_of,
    read_json,
    read_launch_record,
    tail_jsonl,
)
from megatfm.launchers.job import JobState, Launcher
from megatfm.launchers.local import LocalLauncher
from megatfm.launchers.mpi import MpiLauncher
from megatfm.launchers.preparation import is_prep_run, prep_job_state, prep_progress
from megatfm.launchers.queue import active_jobs, evaluation_job_ids
from megatfm.launchers.restarts import AttemptLog
from megatfm.launchers.site import Site
from megatfm.launchers.slurm import SlurmLauncher

SPEED_STEPS = 50
"""Last steps over whose median speed and time left are estimated."""
HEARTBEAT_SECONDS = 30.0
"""A run's lock moves every few seconds while it trains, wherever it does."""
CLOCK_SECONDS = 60.0
"""By how much the clocks of two machines may differ."""


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment. What is not known is None."""

    run: Path
    state: JobState
    launcher: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    restarts: int = 0
    checkpoint: int = 0
    event: str = ""
    work: str = ""
    """Of a preparation: stage and parts."""

    def as_dict(self) -> dict[str, Any]:
        """For programs: JSON's types only."""
        facts = {**vars(self), "run": str(self.run), "state": self.state.name, "detail": self.state.reason}
        return {"run": facts.pop("run"), "state": facts.pop("state"), **facts}


def launcher_of(run: Path) -> Launcher | None:
    """What started a run last; None where that was neither `megatfm launch` nor noted."""
    known: dict[str, Launcher] = {
        "slurm": SlurmLauncher(Site()),
        "local": LocalLauncher(),
        "mpi": MpiLauncher(),
    }
    return known.get(str(read_launch_record(run).get("launcher")))


def resolve_run_dir(path: Path) -> Path:
    """The run directory that a user names. Raises UsageError where there is none."""
    if not is_run_dir(path):
        raise UsageError(f"{path}: not a run directory: give one such as runs/quickstart")
    return check_path(path.absolute())


def is_run_dir(path: Path) -> bool:
    """Whether a folder holds any trace of a run, though it may not have started yet."""
    return any((path / name).is_file() for name in ("config.toml", "launch.json", METRICS))


def list_run_dirs() -> list[Path]:
    """The run directories under runs/. Raises UsageError where there is none."""
    folders = sorted(Path("runs").iterdir()) if Path("runs").is_dir() else []
    if not (runs := [path.absolute() for path in folders if is_run_dir(path)]):
        raise UsageError("no runs under runs/ here: name a run directory")
    return runs


def run_status(run: Path) -> RunStatus:
    """How a run is now."""
    launcher = launcher_of(run)
    records = tail_jsonl(run / METRICS, SPEED_STEPS)
    events = tail_jsonl(run / EVENTS, 1)
    steps, last = _steps(run), records[-1] if records else {}
    state = launcher.status(run) if launcher else _state_from_lock(run, events)
    prepares = is_prep_run(run)
    if prepares:
        state = prep_job_state(run, state)
    for job, evaluation in active_jobs(evaluation_job_ids(run)).items():
        detail = f"{state.reason}; " if state.reason else ""
        state = replace(state, reason=f"{detail}evaluation in job {job}: {evaluation.name}")
    reached = number_of(last, "step")
    step = int(reached) if reached is not None and math.isfinite(reached) else None
    seconds = [value for each in records if (value := number_of(each, "step_seconds")) is not None]
    speeds = [value for each in records if (value := number_of(each, "tokens_per_second")) is not None]
    left = (steps - step) * statistics.median(seconds) if seconds and steps and step is not None else None
    detail = f"{events[0].get('event')}: {events[0].get('detail')}" if events else ""
    return RunStatus(
        run=run,
        state=state,
        launcher=str(read_launch_record(run).get("launcher", "")),
        step=step,
        steps=steps,
        loss=number_of(last, "loss"),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=None if state.is_over or state.is_unknown else left,
        restarts=_restarts(run),
        checkpoint=latest_checkpoint_step(run),
        event=detail,
        work=prep_progress(run) if prepares else "",
    )


def _steps(run: Path) -> int | None:
    """Steps that are due: of the config that trains, else of the one that is queued."""
    for name in ("config.toml", "slurm/config.toml"):
        try:
            return int(tomllib.loads((run / name).read_text(encoding="utf-8"))["train"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _restarts(run: Path) -> int:
    """How often the last submission was started again."""
    attempts = AttemptLog(run).attempts
    return sum(each.submission == attempts[-1].submission for each in attempts) - 1 if attempts else 0


def _state_from_lock(run: Path, events: list[dict[str, Any]]) -> JobState:
    """A run that was started by hand: its lock says whether it trains, its last event what became of it."""
    holder = read_json(run / "lock", {})
    if isinstance(holder, dict) and "pid" in holder and _lock_is_held(run, holder):
        return JobState("RUNNING", f"pid {holder['pid']} on {holder.get('host')}", number_of(holder, "time"))
    words = {"finished": "DONE", "stopped": "STOPPED"}
    event = str(events[0].get("event")) if events else ""
    return JobState(words.get(event, "ENDED"), str(events[0].get("detail", "")) if events else "")


def _lock_is_held(run: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder of a run's lock lives: its process here, or whoever moves the file from another machine."""
    if holder.get("host") == socket.gethostname():
        taken, pid = number_of(holder, "time"), number_of(holder, "pid")
        try:
            # One that began after the lock was taken got the number of a dead one.
            return pid is not None and psutil.Process(int(pid)).create_time() < (taken or math.inf) + 1
        except (psutil.Error, ValueError, OverflowError):
            return False
    try:
        moved = (run / "lock").stat().st_mtime
    except OSError:
        return False
    try:  # by the clock of the file server, from which this machine's may differ
        now = run / f".now.{os.getpid()}"
        now.touch()
        age = now.stat().st_mtime - moved
        now.unlink()
        return age < HEARTBEAT_SECONDS
    except OSError:  # a directory that can't be written to
        return time.time() - moved < HEARTBEAT_SECONDS + CLOCK_SECONDS
