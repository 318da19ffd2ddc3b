"""Status of a run or a preparation, from the files in its directory. No torch, since this runs on a login node."""

import math
import os
import re
import socket
import statistics
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megatfm.config.section import check_path
from megatfm.errors import UsageError
from megatfm.launchers.job import JobState
from megatfm.launchers.record import (
    EVENTS,
    LAST_EVENT_STATES,
    METRICS,
    AttemptLog,
    latest_checkpoint_step,
    number_of,
    read_json,
    read_launch_record,
    tail_jsonl,
)
from megatfm.launchers.run_jobs import active_jobs, evaluation_job_ids, foreground_state, run_job_state

SPEED_STEPS = 50
"""Last steps over whose median speed and time left are estimated."""
HEARTBEAT_SECONDS = 30.0
"""A run's lock moves every few seconds while it trains, wherever it does."""
CLOCK_SECONDS = 60.0
"""By how much the clocks of two machines may differ."""
_PART = re.compile(r"([a-z-]+)\.\d{5}\.json")


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
    """Stage and parts of a preparation."""

    def as_dict(self) -> dict[str, Any]:
        """For programs: JSON's types only."""
        facts = {**vars(self), "run": str(self.run), "state": self.state.name, "detail": self.state.reason}
        return {"run": facts.pop("run"), "state": facts.pop("state"), **facts}


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
    """Status of a run now."""
    records = tail_jsonl(run / METRICS, SPEED_STEPS)
    events = tail_jsonl(run / EVENTS, 1)
    steps, last = _steps(run), records[-1] if records else {}
    state = launched_state(run) or _state_from_lock(run, events)
    prepares = is_prep_run(run)
    if prepares:
        state = prep_job_state(run, state)
    for job, evaluation in active_jobs(evaluation_job_ids(run)).items():
        detail = f"{state.reason}; " if state.reason else ""
        state = replace(state, reason=f"{detail}evaluation in job {job}: {evaluation.name}")
    last_step = number_of(last, "step")
    step = int(last_step) if last_step is not None and math.isfinite(last_step) else None
    seconds = [value for record in records if (value := number_of(record, "step_seconds")) is not None]
    speeds = [value for record in records if (value := number_of(record, "tokens_per_second")) is not None]
    seconds_left = (
        (steps - step) * statistics.median(seconds) if seconds and steps and step is not None else None
    )
    detail = f"{events[0].get('event')}: {events[0].get('detail')}" if events else ""
    return RunStatus(
        run=run,
        state=state,
        launcher=str(read_launch_record(run).get("launcher", "")),
        step=step,
        steps=steps,
        loss=number_of(last, "loss"),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=None if state.is_over or state.is_unknown else seconds_left,
        restarts=_restarts(run),
        checkpoint=latest_checkpoint_step(run),
        event=detail,
        work=prep_progress(run) if prepares else "",
    )


def launched_state(run: Path) -> JobState | None:
    """State of the jobs or processes that launched a run last; None if no launch is recorded."""
    launcher = read_launch_record(run).get("launcher")
    if launcher == "slurm":
        return run_job_state(run)
    return foreground_state(run) if launcher in ("local", "mpi") else None


def _steps(run: Path) -> int | None:
    """Steps that are due: of the config that trains, else of the one that is queued."""
    for name in ("config.toml", "slurm/config.toml"):
        try:
            return int(tomllib.loads((run / name).read_text(encoding="utf-8"))["train"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _restarts(run: Path) -> int:
    """Restarts of the last submission."""
    attempts = AttemptLog(run).attempts
    return sum(attempt.submission == attempts[-1].submission for attempt in attempts) - 1 if attempts else 0


def _state_from_lock(run: Path, events: list[dict[str, Any]]) -> JobState:
    """A run that was started by hand: its lock says whether it trains, its last event what became of it."""
    holder = read_json(run / "lock", {})
    if isinstance(holder, dict) and "pid" in holder and _lock_is_held(run, holder):
        return JobState("RUNNING", f"pid {holder['pid']} on {holder.get('host')}", number_of(holder, "time"))
    event = str(events[0].get("event")) if events else ""
    return JobState(LAST_EVENT_STATES.get(event, "ENDED"), str(events[0].get("detail", "")) if events else "")


def _lock_is_held(run: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder of a run's lock lives: its process here, or a holder on another machine."""
    if holder.get("host") == socket.gethostname():
        lock_time, pid = number_of(holder, "time"), number_of(holder, "pid")
        try:
            # One that began after the lock was taken got the number of a dead one.
            return pid is not None and psutil.Process(int(pid)).create_time() < (lock_time or math.inf) + 1
        except (psutil.Error, ValueError, OverflowError):
            return False
    try:
        moved = (run / "lock").stat().st_mtime
    except OSError:
        return False
    try:  # by the clock of the file server, from which this machine's may differ
        probe = run / f".now.{os.getpid()}"
        probe.touch()
        age = probe.stat().st_mtime - moved
        probe.unlink()
        return age < HEARTBEAT_SECONDS
    except OSError:  # a directory that can't be written to
        return time.time() - moved < HEARTBEAT_SECONDS + CLOCK_SECONDS


# --- preparations ---------------------------------------------------------------------------------------------------


def is_prep_run(run: Path) -> bool:
    """Whether a folder is of `megatfm launch` for a corpus; False for one that nothing launched."""
    return read_launch_record(run).get("kind") == "prep"


def corpus_dir(run: Path) -> Path:
    """Corpus that a preparation writes: the job folder lies beside it, as NAME.jobs."""
    return run.with_name(run.name.removesuffix(".jobs"))


def prep_job_state(run: Path, state: JobState) -> JobState:
    """State of a preparation: DONE only if prep.json exists; an ended job without it is FAILED."""
    if (corpus_dir(run) / "prep.json").is_file():
        return replace(state, name="DONE") if state.is_over else state
    if state.is_over and state.name in ("COMPLETED", "DONE", "GONE"):
        return JobState("FAILED", f"{state.reason}; the corpus is not finished: start the same command again")
    return state


def prep_progress(run: Path) -> str:
    """The stage at which a preparation is, and how many of its parts are done; nothing where there is none."""
    if (corpus_dir(run) / "prep.json").is_file():
        return "the corpus is finished"
    parts: dict[str, int] = {}
    newest = 0.0, ""
    try:
        for path in (corpus_dir(run) / ".work").rglob("*.json"):  # below a folder for each set of settings
            if match := _PART.fullmatch(path.name):
                parts[match[1]] = parts.get(match[1], 0) + 1
                newest = max(newest, (path.stat().st_mtime, match[1]))
    except OSError:  # not begun, or finished at this moment
        return ""
    return f"{newest[1]}: {parts[newest[1]]} parts done" if newest[1] else ""
