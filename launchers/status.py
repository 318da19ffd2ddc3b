"""Status of a run or a preparation, from the files in its directory. Imports no torch: it runs on login nodes."""

import math
import re
import statistics
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatfm.config.section import check_path
from megatfm.errors import UsageError
from megatfm.launchers.attempts import AttemptLog
from megatfm.launchers.job import JobState
from megatfm.launchers.record import (
    EVENT_STATES,
    EVENTS,
    METRICS,
    find_latest_checkpoint_step,
    get_finite_number,
    get_number,
    read_last_state_event,
    read_launch_record,
    tail_jsonl,
)
from megatfm.launchers.run_jobs import (
    CLOCK_SKEW_SECONDS,
    find_active_evaluations,
    get_foreground_state,
    get_locked_state,
    get_run_job_state,
)

SPEED_STEPS = 50
"""Number of last steps whose median gives speed and time left."""
_PART = re.compile(r"([a-z0-9_-]+)\.\d{5}\.json")
"""Commit of a part of a stage, such as `clean.00007.json` or `dedup-0-minhash-sort.00007.json`."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment. Unknown values are None."""

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
    """Evaluation jobs that wait or run, or the stage of a preparation and its number of finished parts."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON's types."""
        fields = {**vars(self), "run": str(self.run), "state": self.state.name, "detail": self.state.reason}
        return {"run": fields.pop("run"), "state": fields.pop("state"), **fields}


def resolve_run_dir(path: Path) -> Path:
    """Return the absolute path of a run directory. Raises UsageError if it isn't one."""
    if not is_run_dir(path):
        raise UsageError(f"{path}: not a run directory: give one such as runs/quickstart")
    return check_path(path.absolute())


def is_run_dir(path: Path) -> bool:
    """Return whether a folder is a run directory, even if the run hasn't started yet."""
    return any((path / name).is_file() for name in ("config.toml", "launch.json", METRICS))


def list_run_dirs() -> list[Path]:
    """Return the run directories under runs/. Raises UsageError if there is none."""
    folders = sorted(Path("runs").iterdir()) if Path("runs").is_dir() else []
    if not (runs := [path.absolute() for path in folders if is_run_dir(path)]):
        raise UsageError("no runs under runs/ here: name a run directory")
    return runs


def get_run_status(run: Path) -> RunStatus:
    """Return the present status of a run."""
    records = tail_jsonl(run / METRICS, SPEED_STEPS)
    events = tail_jsonl(run / EVENTS, 1)
    steps, last = _read_steps(run), records[-1] if records else {}
    state = get_run_state(run)
    is_prep = is_prep_run(run)
    if is_prep:
        state = correct_prep_job_state(run, state)
    work = [describe_prep_progress(run)] if is_prep else []
    work += [f"evaluation in job {job}: {state.name}" for job, state in find_active_evaluations(run).items()]
    last_step = get_finite_number(last, "step")
    step = int(last_step) if last_step is not None else None
    seconds = [value for record in records if (value := get_finite_number(record, "step_seconds")) is not None]
    speeds = [value for record in records if (value := get_finite_number(record, "tokens_per_second")) is not None]
    seconds_left = max(0, steps - step) * statistics.median(seconds) if seconds and steps and step is not None else None
    detail = f"{events[0].get('event')}: {events[0].get('detail')}" if events else ""
    return RunStatus(
        run=run,
        state=state,
        launcher=str(read_launch_record(run).get("launcher", "")),
        step=step,
        steps=steps,
        loss=get_number(last, "loss"),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=None if state.is_over or state.is_unknown else seconds_left,
        restarts=_count_restarts(run),
        checkpoint=find_latest_checkpoint_step(run),
        event=detail,
        work="; ".join(filter(None, work)),
    )


def get_run_state(run: Path) -> JobState:
    """Return the state of a run, however it was started; that of a run which never was is final."""
    return get_launched_state(run) or _infer_state(run)


def get_launched_state(run: Path) -> JobState | None:
    """Return the state of a run's last launch, or of a process that was started by hand since; None if no launch is
    recorded."""
    launcher = read_launch_record(run).get("launcher")
    if launcher not in ("slurm", "local", "mpi"):
        return None
    state = get_run_job_state(run) if launcher == "slurm" else get_foreground_state(run)
    last_event_time = get_finite_number(read_last_state_event(run), "time") or 0.0
    ended_at = math.inf if state.since is None else state.since + CLOCK_SKEW_SECONDS * (launcher == "slurm")
    is_continued = get_locked_state(run) is not None or last_event_time > ended_at
    return _infer_state(run) if state.is_over and is_continued else state


def _read_steps(run: Path) -> int | None:
    """Return `train.steps` of the run's config, else of the config of its queued job."""
    for name in ("config.toml", "slurm/config.toml"):
        try:
            return int(tomllib.loads((run / name).read_text(encoding="utf-8-sig"))["train"]["steps"])
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError):
            continue
    return None


def _count_restarts(run: Path) -> int:
    """Return the number of restarts of the last submission."""
    attempts = AttemptLog(run).attempts
    return sum(attempt.submission == attempts[-1].submission for attempt in attempts) - 1 if attempts else 0


def _infer_state(run: Path) -> JobState:
    """Return the state of a run without launch record: RUNNING if its lock is held, else from its events."""
    event = read_last_state_event(run)
    ended = JobState(EVENT_STATES.get(str(event.get("event")), "ENDED"), str(event.get("detail", "")))
    return get_locked_state(run) or ended


# --- preparations ---------------------------------------------------------------------------------------------------


def is_prep_run(run: Path) -> bool:
    """Return whether a folder is the run directory of `megatfm launch --prep`."""
    return read_launch_record(run).get("kind") == "prep"


def get_corpus_dir(run: Path) -> Path:
    """Return the folder in which a preparation makes its corpus. Its run directory is beside it, as FOLDER.jobs."""
    return run.with_name(run.name.removesuffix(".jobs"))


def correct_prep_job_state(run: Path, state: JobState) -> JobState:
    """Correct the state of a preparation's jobs: an ended job is DONE if prep.json exists, else FAILED.

    A corpus at a URL leaves no file here; it is finished if the job ended without an error.
    """
    if (get_corpus_dir(run) / "prep.json").is_file():
        return replace(state, name="DONE") if state.is_over else state
    if "corpus_url" in read_launch_record(run) and state.name in ("COMPLETED", "DONE"):
        return replace(state, name="DONE")
    if state.is_over and state.name in ("COMPLETED", "DONE", "GONE"):
        return JobState("FAILED", f"{state.reason}; the corpus is not finished: start the same command again")
    return state


def describe_prep_progress(run: Path) -> str:
    """Return a preparation's newest stage and its number of finished parts; empty if there is none."""
    if (get_corpus_dir(run) / "prep.json").is_file():
        return "the corpus is finished"
    n_parts: Counter[str] = Counter()
    newest_time, newest_stage = 0.0, ""
    try:
        # .work has a folder for each version of the settings.
        for path in (get_corpus_dir(run) / ".work").rglob("*.json"):
            if match := _PART.fullmatch(path.name):
                n_parts[match[1]] += 1
                newest_time, newest_stage = max((newest_time, newest_stage), (path.stat().st_mtime, match[1]))
    except OSError:  # not begun, or just finished
        return ""
    return f"{newest_stage}: {n_parts[newest_stage]} parts done" if newest_stage else ""
