"""How far a run is, from what it leaves in its directory. No torch: this runs on a login node."""

import os
import socket
import statistics
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatfm.config.base import check_path
from megatfm.errors import UsageError
from megatfm.launchers.files import EVENTS, METRICS, last_records, launched, newest_step, read_json
from megatfm.launchers.job import Launcher, State
from megatfm.launchers.local import Local
from megatfm.launchers.mpi import Mpi
from megatfm.launchers.preparation import believed, is_preparation, work_done
from megatfm.launchers.queue import alive, evaluations_of
from megatfm.launchers.restarts import Restarts
from megatfm.launchers.site import Site
from megatfm.launchers.slurm import Slurm

SPEED_STEPS = 50
"""Last steps over whose median speed and time left are estimated."""
HEARTBEAT_SECONDS = 30.0
"""A run's lock moves every few seconds while it trains, wherever it does."""


@dataclass(frozen=True)
class Progress:
    """One run at one moment. What is not known is None."""

    run: Path
    state: State
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

    def plain(self) -> dict[str, Any]:
        """For programs: JSON's types only."""
        facts = {**vars(self), "run": str(self.run), "state": self.state.word, "detail": self.state.detail}
        return {"run": facts.pop("run"), "state": facts.pop("state"), **facts}


def launcher_of(run: Path) -> Launcher | None:
    """What started a run last; None where that was neither `megatfm launch` nor noted."""
    known: dict[str, Launcher] = {"slurm": Slurm(Site()), "local": Local(), "mpi": Mpi()}
    return known.get(str(launched(run).get("launcher")))


def check_run(path: Path) -> Path:
    """The run directory that a user names. Raises UsageError where there is none."""
    if not is_run(path):
        raise UsageError(f"{path}: not a run directory: give one such as runs/quickstart")
    return check_path(path.absolute())


def is_run(path: Path) -> bool:
    """Whether a folder holds any trace of a run, though it may not have started yet."""
    return any((path / name).is_file() for name in ("config.toml", "launch.json", METRICS))


def runs_here() -> list[Path]:
    """The run directories under runs/. Raises UsageError where there is none."""
    folders = sorted(Path("runs").iterdir()) if Path("runs").is_dir() else []
    if not (runs := [path.absolute() for path in folders if is_run(path)]):
        raise UsageError("no runs under runs/ here: name a run directory")
    return runs


def look(run: Path) -> Progress:
    """How a run is now."""
    launcher = launcher_of(run)
    records = last_records(run / METRICS, SPEED_STEPS)
    events = last_records(run / EVENTS, 1)
    steps, last = _steps(run), records[-1] if records else {}
    state = launcher.status(run) if launcher else _without_launcher(run, events)
    prepares = is_preparation(run)
    if prepares:
        state = believed(run, state)
    for job, evaluation in alive(evaluations_of(run)).items():
        detail = f"{state.detail}; " if state.detail else ""
        state = replace(state, detail=f"{detail}evaluation in job {job}: {evaluation.word}")
    step = last.get("step")
    seconds = [float(each["step_seconds"]) for each in records if "step_seconds" in each]
    speeds = [float(each["tokens_per_second"]) for each in records if "tokens_per_second" in each]
    left = (steps - step) * statistics.median(seconds) if seconds and steps and step is not None else None
    detail = f"{events[0].get('event')}: {events[0].get('detail')}" if events else ""
    return Progress(
        run=run,
        state=state,
        launcher=str(launched(run).get("launcher", "")),
        step=step,
        steps=steps,
        loss=float(last["loss"]) if "loss" in last else None,  # JSON has "NaN" as a string
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=None if state.is_over or state.is_unknown else left,
        restarts=_restarts(run),
        checkpoint=newest_step(run),
        event=detail,
        work=work_done(run) if prepares else "",
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
    attempts = Restarts(run).attempts
    return sum(each.submission == attempts[-1].submission for each in attempts) - 1 if attempts else 0


def _without_launcher(run: Path, events: list[dict[str, Any]]) -> State:
    """A run that was started by hand: its lock says whether it trains, its last event what became of it."""
    holder = read_json(run / "lock", {})
    if isinstance(holder, dict) and "pid" in holder and _holds(run, holder):
        return State("RUNNING", f"pid {holder['pid']} on {holder.get('host')}", holder.get("time"))
    words = {"finished": "DONE", "stopped": "STOPPED"}
    event = str(events[0].get("event")) if events else ""
    return State(words.get(event, "ENDED"), str(events[0].get("detail", "")) if events else "")


def _holds(run: Path, holder: dict[str, Any]) -> bool:
    try:
        if holder.get("host") == socket.gethostname():
            os.kill(int(holder["pid"]), 0)
            return True
        # Both times are the file server's: the clock of this machine may differ from it.
        now = run / f".now.{os.getpid()}"
        now.touch()
        age = now.stat().st_mtime - (run / "lock").stat().st_mtime
        now.unlink()
        return age < HEARTBEAT_SECONDS
    except ProcessLookupError:
        return False
    except OSError:
        return True  # no right to look closer: believe what it says
